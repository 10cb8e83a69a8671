"""Natural-gradient steps: closed forms where the covariance of gradients is known."""

import pytest
import torch

from gncprior import GncpriorError
from gncprior.natural_gradient import NaturalGradient


def generator():
    return torch.Generator().manual_seed(0)


def positive(n, condition):
    """A symmetric positive matrix with eigenvalues between 1 and ``condition``."""
    q, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator()))
    return q @ torch.diag(torch.logspace(0, condition, n, 10.0, dtype=torch.float64)) @ q.T


def kronecker_looks(a, b):
    """Gradients (looks, n, m) whose second moments are exactly A ⊗ B."""
    root_a, root_b = torch.linalg.cholesky(a), torch.linalg.cholesky(b)
    count = len(a) * len(b)
    return [count**0.5 * torch.outer(u, v) for u in root_a.T for v in root_b.T]


def look_at(optimizer, tensor, gradients):
    for g in gradients:
        tensor.grad = g.reshape(tensor.shape)
        optimizer.look()


@pytest.mark.parametrize("shape", [(3, 8), (3, 2, 2, 2)], ids=["matrix", "filters"])
def test_a_step_divides_by_the_covariance_where_it_is_a_kronecker_product(shape):
    """θ ← θ − η√v̄ (A ⊗ B)⁻¹ g; of filters B is over all that an output sees."""
    a, b = positive(3, 1), positive(8, 3)
    theta = torch.zeros(shape, dtype=torch.float64)
    optimizer = NaturalGradient([theta], damping=0.0, betas=(0.9, 1.0))
    look_at(optimizer, theta, kronecker_looks(a, b))
    g = torch.randn(3, 8, dtype=torch.float64, generator=generator())
    theta.grad = g.reshape(shape)
    optimizer.step(0.1)
    usual = float(a.trace() * b.trace()) / 24
    expected = -0.1 * usual**0.5 * torch.linalg.solve(a, g) @ torch.linalg.inv(b)
    torch.testing.assert_close(theta.view(3, 8), expected)


def test_many_steps_along_one_gradient_have_one_length_and_damping_shortens_them():
    theta = torch.zeros(2, 3, dtype=torch.float64)
    g = torch.zeros(2, 3, dtype=torch.float64)
    g[0, 0] = 2.0
    lengths = []
    for damping in (1.0, 3.0):
        optimizer = NaturalGradient([theta], damping=damping)
        theta.zero_()
        look_at(optimizer, theta, [g, -g])
        for _ in range(3):
            theta.grad = g
            before = theta.clone()
            optimizer.step(0.1)
            lengths.append(float((before - theta)[0, 0]))
    # v = 4 in one of six coordinates, so v̄ = 4/6: η√v̄·2/(4 + λ·4/6)
    expected = [0.1 * (4 / 6) ** 0.5 * 2 / (4 + damping * 4 / 6) for damping in (1.0, 3.0)]
    assert lengths == pytest.approx([expected[0]] * 3 + [expected[1]] * 3)


def test_steps_do_not_depend_on_the_scale_of_the_loss_nor_on_a_turn_of_the_axes():
    q, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=generator()))
    noise = torch.randn(40, 4, 5, dtype=torch.float64, generator=generator())
    gradients = noise * torch.logspace(0, 2, 5, dtype=torch.float64)

    def end(change):
        theta = torch.zeros(4, 5, dtype=torch.float64)
        optimizer = NaturalGradient([theta])
        look_at(optimizer, theta, [change(g) for g in gradients[:20]])
        for g in gradients[20:]:
            theta.grad = change(g)
            optimizer.step(0.01)
        return theta

    plain = end(lambda g: g)
    torch.testing.assert_close(end(lambda g: 1e3 * g), plain)
    torch.testing.assert_close(end(lambda g: g @ q), plain @ q)


def test_it_finds_the_least_squares_solution_of_a_badly_conditioned_problem_with_noise():
    """The loss ½ E (⟨a, θ − θ*⟩ + noise)² has curvature A ⊗ B, from 1 to 100, and gradients with a covariance
    in proportion to it.  Each of the 12 directions begins with a hundredth of what it may cost in the end.
    """
    draw = generator()
    root = torch.kron(*(torch.linalg.cholesky(positive(n, 1)) for n in (3, 4)))
    truth = torch.randn(12, dtype=torch.float64, generator=draw)
    theta = (truth + torch.linalg.solve(root.T, torch.full_like(truth, 0.1))).view(3, 4)
    optimizer = NaturalGradient([theta])

    def gradient():
        a = torch.randn(64, 12, dtype=torch.float64, generator=draw) @ root.T
        noise = torch.randn(64, dtype=torch.float64, generator=draw)
        theta.grad = (a.T @ (a @ (theta.flatten() - truth) - noise) / 64).view(3, 4)

    def excess():
        return float((root.T @ (theta.flatten() - truth)).square().sum())  # over a noise of 1

    assert excess() == pytest.approx(0.12)
    for _ in range(60):
        gradient()
        optimizer.look()
    for k in range(1000):
        gradient()
        optimizer.step(3e-3 * (1 - k / 1000))
    assert excess() < 0.0012


def test_it_needs_to_look_before_it_steps():
    theta = torch.zeros(2, 2)
    theta.grad = torch.ones(2, 2)
    with pytest.raises(GncpriorError, match="look at before"):
        NaturalGradient([theta]).step(0.1)
