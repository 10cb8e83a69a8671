"""Deeper priors with the energy of shallower ones, by identities and by folds."""

import math

import pytest
import torch

from gncprior.deepening import deepened
from gncprior.errors import GncpriorError
from gncprior.prior import Architecture, Prior
from gncprior.recipes import Recipe
from gncprior.splines import evaluate


def _shallow(layers: int, noise: float) -> Prior:
    prior = Prior(Architecture(layers=layers, filters=5, first_size=3, x_knots=31)).double().start()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in prior.parameters():
            p += noise * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return prior


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (2, 3)])
def test_a_deepened_prior_is_the_same_energy(before, after):
    prior = _shallow(before, 0.05)
    deep = deepened(prior, after)
    assert deep.architecture.layers == after
    x = torch.randn(2, 1, 7, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for t_hat in (-8.0, -1.0):
        torch.testing.assert_close(
            deep.energy(x, t_hat), prior.energy(x, t_hat), rtol=1e-10, atol=0
        )
        torch.testing.assert_close(deep.grad(x, t_hat), prior.grad(x, t_hat), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (1, 3)])
def test_a_fold_keeps_even_potentials(before, after):
    """The start's potentials are ½u²; (v + ε)² − ε² is a parabola too, so only |u| is not met exactly."""
    prior = _shallow(before, 0.0)
    deep = deepened(prior, after, fold=True)
    x = 0.3 * torch.randn(
        2, 1, 9, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    for t_hat in (-9.0, -5.0, -2.5):  # below t̂_max = 0 by more than the reach of its weights
        energy, grad = prior.energy_and_grad(x, t_hat)
        folded_energy, folded_grad = deep.energy_and_grad(x, t_hat)
        torch.testing.assert_close(folded_energy, energy, rtol=2e-3, atol=0)
        assert (folded_grad - grad).norm() < 0.02 * grad.norm()


def test_a_fold_is_even_with_a_minimum_at_zero_and_a_line_at_t_max():
    inner = deepened(_shallow(1, 0.0), 2, fold=True)._splines()[0]
    u = torch.linspace(0, 3, 50, dtype=torch.float64).expand(1, 5, -1)
    epsilon = inner.x_grid.gamma
    below = inner.collapse(torch.tensor([-6.0], dtype=torch.float64))
    right, left = (evaluate(s * u, below.tables[0], below.inverse_gamma) for s in (1, -1))
    torch.testing.assert_close(right, left, rtol=0, atol=1e-9)
    wanted = (u**2 + epsilon**2).sqrt() - epsilon
    torch.testing.assert_close(right, wanted, rtol=0, atol=0.03 * epsilon)
    c = torch.einsum("jol->ol", inner.weight)[
        -3:
    ]  # the weights that t̂_max and its ghosts have alone
    assert c.diff(n=2, dim=1).abs().max() < 1e-12


def test_a_fold_opens_what_an_identity_hides_at_first_order():
    """Even bends of φ have no first-order effect on a symmetric pair ±x without the fold, and one with it."""

    @torch.no_grad()
    def effect(deep: Prior) -> float:
        splines = deep._splines()[0]
        bend = 1e-4 * splines.x_grid.centres().abs()
        pair = torch.cat([x, -x])
        splines.weight += bend
        above = deep.energy(pair, math.log(0.01)).sum()
        splines.weight -= 2 * bend
        return float(above - deep.energy(pair, math.log(0.01)).sum()) / 2e-4

    x = 0.3 * torch.randn(
        1, 1, 9, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    shallow = _shallow(1, 0.0)
    hidden = effect(deepened(shallow, 2))
    seen = effect(deepened(shallow, 2, fold=True))
    assert abs(hidden) < 1e-6 * abs(seen)


def test_what_cannot_be_deepened_is_refused():
    with pytest.raises(GncpriorError, match="2 layers cannot start one of 1"):
        deepened(Prior(Architecture(layers=2, filters=3)), 1)
    with pytest.raises(GncpriorError, match="2 layers cannot start one of 2, folded"):
        deepened(Prior(Architecture(layers=2, filters=3)), 2, fold=True)
    with pytest.raises(GncpriorError, match="scaled variant"):
        deepened(Prior(Architecture(filters=3, scaled=True)), 2)
    with pytest.raises(GncpriorError, match="fold needs a prior to start from"):
        Recipe(layers=2, fold=True)
