"""The smallest eigenvalue of a prior's Hessian by Lanczos, against the dense one."""

import math

import pytest
import torch

from gncprior.convexity import _at_t_max, draw_to_convex, make_convex, smallest_curvature
from gncprior.prior import Architecture, Prior


def rough_prior(layers: int) -> Prior:
    prior = Prior(
        Architecture(layers=layers, filters=5, first_size=3, x_knots=15, t_knots=6)
    ).double()
    prior.start(gain=2.0)
    generator = torch.Generator().manual_seed(layers)
    with torch.no_grad():
        for p in prior.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return prior.requires_grad_(False)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_lanczos_finds_the_dense_eigenvalue_and_its_vector(layers):
    prior = rough_prior(layers)
    x = torch.randn(1, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    t_hat = -2.0
    units = torch.eye(30, dtype=torch.float64).view(30, 1, 6, 5)
    hessian = prior.hessian_product(x.expand(30, 1, 6, 5).contiguous(), t_hat, units).view(30, 30)
    assert (hessian - hessian.T).abs().max() < 1e-10 * hessian.abs().max()
    flat = torch.full((30, 1), 1 / math.sqrt(30), dtype=torch.float64)
    assert (hessian @ flat).norm() < 1e-10 * hessian.norm()
    # the constant image, an eigenvector to 0, is moved out of the way
    want = torch.linalg.eigvalsh(hessian + hessian.norm() * flat @ flat.T)[0] * math.exp(t_hat)
    value, vector = smallest_curvature(prior, x, t_hat)
    assert value == pytest.approx(float(want), rel=1e-8)
    v = vector.flatten()
    assert (math.exp(t_hat) * hessian @ v - value * v).norm() < 1e-6 * hessian.norm()


def test_a_quadratic_prior_is_convex_at_every_t():
    prior = Prior(Architecture()).start().requires_grad_(False)
    x = torch.rand(1, 24, 24, generator=torch.Generator().manual_seed(0))
    for t_hat in (-9.0, -4.0, 0.0):
        assert smallest_curvature(prior, x, t_hat)[0] > 0


def curvatures(prior: Prior, x: torch.Tensor, t_hat: float) -> torch.Tensor:
    """All eigenvalues of the Hessian at a small image, by Hessian products with unit images."""
    n = x.numel()
    units = torch.eye(n, dtype=x.dtype).view(n, *x.shape)
    products = prior.hessian_product(x.expand(n, *x.shape).contiguous(), t_hat, units)
    return torch.linalg.eigvalsh(products.view(n, n))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_prior_made_convex_is_convex_at_t_max_at_every_image_and_only_there(layers):
    prior = rough_prior(layers)
    low, high = prior.t_hat_range
    generator = torch.Generator().manual_seed(7)
    images = [s * torch.randn(1, 5, 4, generator=generator).double() for s in (0.1, 1.0, 10.0)]
    assert min(float(curvatures(prior, x, high)[0]) for x in images) < -0.1
    at_t_min = [curvatures(prior, x, low) for x in images]
    make_convex(prior)
    for x in images:
        values = curvatures(prior, x, high)
        assert values[0] > -1e-9 * values[-1]
        assert values[1] > 0  # only the constant image is flat
    assert all(
        torch.equal(curvatures(prior, x, low), v) for x, v in zip(images, at_t_min, strict=True)
    )


def test_making_convex_changes_no_weight_that_t_max_does_not_see():
    prior, same = rough_prior(2), rough_prior(2)
    make_convex(prior)
    for new, old in zip(prior._splines(), same._splines(), strict=True):
        # of 6 + 4 knots in t̂, the five around the last one count there
        assert torch.equal(new.weight[:, :-5], old.weight[:, :-5])
        assert not torch.equal(new.weight[:, -5:], old.weight[:, -5:])


@pytest.mark.parametrize("layers", [1, 2])
def test_draws_to_convex_never_go_back_and_get_there(layers):
    prior = rough_prior(layers)

    def wrong() -> list[float]:
        second = [_at_t_max(s).diff(n=2) for s in prior._splines()]
        return [*(float(d.norm()) for d in second[:-1]), float(second[-1].clamp(max=0).norm())]

    before = first = wrong()
    for _ in range(3000):
        draw_to_convex(prior)
        after = wrong()
        assert all(b <= a + 1e-12 for a, b in zip(before, after, strict=True))
        before = after
    assert all(b < 0.02 * a for a, b in zip(first, before, strict=True))


def test_what_is_convex_is_left_alone():
    prior = Prior(Architecture(layers=2)).double().start().requires_grad_(False)
    before = [s.weight.clone() for s in prior._splines()]
    draw_to_convex(prior)
    assert make_convex(prior) < 1e-12
    for splines, weight in zip(prior._splines(), before, strict=True):
        assert (splines.weight - weight).abs().max() < 1e-12 * weight.abs().max()
