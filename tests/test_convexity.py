"""The smallest eigenvalue of a prior's Hessian by Lanczos, against the dense one."""

import math

import pytest
import torch

from gncprior.convexity import flat_curvature, settle_at_t_max, smallest_curvature, steady_at_t_max
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
def test_the_power_method_finds_the_largest_curvature_of_a_flat_image(layers):
    prior = rough_prior(layers)
    t_hats = torch.tensor([-2.0, -7.0], dtype=torch.float64)
    units = torch.eye(64, dtype=torch.float64).view(64, 1, 8, 8)
    grey = torch.full_like(units, 0.7)
    spectra = [
        torch.linalg.eigvalsh(prior.hessian_product(grey, t, units).view(64, 64)) for t in t_hats
    ]
    want = torch.stack([s.abs().max() for s in spectra])
    values, waves = flat_curvature(prior, t_hats, 400, size=8)
    assert values.tolist() == pytest.approx(want.tolist(), rel=1e-3)
    again, _ = flat_curvature(prior, t_hats, 1, waves, size=8)  # goes on where it ended
    assert again.tolist() == pytest.approx(want.tolist(), rel=1e-3)


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
def test_a_settled_prior_is_convex_at_t_max_at_every_image_and_the_same_at_t_min(layers):
    prior = rough_prior(layers)
    low, high = prior.t_hat_range
    generator = torch.Generator().manual_seed(7)
    images = [s * torch.randn(1, 5, 4, generator=generator).double() for s in (0.1, 1.0, 10.0)]
    assert min(float(curvatures(prior, x, high)[0]) for x in images) < -0.1
    at_t_min = [curvatures(prior, x, low) for x in images]
    settle_at_t_max(prior)
    for x in images:
        values = curvatures(prior, x, high)
        assert values[0] > -1e-9 * values[-1]
        assert values[1] > 0  # only the constant image is flat
        assert torch.allclose(values, curvatures(prior, images[0], high))  # as of a quadratic
    for x, values in zip(images, at_t_min, strict=True):
        assert torch.equal(curvatures(prior, x, low), values)


def test_settling_is_a_projection():
    """What is settled stays, and what was taken off is orthogonal to what may remain."""
    prior, before = rough_prior(2), rough_prior(2)
    settle_at_t_max(prior)
    once = [s.weight.clone() for s in prior._splines()]
    settle_at_t_max(prior)
    for splines, old, weight, degree in zip(
        prior._splines(), before._splines(), once, (1, 2), strict=True
    ):
        assert (splines.weight - weight).abs().max() < 1e-12
        assert torch.equal(weight[:, :-5], old.weight[:, :-5])  # t_max does not see them
        taken = (old.weight - weight).sum(1)  # a multiple of what c has lost
        powers = splines.x_grid.centres() ** torch.arange(degree + 1)[:, None]
        assert (taken @ powers[:2].T).abs().max() < 1e-9  # of lines nothing
        if degree == 2:  # of squares nothing, or what was negative
            squares = taken @ powers[2]
            assert (squares < 1e-9).all()
            assert (squares > -1e-9).any()


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_steadied_prior_rises_towards_t_max_the_more_the_less_noise_there_is(layers):
    prior = rough_prior(layers)
    settle_at_t_max(prior)
    low, high = prior.t_hat_range
    below = high - 1.5 * prior.architecture.t_grid.gamma
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(4, 1, 9, 8, generator=generator).double()
    x = x - x.mean((2, 3), keepdim=True)
    before = [prior.energy_and_grad(x, t) for t in (low, below - 1e-9, high)]
    steady_at_t_max(prior)
    after = [prior.energy_and_grad(x, t) for t in (low, below - 1e-9, high)]
    for old, new in zip(before, after, strict=True):
        for one, other in zip(old, new, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    # ∂_t̂R − ∂_t̂R(0) is between −1 and −½ times the quadratic part of R, where there is no linear one
    slopes = torch.stack([prior.t_derivatives(s * x, high)[0] for s in (0.0, 0.5, 1.0)])
    energies = torch.stack([prior.energy(s * x, high) for s in (-1.0, 0.0, 1.0)])
    square = (energies[0] + energies[2]) / 2 - energies[1]
    share = (slopes[2] - slopes[0]) / square
    assert slopes[0].gt(slopes[1]).all() and slopes[1].gt(slopes[2]).all()
    if layers == 1:
        assert share.gt(-1 - 1e-6).all() and share.lt(-0.5 + 1e-6).all()


def test_a_start_that_falls_as_noise_does_is_steady_already():
    """½‖x‖²/(t + 0.01): ρ = t/(t + 0.01), which the splines in t̂ have to within their error."""
    prior = Prior(Architecture(layers=2)).double().start().requires_grad_(False)
    before = [s.weight.clone() for s in prior._splines()]
    steady_at_t_max(prior)
    for splines, weight in zip(prior._splines(), before, strict=True):
        assert (splines.weight - weight).abs().max() < 0.05 * weight.abs().max()


def test_parabolas_that_open_downwards_become_lines():
    prior = Prior(Architecture(filters=4, first_size=3)).double().start().requires_grad_(False)
    (splines,) = prior._splines()
    splines.weight[0] *= -1
    settle_at_t_max(prior)
    x = 3 * torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    values = curvatures(prior, x, prior.t_hat_range[1])
    assert values[0] > -1e-12 * values[-1]


def test_the_start_of_training_is_settled_already():
    prior = Prior(Architecture(layers=2)).double().start().requires_grad_(False)
    before = [s.weight.clone() for s in prior._splines()]
    settle_at_t_max(prior)
    for splines, weight in zip(prior._splines(), before, strict=True):
        assert (splines.weight - weight).abs().max() < 1e-12 * weight.abs().max()
