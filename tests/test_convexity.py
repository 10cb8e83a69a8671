"""The smallest eigenvalue of a prior's Hessian by Lanczos, against the dense one."""

import math

import pytest
import torch

from gncprior.convexity import smallest_curvature
from gncprior.prior import Architecture, Prior


def rough_prior(layers: int) -> Prior:
    prior = Prior(
        Architecture(layers=layers, filters=5, first_size=3, x_knots=15, t_knots=5)
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
