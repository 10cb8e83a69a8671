"""Balance: parabolas that make the slope in t̂ agree between pictures."""

import copy
import math

import pytest
import torch
from small import tiny

from gncprior import GncpriorError
from gncprior.balance import _gram, _terms, balance, measure, parabolas
from gncprior.splines import time_basis

pytestmark = pytest.mark.usefixtures("one_thread")


def pictures(count=8, size=20):
    """Textures of very different strength."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(count, 1, size, size, generator=generator, dtype=torch.float64)
    return list(0.5 + 0.02 * torch.arange(count).view(-1, 1, 1, 1) * noise)


def with_parabolas(prior, a):
    """A copy of the prior with a_j u²/2 added to its last potentials at every t̂."""
    other = copy.deepcopy(prior)
    splines = other._splines()[-1]
    mu = splines.x_grid.centres().double()
    parabola = 0.5 * (mu**2 - 5 / 12 * splines.x_grid.gamma**2)
    splines.weight.add_(a[:, None, None] * parabola)
    return other


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_terms_are_those_of_the_energy(layers):
    """aᵀΦ is what the parabolas add to R, aᵀΦ̇ what they add to its slope, aᵀGa the size of its gradient."""
    prior, x, t_hat = tiny(layers, x_range=20.0), pictures()[5][None], -3.0
    a = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)
    other = with_parabolas(prior, a)

    def seed():
        return torch.Generator().manual_seed(1)

    noise = torch.randn(x.shape, generator=seed()).double()
    y, d = x + math.exp(t_hat / 2) * noise, x.numel()
    slope, phi, phi_dot = _terms(prior, x, t_hat, seed())
    s = 0.5 * (d - noise.square().sum())
    assert float(d * slope + s) == pytest.approx(float(prior.joint_grad(y, t_hat)[2]), rel=1e-9)
    pairs = zip(other.joint_grad(y, t_hat), prior.joint_grad(y, t_hat), strict=True)
    energy, gradient, slope = (new - old for new, old in pairs)
    assert d * float(a @ phi) == pytest.approx(float(energy), rel=1e-9)
    assert d * float(a @ phi_dot) == pytest.approx(float(slope), rel=1e-6, abs=1e-9)
    expected = math.exp(t_hat) * float(gradient.square().sum()) / d
    assert float(a @ _gram(prior, x, t_hat, seed()) @ a) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("layers", [1, 2])
def test_slopes_agree_better_on_pictures_not_seen(layers):
    before, after = tiny(layers), tiny(layers)
    found = balance(after, pictures(), 1e4)
    assert found["spread_after"] < 0.6 * found["spread_before"]

    def spread(prior):
        fresh = [torch.flip(x, (1,)) for x in pictures()]
        slopes = [
            float(_terms(prior, x[None], t, torch.Generator().manual_seed(int(-100 * t)))[0])
            for x in fresh
            for t in (-6.0, -4.0, -2.0)
        ]
        return torch.tensor(slopes).view(-1, 3).std(0).square().mean().sqrt()

    assert spread(after) < 0.7 * spread(before)


def test_parabolas_are_the_best_for_their_weight():
    """No others have a lower objective, written out picture by picture and t̂ by t̂."""
    prior, weight = tiny(2), 30.0
    grid = prior.architecture.t_grid
    m = measure(prior, pictures())
    a, facts = parabolas(m, grid, weight)
    beta, rate = (time_basis(m.t_hats, grid, order) for order in (0, 1))

    def objective(a):
        spread = denoising = 0.0
        for k in range(len(m.t_hats)):
            at, moving = a @ beta[k], a @ rate[k]  # a_j(t̂) and its derivative
            slopes = m.residuals[:, k] + m.phi[:, k] @ moving + m.phi_dot[:, k] @ at
            spread += float((slopes - slopes.mean()).square().mean()) / len(m.t_hats)
            denoising += 0.5 * float(at @ m.gram[k] @ at) / len(m.t_hats)
        return 0.5 * weight * spread + denoising, spread, denoising

    best, spread, denoising = objective(a)
    assert facts["spread_after"] == pytest.approx(math.sqrt(spread), rel=1e-9)
    assert facts["denoising"] == pytest.approx(denoising, rel=1e-9)
    assert best < 0.95 * objective(torch.zeros_like(a))[0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        change = torch.randn(a.shape, generator=generator, dtype=torch.float64)
        assert objective(a + 0.05 * change * a.abs())[0] > best


def test_what_cannot_be_balanced_is_refused():
    for prior, images, weight in (
        (tiny(1, scaled=True), pictures(), 1.0),
        (tiny(1), pictures()[:1], 1.0),
        (tiny(1), pictures(), 0.0),
    ):
        with pytest.raises(GncpriorError, match=r"[Bb]alanc"):
            balance(prior, images, weight)
