"""The passes over pixels, and tables from weights: every native variant against the formulas in float64."""

from dataclasses import replace

import pytest
import torch
from dense import EPS, as_at_the_start, normal  # noqa: F401  (a fixture for every test)

from gncprior.expansions import expand
from gncprior.native import kernels
from gncprior.passes import Pass, adjoints, rates
from gncprior.prior import Architecture, Prior

IMAGES, CHANNELS, PART = 3, 2, 2
# A place among 63 knots is known to 63 eps of their distance, over which the third derivative of a
# spline with random weights changes by several times its size.
ROUNDING = 10 * 63 * EPS
CASES = ("one layer", "first", "middle", "last", "without t")


def layer(scaled=False):
    """A layer with random weights at three t̂, in float32."""
    prior = Prior(Architecture(filters=CHANNELS, first_size=3, t_knots=5, scaled=scaled))
    splines = prior.start(spread=0.3).splines[0]
    with torch.no_grad():
        splines.weight += 0.3 * normal(*splines.weight.shape, dtype=torch.float32)
    return splines, torch.tensor([-4.1, -9.0, -0.3])


def inputs(case, size):
    """A pass and what comes from above, in float32."""
    splines, t_hat = layer()
    part = 0 if case == "without t" else PART
    phi = expand(splines, t_hat, part)
    u, kz, a, outer_p = (
        normal(IMAGES, CHANNELS, *size, seed=k, dtype=torch.float32) for k in range(4)
    )
    u_dot, outer_q = (normal(part, CHANNELS, *size, seed=k, dtype=torch.float32) for k in (4, 5))
    mixed = 0.3 * phi.tables[1] - 0.7 * phi.tables[2] if part else None
    moving = case in ("middle", "last")
    at = Pass(2 * u, kz, u_dot if moving else None, phi, mixed, 0.7)
    if case in ("one layer", "last"):
        return at, (None, None, None)
    return at, (a, outer_p, outer_q if part else None)


def results(at, above):
    """All that the two passes write and return."""
    z, p = torch.empty_like(at.u), torch.empty_like(at.u)
    h_dot = torch.empty_like(at.u[: at.part])
    q = h_dot.clone() if at.u_dot is not None else h_dot[:0]
    rates(at, z, h_dot)
    of = adjoints(at, *above, p, q)
    return [t for t in (z, h_dot, p, q, of.value, of.rate, of.second) if t is not None]


def doubled(t):
    return None if t is None else t.double()


def in_float64(at, above):
    phi = replace(
        at.phi,
        tables=tuple(map(doubled, at.phi.tables)),
        inverse_gamma=at.phi.inverse_gamma.double(),
    )
    at = Pass(*map(doubled, (at.u, at.kz, at.u_dot)), phi, doubled(at.mixed), at.w)
    return at, tuple(map(doubled, above))


@pytest.mark.parametrize("variant", [*kernels.supported(), "torch"])
@pytest.mark.parametrize("size", [(1, 1), (3, 7), (16, 17), (67, 65)])
@pytest.mark.parametrize("case", CASES)
def test_passes_are_the_formulas(variant, case, size):
    at, above = inputs(case, size)
    expected = results(*in_float64(at, above))
    kernels.select(variant)
    for got, want in zip(results(at, above), expected, strict=True):
        assert (got - want).norm() <= ROUNDING * want.norm()


@pytest.mark.parametrize("variant", kernels.supported())
@pytest.mark.parametrize("case", CASES)
def test_the_number_of_threads_changes_no_bit(variant, case):
    kernels.select(variant)
    every = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        every.append(results(*inputs(case, (67, 65))))
    for other in every[1:]:
        assert all(torch.equal(a, b) for a, b in zip(every[0], other, strict=True))


@pytest.mark.parametrize("variant", [*kernels.supported(), "torch"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("part", [0, PART])
def test_tables_and_weight_gradients_of_every_variant(variant, scaled, part):
    kernels.select(variant)
    splines, t_hat = layer(scaled)
    got = []
    for dtype in (torch.float32, torch.float64):
        expansion = expand(splines.to(dtype), t_hat.to(dtype), part)
        grads = [normal(*t.shape, seed=k) for k, t in enumerate(expansion.tables)]
        got.append([*expansion.tables, expansion.transpose(grads)])
    for single, double in zip(*got, strict=True):
        assert (single - double).norm() <= 2e-6 * double.norm()
