"""Inner functions are lines beyond their knots, and pictures that no photograph resembles stay whole."""

import pytest
import torch
from small import tiny

from gncprior.checkpoints import load_prior, shipped
from gncprior.convexity import settle_at_t_max
from gncprior.prior import Architecture, Prior
from gncprior.splines import BASIS, evaluate, time_basis
from gncprior.tails import straighten_tails

DEEP = [name for name in shipped() if not name.startswith("r1")]


def values(prior, layer, u, t_hat=-3.0):
    """φ of a layer at u, (filters, len(u)), in float64."""
    phi = prior.double().collapse(torch.tensor([t_hat], dtype=torch.float64))[layer]
    x = u.double().expand(1, prior.architecture.filters, 1, -1)
    return evaluate(x, phi.tables[0], phi.inverse_gamma)[0, :, 0]


def rough(layers):
    prior = Prior(Architecture(layers=layers, filters=4, first_size=3, x_knots=15, t_knots=6))
    generator = torch.Generator().manual_seed(layers)
    with torch.no_grad():
        for p in prior.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return prior.requires_grad_(False)


@pytest.mark.parametrize("t_hat", [-9.2, -4.3, -0.1, 0.0])
def test_tails_of_inner_functions_are_lines_and_those_of_the_last_are_not(t_hat):
    prior = rough(3)
    straighten_tails(prior)
    far = torch.tensor([4.0, 40.0, 400.0])
    for side in (1, -1):
        for layer in (0, 1, 2):
            near, middle, away = values(prior, layer, side * far, t_hat).unbind(-1)
            slope = (middle - near) / 36
            bend = ((away - middle) / 360 - slope).abs()
            if layer < 2:
                assert (bend <= 1e-9 * (1 + slope.abs())).all()
            else:
                assert bend.max() > 1


def test_only_the_last_half_knot_and_the_tails_change():
    prior, straight = rough(2), rough(2)
    straighten_tails(straight)
    grid = prior.architecture.x_grid
    edge = grid.high - 0.501 * grid.gamma
    u = torch.linspace(-edge, edge, 200)
    for layer in (0, 1):
        assert torch.equal(values(prior, layer, u), values(straight, layer, u))
    assert not torch.equal(prior._splines()[0].weight, straight._splines()[0].weight)
    assert torch.equal(prior._splines()[1].weight, straight._splines()[1].weight)


def test_lines_at_t_max_stay_lines_and_straight_tails_stay_as_they_are():
    prior = rough(2)
    settle_at_t_max(prior)
    straighten_tails(prior)
    again = [s.weight.clone() for s in prior._splines()]
    straighten_tails(prior)
    for splines, before in zip(prior._splines(), again, strict=True):
        assert torch.equal(splines.weight, before)
    u = torch.linspace(-3.5, 3.5, 141)
    assert values(prior, 0, u, 0.0).diff(n=2).abs().max() < 1e-5


def test_one_layer_is_left_alone():
    prior = tiny(1, torch.float32)
    before = [p.clone() for p in prior.parameters()]
    straighten_tails(prior)
    for p, q in zip(prior.parameters(), before, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", DEEP)
def test_shipped_priors_have_straight_inner_tails(name):
    prior = load_prior(name)
    low, high = prior.t_hat_range
    for t_hat in torch.linspace(low, high, 23, dtype=torch.float64):
        for splines in prior._splines()[:-1]:
            basis = time_basis(t_hat[None], splines.t_grid)[0].to(splines.weight)
            c = torch.einsum("o,jol->jl", basis, splines.weight)
            for end in (c[:, :5], c[:, -5:]):
                assert (end @ torch.tensor(BASIS[2]) <= 0).all()
