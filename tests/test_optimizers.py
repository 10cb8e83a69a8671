"""AdaBelief, cosine and average against the formulas worked out by hand."""

import math

import pytest
import torch

from gncprior.optimizers import AdaBelief, Average, cosine, smoother


def by_hand(theta, gradients, lr, beta1=0.9, beta2=0.999, eps=1e-16, decay=0.0):
    """One number, in Python's floats."""
    m = s = 0.0
    for k, g in enumerate(gradients, start=1):
        theta *= 1 - lr * decay
        m = beta1 * m + (1 - beta1) * g
        s = beta2 * s + (1 - beta2) * (g - m) ** 2 + eps
        theta -= lr * (m / (1 - beta1**k)) / (math.sqrt(s / (1 - beta2**k)) + eps)
    return theta


def run(optimizer, parameters, gradients):
    for step in gradients:
        for p, g in zip(parameters, step, strict=True):
            p.grad = torch.full_like(p, g)
        optimizer.step()


@pytest.mark.parametrize("eps", [1e-16, 1e-8])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adabelief_by_hand(eps, decay):
    gradients = [0.5, -1.0, 0.25, 2.0, 2.0, 0.0]
    p = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    run(AdaBelief([p], lr=0.1, eps=eps, weight_decay=decay), [p], [[g] for g in gradients])
    assert p.item() == pytest.approx(by_hand(3.0, gradients, 0.1, eps=eps, decay=decay), rel=1e-12)


def test_first_step_in_numbers():
    # m = 0.1·2, s = 0.001·1.8², m̂ = 2, ŝ = 1.8²: the step is lr·2/1.8
    p = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    run(AdaBelief([p], lr=0.9), [p], [[2.0]])
    assert p.item() == pytest.approx(-1.0, rel=1e-12)


def test_groups_have_their_own_rates_and_many_tensors_are_one():
    gradients = [[0.5, -1.0, 3.0], [1.5, 1.0, -2.0], [0.5, 0.0, 1.0]]
    shapes = [(2, 3), (4,), (1, 1, 5)]
    params = [torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    optimizer = AdaBelief([{"params": params[:2], "lr": 0.1}, {"params": params[2:]}], lr=0.01)
    run(optimizer, params, gradients)
    for k, (p, lr) in enumerate(zip(params, (0.1, 0.1, 0.01), strict=True)):
        expected = by_hand(1.0, [step[k] for step in gradients], lr)
        torch.testing.assert_close(p.detach(), torch.full_like(p, expected), rtol=1e-12, atol=0)


def test_scales_multiply_the_rate_of_parts_of_a_parameter():
    gradients = [0.5, -1.0, 0.25]
    p = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    scales = [torch.tensor([[0.5], [0.01]], dtype=torch.float64)]
    run(AdaBelief([{"params": [p], "scales": scales}], lr=0.1), [p], [[g] for g in gradients])
    expected = torch.tensor([[by_hand(1.0, gradients, 0.1 * s)] * 3 for s in (0.5, 0.01)])
    torch.testing.assert_close(p.detach(), expected.double(), rtol=1e-6, atol=0)


def test_groups_without_gradients_rest_and_mixed_ones_are_refused():
    a, b = (torch.ones(1, requires_grad=True) for _ in range(2))
    optimizer = AdaBelief([{"params": [a]}, {"params": [b]}], lr=0.1)
    a.grad = torch.ones(1)
    optimizer.step()
    assert (a.item() < 1, b.item()) == (True, 1.0)
    assert [group["step"] for group in optimizer.param_groups] == [1, 0]
    with pytest.raises(ValueError, match="some have none"):
        AdaBelief([a, b]).step()


def test_weights_that_never_get_a_gradient_stay_to_the_last_bit():
    p = torch.full((3,), 1 / 3, requires_grad=True)
    run(AdaBelief([p], lr=1.0), [p], [[0.0]] * 50)
    assert torch.equal(p.detach(), torch.full((3,), 1 / 3))


def test_state_goes_through_a_dictionary():
    gradients = [[0.5], [-1.0], [0.25], [2.0]]
    whole = torch.ones(3, requires_grad=True)
    run(AdaBelief([whole], lr=0.1), [whole], gradients)
    halves = torch.ones(3, requires_grad=True)
    first = AdaBelief([halves], lr=0.1)
    run(first, [halves], gradients[:2])
    second = AdaBelief([halves], lr=0.5)
    second.load_state_dict(first.state_dict())
    run(second, [halves], gradients[2:])
    assert torch.equal(whole, halves)


def test_it_finds_the_minimum_of_a_badly_scaled_quadratic():
    scales = torch.tensor([1.0, 1e-3, 1e3], dtype=torch.float64)
    p = torch.ones(3, dtype=torch.float64, requires_grad=True)
    optimizer = AdaBelief([p], lr=0.05)

    def closure():
        optimizer.zero_grad()
        loss = 0.5 * (scales * p.square()).sum()
        loss.backward()
        return loss

    for k in range(500):
        optimizer.param_groups[0]["lr"] = 0.05 * cosine(k, 500, 0.0)
        last = optimizer.step(closure)
    assert float(p.detach().abs().max()) < 1e-2
    assert last.item() < 1e-2


def test_bad_settings_are_refused():
    p = torch.ones(1, requires_grad=True)
    for bad in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1e-8}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="AdaBelief needs"):
            AdaBelief([p], **bad)


def test_cosine():
    assert [cosine(k, 5, 0.0) for k in range(5)] == pytest.approx(
        [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0]
    )
    # the paper's 1e-3 → 5e-5 over 100 000 steps
    rates = [1e-3 * cosine(k, 100_000, 0.05) for k in (0, 99_999)]
    assert rates == pytest.approx([1e-3, 5e-5], rel=1e-9)
    assert [cosine(k, 9, 0.5, warmup=3) for k in (0, 1, 2, 3, 8)] == [0.25, 0.5, 0.75, 1.0, 0.5]
    assert cosine(0, 1, 0.1) == 1.0
    assert cosine(7, 5, 0.1) == pytest.approx(0.1)


def test_average_by_hand():
    w = torch.zeros(2, dtype=torch.float64)
    average = Average([w], decay=0.3)
    expected = 0.0
    for k, value in enumerate([1.0, 2.0, 4.0, 8.0, 16.0]):
        w.fill_(value)
        average.update()
        decay = min(0.3, (1 + k) / (10 + k))
        expected = decay * expected + (1 - decay) * value
    torch.testing.assert_close(average.tensors[0], torch.full_like(w, expected))
    other = torch.zeros(2, dtype=torch.float64)
    average.copy_to([other])
    assert torch.equal(other, average.tensors[0])
    assert float(w[0]) == 16.0


def test_average_without_memory_is_the_last_value():
    w = torch.tensor([0.1, 0.7])
    average = Average([w], decay=0.0)
    w.copy_(torch.tensor([0.3, 1 / 3]))
    average.update()
    assert torch.equal(average.tensors[0], w)
    with pytest.raises(ValueError, match="in \\[0, 1\\)"):
        Average([w], decay=1.0)


# ---------------------------------------------------------------- smoothing


def test_the_smoother_is_the_minimiser_it_is_defined_by():
    """S y minimises ½‖x − y‖² + ½κ‖Dx‖²: it keeps straight lines and shrinks the fastest ripple most."""
    n, kappa = 40, 3.0
    s = smoother(n, kappa).double()
    line = 2.0 - 0.3 * torch.arange(n, dtype=torch.float64)
    assert (s @ line - line).abs().max() < 1e-5
    y = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (s @ y).requires_grad_(True)
    value = 0.5 * (x - y).square().sum() + 0.5 * kappa * x.diff(n=2).square().sum()
    (slope,) = torch.autograd.grad(value, x)
    assert slope.abs().max() < 1e-5
    ripple = (-1.0) ** torch.arange(n, dtype=torch.float64)
    middle = (s @ ripple / ripple)[n // 2]
    assert float(middle) == pytest.approx(1 / (1 + 16 * kappa), rel=1e-3)
    assert torch.linalg.eigvalsh(s)[0] > 0


def test_a_smoothed_step_is_the_plain_step_times_the_smoothers_and_the_scales():
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(3, 4, 9, generator=generator)
    scales = torch.rand(4, 1, generator=generator)
    steps = []
    for options in ({}, {"smoothers": [smoother(4, 1.0), smoother(9, 2.0)], "scales": [scales]}):
        p = torch.nn.Parameter(start.clone())
        optimizer = AdaBelief([{"params": [p], **options}], lr=0.1)
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
        optimizer.step()
        steps.append(p.detach() - start)
    smooth = torch.einsum("pq,jql,lk->jpk", smoother(4, 1.0), steps[0], smoother(9, 2.0))
    assert (steps[1] - scales * smooth).abs().max() < 1e-6
