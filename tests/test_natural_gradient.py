"""Natural-gradient steps: closed forms where the second moments are known."""

import math

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
    """Vectors (looks, n, m) whose second moments are exactly A ⊗ B."""
    root_a, root_b = torch.linalg.cholesky(a), torch.linalg.cholesky(b)
    count = len(a) * len(b)
    return [count**0.5 * torch.outer(u, v) for u in root_a.T for v in root_b.T]


def look_at(optimizer, tensor, gradients):
    for g in gradients:
        tensor.grad = g.reshape(tensor.shape)
        optimizer.look()


@pytest.mark.parametrize("shape", [(3, 8), (3, 2, 2, 2)], ids=["matrix", "filters"])
def test_a_step_divides_by_the_second_moments_where_they_are_a_kronecker_product(shape):
    """θ ← θ − η (A ⊗ B)⁻¹ g; of filters B is over all that an output sees."""
    a, b = positive(3, 1), positive(8, 1)
    theta = torch.zeros(shape, dtype=torch.float64)
    optimizer = NaturalGradient([theta], [0.0], share=0.0)
    look_at(optimizer, theta, kronecker_looks(a, b))
    g = torch.randn(3, 8, dtype=torch.float64, generator=generator())
    theta.grad = g.reshape(shape)
    optimizer.step(0.1)
    expected = -0.1 * torch.linalg.solve(a, g) @ torch.linalg.inv(b)
    torch.testing.assert_close(theta.view(3, 8), expected)


def test_with_a_share_it_divides_by_what_was_seen_as_well():
    """F = diag(v + λv̄) + ρ/N Σ ssᵀ in the coordinates of Q, which for looks along single axes are those of θ."""
    draw = generator()
    seen = torch.randn(7, 5, dtype=torch.float64, generator=draw)
    theta = torch.zeros(5, dtype=torch.float64)
    optimizer = NaturalGradient([theta], [0.3], share=0.4, keep=6)
    look_at(optimizer, theta, seen)
    theta.grad = g = torch.randn(5, dtype=torch.float64, generator=draw)
    optimizer.step(1.0)
    q = torch.linalg.eigh(seen.T @ seen).eigenvectors
    turned = seen @ q
    v = turned.square().mean(0)
    last = turned[1:]  # no more are kept
    f = torch.diag(v + 0.3 * v.mean()) + 0.4 / 6 * last.T @ last
    torch.testing.assert_close(theta, -q @ torch.linalg.solve(f, q.T @ g))


def test_many_steps_along_one_gradient_have_one_length_and_damping_shortens_them():
    theta = torch.zeros(2, 3, dtype=torch.float64)
    g = torch.zeros(2, 3, dtype=torch.float64)
    g[0, 0] = 2.0
    lengths = []
    for damping in (1.0, 3.0):
        optimizer = NaturalGradient([theta], [damping], share=0.0)
        theta.zero_()
        look_at(optimizer, theta, [g, -g])
        for _ in range(3):
            theta.grad = g
            before = theta.clone()
            optimizer.step(0.1)
            lengths.append(float((before - theta)[0, 0]))
    # v = 4 in one of six coordinates, so v̄ = 4/6: η·2/(4 + λ·4/6)
    expected = [0.1 * 2 / (4 + damping * 4 / 6) for damping in (1.0, 3.0)]
    assert lengths == pytest.approx([expected[0]] * 3 + [expected[1]] * 3)


def test_steps_do_not_depend_on_the_scale_of_the_loss_nor_on_a_turn_of_the_axes():
    q, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=generator()))
    noise = torch.randn(40, 4, 5, dtype=torch.float64, generator=generator())
    gradients = noise * torch.logspace(0, 2, 5, dtype=torch.float64)

    def end(change, scale=1.0):
        """A loss times c has gradients times c, and random vectors times √c."""
        theta = torch.zeros(4, 5, dtype=torch.float64)
        optimizer = NaturalGradient([theta], [1e-3])
        look_at(optimizer, theta, [scale**0.5 * change(g) for g in gradients[:20]])
        for g in gradients[20:]:
            theta.grad = scale * change(g)
            optimizer.step(0.01)
        return theta

    plain = end(lambda g: g)
    torch.testing.assert_close(end(lambda g: g, 1e3), plain)
    torch.testing.assert_close(end(lambda g: g @ q), plain @ q)


def test_it_finds_the_least_squares_solution_of_a_badly_conditioned_problem_with_noise():
    """The loss ½ E (⟨a, θ − θ*⟩ + noise)² has curvature A ⊗ B, from 1 to 100.  Each of the 12 directions begins
    with a hundredth of what it may cost in the end.
    """
    draw = generator()
    root = torch.kron(*(torch.linalg.cholesky(positive(n, 1)) for n in (3, 4)))
    truth = torch.randn(12, dtype=torch.float64, generator=draw)
    theta = (truth + torch.linalg.solve(root.T, torch.full_like(truth, 0.1))).view(3, 4)
    optimizer = NaturalGradient([theta], [1e-3])

    def excess():
        return float((root.T @ (theta.flatten() - truth)).square().sum())  # over a noise of 1

    assert excess() == pytest.approx(0.12)
    look_at(optimizer, theta, torch.randn(60, 12, dtype=torch.float64, generator=draw) @ root.T)
    for k in range(1000):
        a = torch.randn(64, 12, dtype=torch.float64, generator=draw) @ root.T
        noise = torch.randn(64, dtype=torch.float64, generator=draw)
        theta.grad = (a.T @ (a @ (theta.flatten() - truth) - noise) / 64).view(3, 4)
        optimizer.step(0.05 * (1 - k / 1000))
    assert excess() < 0.0012


def test_looks_on_the_way_move_the_moments_and_long_ones_are_shortened():
    theta = torch.zeros(2, dtype=torch.float64)
    unit = torch.tensor([1.0, 0.0], dtype=torch.float64)
    optimizer = NaturalGradient([theta], [0.0], share=0.0, betas=(0.0, 0.9))
    look_at(optimizer, theta, [unit, unit.flip(0)])

    def length():
        theta.grad = unit
        before = theta.clone()
        optimizer.step(1.0)
        return float((before - theta)[0])

    assert length() == pytest.approx(2)  # v = ½
    look_at(optimizer, theta, [torch.full_like(unit, math.nan)])
    assert length() == pytest.approx(2)
    look_at(optimizer, theta, [1e6 * unit])  # 3 is as long as it may be
    assert length() == pytest.approx(1 / (0.9 * 0.5 + 0.1 * 9))


def test_it_needs_to_look_before_it_steps():
    theta = torch.zeros(2, 2)
    theta.grad = torch.ones(2, 2)
    with pytest.raises(GncpriorError, match="look at before"):
        NaturalGradient([theta], [0.0]).step(0.1)
