"""R_L(x, t): one energy, and every derivative of it that the project offers."""

import math

import pytest
import torch
from dense import (
    BACK_ENDS,
    EPS,
    TINY,
    as_at_the_start,  # noqa: F401  (a fixture for every test)
    convolution,
    normal,
    random_prior,
    splines,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from gncprior.buffers import Buffers
from gncprior.errors import GncpriorError
from gncprior.filters import convolve, zero_mean
from gncprior.native import kernels
from gncprior.prior import Architecture, Prior
from gncprior.splines import quartic, soft_histogram

KINDS = [
    {"layers": 1},
    {"layers": 2},
    {"layers": 3},
    {"layers": 1, "channels": 3},
    {"layers": 2, "channels": 3, "scaled": True},
    {"layers": 1, "scaled": True},
]
FULL_SIZE = [  # a table in registers, one that is too large for them, even filters
    {"layers": 1, "filters": 48, "first_size": 7, "x_knots": 63},
    {"layers": 1, "channels": 3, "filters": 13, "first_size": 4, "x_knots": 100},
    {"layers": 2, "filters": 13, "first_size": 7, "inner_size": 4, "x_knots": 64},
]
SMALL = {"filters": 5, "first_size": 5, "inner_size": 3, "x_knots": 15, "t_knots": 5}


def name(kind: dict) -> str:
    return " ".join(f"{key} {value}" for key, value in kind.items())


def frozen(prior: Prior) -> Prior:
    return prior.requires_grad_(False)


class Call(nn.Module):
    """A method of the prior as a module, so that parameters can be arguments."""

    def __init__(self, prior: Prior, method: str) -> None:
        super().__init__()
        self.prior, self.method = prior, method

    def forward(self, *arguments: Tensor):
        return getattr(self.prior, self.method)(*arguments)


def check_all(check, prior: Prior, method: str, *arguments: Tensor) -> None:
    """gradcheck or gradgradcheck of a method in its arguments and every parameter."""
    call = Call(prior, method)
    parameters = {key: p.detach().clone().requires_grad_() for key, p in call.named_parameters()}
    n = len(arguments)

    def function(*inputs: Tensor):
        values = dict(zip(parameters, inputs[n:], strict=True))
        return torch.func.functional_call(call, values, inputs[:n])

    check(
        function, [*(a.requires_grad_() for a in arguments), *parameters.values()], fast_mode=True
    )


# ---------------------------------------------------------------- the definition


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_energy_is_the_sum_of_the_last_features(kind):
    """Against the formula of the paper, with dense splines and padded convolutions."""
    prior = frozen(random_prior(**SMALL, **kind))
    a = prior.architecture
    x = normal(2, a.channels, 6, 7)
    t_hat = torch.tensor([-7.0, -0.6], dtype=torch.float64)
    h = x
    for i, phi in enumerate(prior.splines):
        w = prior.filters[i]
        h = convolution(h, zero_mean(w) if i == 0 else w)
        if phi.spread is not None:
            h = h / (phi.spread**2 + t_hat.exp()[:, None]).sqrt()[..., None, None]
        z = (t_hat[:, None] - a.t_grid.centres()) / a.t_grid.gamma
        c = torch.einsum("bo,jol->bjl", quartic(z), phi.weight)
        h = splines(h, c, a.x_grid)
    energy = prior.energy(x, t_hat)
    assert energy.shape == (2,)
    assert energy.dtype == torch.float64
    torch.testing.assert_close(energy, h.sum((1, 2, 3)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_all_that_gives_an_energy_or_a_derivative_agrees(kind):
    """∇R = autograd = finite differences, and likewise in t̂ and for the Hessian product."""
    prior = random_prior(**SMALL, **kind)
    x = normal(2, prior.architecture.channels, 7, 6)
    t_hat = torch.tensor([-6.3, -1.1], dtype=torch.float64)
    v = normal(*x.shape, seed=5)
    x_, t_ = x.clone().requires_grad_(), t_hat.clone().requires_grad_()
    energy = prior.energy(x_, t_)
    dx, dt = torch.autograd.grad(energy.sum(), (x_, t_), create_graph=True)
    (hv,) = torch.autograd.grad((dx * v).sum(), x_, retain_graph=True)
    (dtt,) = torch.autograd.grad(dt.sum(), t_)
    energy, dx, dt = energy.detach(), dx.detach(), dt.detach()
    close = {"rtol": 1e-9, "atol": 1e-9}
    tracked = prior.energy_and_grad(x, t_hat)  # its parameters are watched
    torch.testing.assert_close(tracked[0].detach(), energy, **close)
    torch.testing.assert_close(tracked[1].detach(), dx, **close)
    assert tracked[1].requires_grad
    frozen(prior)
    for result, expected in [
        (prior.grad(x, t_hat), dx),
        (prior.energy_and_grad(x, t_hat), (energy, dx)),
        (prior.joint_grad(x, t_hat), (energy, dx, dt)),
        (prior.t_derivatives(x, t_hat), (dt, dtt)),
        (prior.hessian_product(x, t_hat, v), hv),
    ]:
        torch.testing.assert_close(result, expected, **close)
    h = 1e-5

    def difference(function, *steps: float) -> Tensor:
        dx, dt = steps
        plus, minus = (function(x + s * dx * v, t_hat + s * dt) for s in (h, -h))
        return (plus - minus) / (2 * h)

    numbers = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(difference(prior.energy, 1, 0), (dx * v).sum((1, 2, 3)), **numbers)
    torch.testing.assert_close(difference(prior.energy, 0, 1), dt, **numbers)
    torch.testing.assert_close(difference(prior.grad, 1, 0), hv, **numbers)
    rate = difference(lambda *a: prior.t_derivatives(*a)[0], 0, 1)
    torch.testing.assert_close(rate, dtt, **numbers)


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_energy_and_gradient_are_differentiable_in_everything(check, kind):
    prior = random_prior(**TINY, **kind)
    x = normal(1, prior.architecture.channels, 3, 2, seed=9)
    t_hat = torch.tensor([-5.1], dtype=torch.float64)
    check_all(check, prior, "energy", x, t_hat)
    check_all(check, prior, "grad", x, t_hat)


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_rates_and_hessian_products_are_differentiable_in_everything(check, layers):
    prior = random_prior(**TINY, layers=layers)
    x = normal(1, 1, 3, 2, seed=9)
    t_hat = torch.tensor([-5.1], dtype=torch.float64)
    check_all(check, prior, "t_derivatives", x, t_hat)
    check_all(check, prior, "hessian_product", x, t_hat, normal(*x.shape, seed=10))


def test_hessian_is_symmetric():
    prior = frozen(random_prior(**SMALL, layers=2))
    x, v, u = (normal(1, 1, 5, 4, seed=i) for i in range(3))
    lhs = (prior.hessian_product(x, -3.0, v) * u).sum()
    rhs = (prior.hessian_product(x, -3.0, u) * v).sum()
    torch.testing.assert_close(lhs, rhs, rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------- every back end


def everything(prior: Prior, x: Tensor, t_hat: Tensor, v: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [
            *prior.joint_grad(x, t_hat),
            prior.grad(x, t_hat),
            *prior.t_derivatives(x, t_hat),
            prior.hessian_product(x, t_hat, v),
        ]


def roundings(prior: Prior) -> int:
    """Of a feature, a sum of n products whose position is found among N knots: n + N."""
    a = prior.architecture
    inner = a.filters * a.inner_size**2 if a.layers > 1 else 0
    return a.channels * a.first_size**2 + inner + a.x_knots


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("kind", [*KINDS, *FULL_SIZE], ids=name)
def test_float32_is_as_good_as_the_numbers_it_is_given(back_end, kind):
    """What float32 computes is right for parameters and images that are changed by its roundings."""
    kernels.select(back_end)
    prior = frozen(random_prior(torch.float32, **SMALL | kind))
    a = prior.architecture
    x = normal(2, a.channels, 23, 37, dtype=torch.float32)
    t_hat = torch.tensor([-6.3, -1.1])
    v = normal(*x.shape, seed=5, dtype=torch.float32)
    ours = everything(prior, x, t_hat, v)
    assert all(r.dtype == d for r, d in zip(ours, [torch.float64, torch.float32], strict=False))
    exact = prior.double()
    inputs = [x.double(), t_hat.double(), v.double()]
    theirs = everything(exact, *inputs)
    lost = roundings(prior) * EPS
    bounds = [torch.zeros((), dtype=torch.float64) for _ in theirs]
    parameters = [p.clone() for p in exact.parameters()]
    for seed in range(3):

        def disturbed(t: Tensor, seed=seed) -> Tensor:
            return t * (1 + lost * normal(*t.shape, seed=seed + 100))

        for p, q in zip(exact.parameters(), parameters, strict=True):
            p.copy_(disturbed(q))
        changed = everything(exact, *map(disturbed, inputs))
        for i, (one, other) in enumerate(zip(changed, theirs, strict=True)):
            bounds[i] = torch.maximum(bounds[i], (one - other).norm())
    for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (one - other).norm() <= 2 * bounds[i], i
        assert bounds[i] < 0.1 * other.norm()  # the bound says something


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("layers", [1, 2])
def test_threads_agree(back_end, layers):
    """The kernels do bit for bit; what torch does in between may sum in another order."""
    kernels.select(back_end)
    prior = frozen(random_prior(torch.float32, **SMALL, layers=layers))
    x = normal(2, 1, 90, 150, dtype=torch.float32)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(prior.joint_grad(x, -3.0))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a - b).norm() <= roundings(prior) * EPS * a.norm()


@pytest.mark.parametrize("back_end", kernels.supported())
@pytest.mark.parametrize("layers", [1, 2])
def test_training_gradients_by_the_kernels_are_those_of_the_reference(back_end, layers):
    """The derivative of ‖∇R‖² + (∂R/∂t̂)² in every parameter, in float32 and in float64."""
    kernels.select(back_end)
    prior = random_prior(torch.float32, **SMALL, layers=layers)
    x = normal(2, 1, 12, 11, dtype=torch.float32)

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        prior.to(dtype)
        g = prior.grad(x.to(dtype), -3.0)
        rate, _ = prior.t_derivatives(x.to(dtype), -3.0)
        loss = g.square().sum() + rate.square().sum()
        return list(torch.autograd.grad(loss, list(prior.parameters())))

    ours, theirs = gradients(torch.float32), gradients(torch.float64)
    for one, other in zip(ours, theirs, strict=True):
        # two sweeps forth and two back, each a sum of up to 45 products among 15 knots
        assert (one - other).norm() <= 4 * (45 + 15) * EPS * 4 * other.norm()


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (1, 40), (3, 3), (5, 7), (31, 33)])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[3]], ids=name)
def test_small_and_odd_images(back_end, shape, kind):
    kernels.select(back_end)
    prior = frozen(random_prior(torch.float32, **SMALL | {"first_size": 7}, **kind))
    x = normal(2, prior.architecture.channels, *shape, dtype=torch.float32)
    energy, grad, dt = prior.joint_grad(x, -2.0)
    assert grad.shape == x.shape
    exact = prior.double()
    theirs = exact.joint_grad(x.double(), -2.0)
    # one pixel alone sees no contrast and its gradient cancels: so errors are held against what is
    # usual for so many pixels
    usual = exact.joint_grad(normal(2, x.shape[1], 9, 9, seed=1), -2.0)
    pixels = shape[0] * shape[1] / 81
    for i, (one, other) in enumerate(zip((energy, grad, dt), theirs, strict=True)):
        size = other.norm() + usual[i].norm() * (pixels if i != 1 else math.sqrt(pixels))
        assert (one - other).norm() <= 8 * roundings(prior) * EPS * size


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_the_energy_is_blind_to_a_constant(back_end, kind):
    kernels.select(back_end)
    for dtype, limit in [(torch.float64, 1e-10), (torch.float32, 1000 * EPS)]:
        prior = frozen(random_prior(dtype, **SMALL, **kind))
        x = normal(2, prior.architecture.channels, 9, 8, dtype=dtype)
        e, g = prior.energy_and_grad(x, -2.0)
        e2, g2 = prior.energy_and_grad(x + 0.75, -2.0)
        size = convolve(x.abs() + 1, zero_mean(prior.filters[0]).abs()).abs().sum()
        assert (e - e2).abs().max() <= limit * size
        assert (g - g2).norm() <= limit * g.norm()
        assert g.sum((1, 2, 3)).abs().max() <= limit * g.abs().sum()


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("kind", KINDS[:3], ids=name)
def test_a_batch_equals_its_images_with_their_own_t(back_end, kind):
    kernels.select(back_end)
    prior = frozen(random_prior(torch.float32, **SMALL, **kind))
    x = normal(4, 1, 10, 13, dtype=torch.float32)
    t_hat = torch.tensor([-20.0, -5.0, -0.3, 1.0])
    v = normal(*x.shape, seed=1, dtype=torch.float32)
    whole = everything(prior, x, t_hat, v)
    for b in range(4):
        alone = everything(prior, x[b : b + 1], t_hat[b : b + 1], v[b : b + 1])
        as_number = everything(prior, x[b : b + 1], float(t_hat[b]), v[b : b + 1])
        for one, other, number in zip(whole, alone, as_number, strict=True):
            # the same sums, but torch may order those over the batch otherwise
            torch.testing.assert_close(
                one[b : b + 1], other, rtol=64 * EPS, atol=64 * EPS * float(one.abs().max())
            )
            assert torch.equal(other, number)


# ---------------------------------------------------------------- states that must not leak


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("kind", KINDS[:4], ids=name)
def test_reused_buffers_give_the_same_results(back_end, kind):
    kernels.select(back_end)
    prior = frozen(random_prior(torch.float32, **SMALL, **kind))
    buffers = Buffers()
    for i, shape in enumerate([(9, 8), (4, 5), (9, 8), (12, 3)]):
        x = normal(2, prior.architecture.channels, *shape, seed=i, dtype=torch.float32)
        fresh = prior.joint_grad(x, -2.0)
        again = prior.joint_grad(x, -2.0, buffers=buffers)
        for one, other in zip(fresh, again, strict=True):
            assert torch.equal(one, other)
        kept = again[1].clone()
        e, g = prior.energy_and_grad(x, -2.0, buffers=buffers)
        assert g.data_ptr() == again[1].data_ptr()  # it is the buffer
        assert torch.equal(g, kept)
        assert torch.equal(e, fresh[0])
        assert torch.equal(prior.grad(x, -2.0, buffers=buffers), kept)
        assert fresh[1].data_ptr() != g.data_ptr()


@pytest.mark.parametrize("kind", KINDS, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_are_left_alone_and_no_graph_is_kept(kind, dtype):
    prior = random_prior(dtype, **SMALL, **kind)
    x = normal(2, prior.architecture.channels, 6, 5, dtype=dtype).requires_grad_()
    t_hat = torch.tensor([-4.0, -2.0], dtype=dtype)
    v = normal(*x.shape, seed=1, dtype=dtype)
    watched = [x, t_hat, v, *prior.parameters(), *prior.buffers()]
    before = [t.detach().clone() for t in watched]
    results = everything(prior, x, t_hat, v)
    with torch.no_grad():
        results += [prior.energy(x, t_hat), *prior.energy_and_grad(x, t_hat)]
    results += prior.joint_grad(x, t_hat)  # promises no graph by itself
    assert all(r.grad_fn is None and not r.requires_grad for r in results)
    assert prior.energy(x, t_hat).requires_grad
    assert prior.grad(x, t_hat).requires_grad
    assert all(torch.equal(a, b) for a, b in zip(watched, before, strict=True))
    assert all(t.grad is None for t in watched)


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_state_dict_round_trip(kind):
    prior = frozen(random_prior(**SMALL, **kind))
    other = frozen(Prior(prior.architecture).double())
    other.load_state_dict(prior.state_dict())
    x = normal(1, prior.architecture.channels, 6, 5)
    assert torch.equal(prior.energy(x, -3.0), other.energy(x, -3.0))
    larger = Prior(Architecture(**SMALL | {"filters": 6}, **kind))
    with pytest.raises(RuntimeError, match="size mismatch"):
        larger.load_state_dict(prior.state_dict())


# ---------------------------------------------------------------- extremes


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("kind", KINDS[:4], ids=name)
def test_large_images_values_stay_finite_and_the_energy_grows(back_end, kind):
    kernels.select(back_end)
    prior = frozen(Prior(Architecture(**SMALL, **kind)).start())
    x = normal(1, prior.architecture.channels, 8, 9, dtype=torch.float32)
    x = x / x.abs().max()
    energies = []
    for size in (1.0, 1e2, 1e4, 1e6):
        results = everything(prior, size * x, torch.tensor([-1.0]), x)
        assert all(r.isfinite().all() for r in results)
        energies.append(float(results[0]))
    assert energies == sorted(energies)
    assert energies[-1] > 1e9


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_pixels_do_no_harm_to_others(back_end, value):
    """They spoil what their filters see and nothing else, least of all the process."""
    kernels.select(back_end)
    prior = frozen(random_prior(torch.float32, **SMALL, layers=1))
    x = normal(2, 1, 30, 40, dtype=torch.float32)
    clean = prior.joint_grad(x, -2.0)
    x[0, 0, 3, 3] = value
    energy, grad, dt = prior.joint_grad(x, -2.0)
    assert not energy[0].isfinite()
    assert torch.equal(energy[1], clean[0][1])
    assert torch.equal(dt[1], clean[2][1])
    far = (slice(0, 1), slice(None), slice(10, None), slice(10, None))
    torch.testing.assert_close(grad[far], clean[1][far])
    assert torch.equal(grad[1], clean[1][1])


@pytest.mark.parametrize("scaled", [False, True])
@given(t_hat=st.floats(-1e4, 1e4))
@settings(max_examples=25, deadline=None)
def test_t_outside_its_range_is_clamped(scaled, t_hat):
    prior = frozen(random_prior(**TINY, scaled=scaled))
    low, high = prior.t_hat_range
    assert (low, high) == (pytest.approx(math.log(1e-4)), 0)
    x = normal(1, 1, 4, 4)
    clamped = min(max(t_hat, low), high)
    assert torch.equal(prior.grad(x, t_hat), prior.grad(x, clamped))
    rates = prior.t_derivatives(x, t_hat)
    outside = t_hat < low or t_hat > high
    assert all(bool(rate == 0) == outside for rate in rates)


# ---------------------------------------------------------------- soft histogram, start, refusals


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("scaled", [False, True])
def test_one_layer_is_a_product_with_its_soft_histogram(back_end, scaled):
    """R = ⟨T, H⟩, R_t̂ = ⟨T', H⟩, R_t̂t̂ = ⟨T'', H⟩."""
    kernels.select(back_end)
    prior = frozen(random_prior(torch.float32, **SMALL, scaled=scaled))
    x = normal(2, 1, 20, 30, dtype=torch.float32)
    t_hat = torch.tensor([-6.0, -1.5])
    (phi,) = prior.collapse(t_hat, derivatives=2)
    u = convolve(x, prior.kernels()[0])
    histogram = soft_histogram(u, phi.inverse_gamma, phi.knots)
    sums = [(table.double() * histogram).sum((1, 2, 3)) for table in phi.tables]
    scale = [float((table.double().abs() * histogram.abs()).sum()) for table in phi.tables]
    whole = [prior.energy(x, t_hat), *prior.t_derivatives(x, t_hat)]
    for one, other, size in zip(sums, whole, scale, strict=True):
        assert (one - other).abs().max() <= 64 * EPS * size


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_the_start_is_the_energy_of_noise(kind):
    prior = frozen(Prior(Architecture(**kind)).start())
    assert prior.filters[0].shape == (48, prior.architecture.channels, 7, 7)
    norms = prior.filters[0].flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, torch.full((48,), 5.0))
    x = normal(1, prior.architecture.channels, 64, 64, dtype=torch.float32) * 0.1
    for t in (1e-4, 1e-2, 0.3, 1.0):
        expected = x.double().square().sum() / 2 / (t + 0.01)
        assert float(prior.energy(x, math.log(t)) / expected) == pytest.approx(1, rel=0.2)
    again = Prior(Architecture(**kind)).start()
    assert all(
        torch.equal(a, b) for a, b in zip(prior.parameters(), again.parameters(), strict=True)
    )


def test_more_filters_than_the_basis_has():
    prior = Prior(Architecture(filters=12, first_size=3)).start(gain=2.0)
    w = prior.filters[0]
    torch.testing.assert_close(w.flatten(1).norm(dim=1), torch.full((12,), 2.0))
    assert w.mean(dim=(1, 2, 3)).abs().max() < 1e-6


def test_what_does_not_fit_is_refused_with_a_sentence():
    prior = frozen(random_prior(torch.float32, **TINY))
    x = torch.zeros(2, 1, 4, 4)
    for bad in [x[0], x.expand(2, 3, 4, 4), x[:0], x.double()]:
        for method in (prior.energy, prior.grad, prior.joint_grad, prior.t_derivatives):
            with pytest.raises(GncpriorError, match=r"\.$"):
                method(bad, -1.0)
    with pytest.raises(GncpriorError, match="one value per image"):
        prior.energy(x, torch.zeros(3))
    with pytest.raises(GncpriorError, match="shape of x"):
        prior.hessian_product(x, -1.0, x[:1])
    for bad in [
        {"layers": 0}, {"filters": 0}, {"x_knots": 1}, {"t_min": 0.0}, {"t_min": 2.0},
        {"t_max": math.inf}, {"x_range": -1.0},
    ]:  # fmt: skip
        with pytest.raises(GncpriorError, match=r"\.$"):
            Architecture(**bad)


def test_a_prior_of_the_scaled_image():
    prior = Prior(Architecture(layers=2, filters=4, first_size=3)).start()
    x = torch.rand(2, 1, 7, 6, generator=torch.Generator().manual_seed(0))
    scaled = prior.of_scaled(1.5)
    with torch.no_grad():
        torch.testing.assert_close(scaled.energy(x, -3.0), prior.energy(1.5 * x, -3.0))
        torch.testing.assert_close(scaled.grad(x, -3.0), 1.5 * prior.grad(1.5 * x, -3.0))
    assert not torch.equal(scaled.filters[0], prior.filters[0])
