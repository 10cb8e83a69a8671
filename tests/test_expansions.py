"""The map from weights to tables and its transpose, against those that autograd knows."""

import pytest
import torch

from gncprior.expansions import expand
from gncprior.prior import Architecture, Prior

PART = 4


def case(scaled, dtype):
    """A layer with random weights, t̂ inside, on the edge of and beyond its grid."""
    prior = Prior(Architecture(filters=3, x_knots=9, t_knots=5, scaled=scaled)).to(dtype)
    splines = prior.start(spread=0.3).splines[0]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(splines.weight.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        splines.weight += 0.3 * noise.to(dtype)
    low, high = prior.t_hat_range
    t_hat = torch.tensor([low, -4.1, high + 0.5, -2.0, low - 1, -0.3], dtype=dtype)
    return splines, t_hat


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_tables_are_those_of_collapse(scaled, dtype, rtol):
    splines, t_hat = case(scaled, dtype)
    got, want = expand(splines, t_hat, PART), splines.collapse(t_hat, 2)
    assert torch.equal(got.inverse_gamma, want.inverse_gamma)
    assert [len(t) for t in got.tables] == [len(t_hat), PART, PART]
    for mine, table in zip(got.tables, want.tables, strict=True):
        assert (mine - table[: len(mine)]).abs().max() <= rtol * table.abs().max()
    curvature = want.tables[0][..., 2, :: want.knots + 1]
    assert (curvature == 0).any()  # tails that are clipped and others
    assert (curvature > 0).any()
    assert len(expand(splines, t_hat, 0).tables) == 1


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("part", [0, PART])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_transpose_is_that_of_autograd(scaled, part, dtype, rtol):
    splines, t_hat = case(scaled, dtype)
    generator = torch.Generator().manual_seed(1)
    expansion = expand(splines, t_hat, part)
    grads = [
        torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in expansion.tables
    ]
    plain = splines.collapse(t_hat, 2).tables[: len(grads)]
    torch.autograd.backward(
        [t[: len(g)] for t, g in zip(plain, grads, strict=True)], [g.to(dtype) for g in grads]
    )
    error = expansion.transpose(grads) - splines.weight.grad
    assert error.abs().max() <= rtol * splines.weight.grad.abs().max()


def test_weights_that_play_no_part_get_exactly_nothing():
    splines, _ = case(False, torch.float32)
    expansion = expand(splines, torch.tensor([-9.0]), 1)
    grads = [torch.zeros(t.shape, dtype=torch.float64) for t in expansion.tables]
    for g in grads:
        g[..., 3] = 0.7  # the third knot: weights 2 … 6 in x, the first five in t̂
    grad = expansion.transpose(grads)
    assert (grad[:, :5, 2:7] != 0).all()
    assert (grad[:, 5:] == 0).all()
    assert (grad[:, :, :2] == 0).all()
    assert (grad[:, :, 7:] == 0).all()
