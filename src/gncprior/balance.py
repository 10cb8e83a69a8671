r"""Balance: the slope of the energy in t̂ made to agree between pictures.

The slope ∂_t̂R(y,t̂) of the true energy is E[s | y], s = ½(d − ‖n‖²): what it says of the noise is the same
for all pictures.  :mod:`gncprior.calibration` sets its mean over pictures right.  What is left goes up and down
with them: texture is taken for noise.  Parabolas in the last features, added to the last potentials,

.. math:: R ← R + Σ_j a_j(\hat t)\,Φ_j,\qquad Φ_j = ½ Σ_p u_{jp}^2,\qquad a_j(\hat t) = Σ_o a_{jo} β_o(\hat t),

change the slope by Σ_jo a_jo F_jo with F_jo = β_o' Φ_j + β_o Φ̇_j, Φ̇_j = Σ_p u_jp u̇_jp, and denoising by the
gradients of Φ_j.  Ĵ with its term in t̂ in the explicit form (:mod:`gncprior.score_matching`) is quadratic in a,
and so the best parabolas for a weight w of that term solve a linear system: they are those of

.. math:: \min_a\ ½\,E\, a^⊤ G a + ½\,w\,E\,\bigl((∂_{\hat t}R − s + ⟨F, a⟩)/d − \text{mean over pictures}\bigr)^2,

with G_jk = t⟨∇Φ_j, ∇Φ_k⟩/d and a = a(t̂) in the first term, which is by how much the denoising term grows.  The
part of it that is linear in a is left out: training has made it nearly zero, and what some patches show of it is
chance.  The mean over pictures is the matter of calibration, which has to follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gncprior.errors import GncpriorError
from gncprior.filters import convolve, convolve_transpose
from gncprior.prior import Prior
from gncprior.splines import Grid, evaluate, evaluate_into, time_basis

RIDGE = 1e-6  # of the mean diagonal element: parabolas at the ends of the range are hardly seen
PATCH = 64  # pixels along an edge of the patches that G is measured on
EVERY = 7  # images of one of them


@dataclass(frozen=True)
class Measurements:
    """What N pictures show at T values of t̂, per pixel and in float64."""

    t_hats: Tensor  # (T,)
    residuals: Tensor  # ∂_t̂R − s: (N, T)
    phi: Tensor  # (N, T, J)
    phi_dot: Tensor
    gram: Tensor  # G, a mean over some of the pictures: (T, J, J)


@torch.no_grad()
def balance(
    prior: Prior, images: Sequence[Tensor], weight: float, done: Callable[[], None] | None = None
) -> dict[str, float]:
    """Add the parabolas that are best on clean images (C, H, W), and say what they do there.

    "spread" is the standard deviation over images of ∂_t̂R − s per pixel, root mean square over t̂, and
    "denoising" what the denoising term of Ĵ grows by.  ``done`` is called after every image.
    """
    if prior.architecture.scaled:
        raise GncpriorError("The scaled variant of the prior cannot be balanced.")
    if weight <= 0 or len(images) < 2:
        raise GncpriorError("Balancing needs a positive weight and two images or more.")
    a, facts = parabolas(measure(prior, images, done=done), prior.architecture.t_grid, weight)
    last = prior._splines()[-1]
    mu = last.x_grid.centres().double()
    square = 0.5 * (mu**2 - 5 / 12 * last.x_grid.gamma**2)  # the weights of ½u²
    last.weight.add_((a[..., None] * square).to(last.weight))
    return facts


@torch.no_grad()
def measure(
    prior: Prior,
    images: Sequence[Tensor],
    points: int = 16,
    seed: int = 0,
    done: Callable[[], None] | None = None,
) -> Measurements:
    """The images with fresh noise of ``points`` values of t̂, from one end of the range to the other."""
    low, high = prior.t_hat_range
    t_hats = torch.linspace(low, high, points, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    terms: tuple[list[Tensor], ...] = ([], [], [])
    gram = []
    for k, image in enumerate(images):
        seen = [_terms(prior, image[None], float(t), generator) for t in t_hats]
        for of_all, values in zip(terms, zip(*seen, strict=True), strict=True):
            of_all.append(torch.stack(values))
        if k % EVERY == 0:
            patch = _middle(image)[None]
            gram.append(torch.stack([_gram(prior, patch, float(t), generator) for t in t_hats]))
        if done is not None:
            done()
    residuals, phi, phi_dot = (torch.stack(v) for v in terms)
    return Measurements(t_hats, residuals, phi, phi_dot, torch.stack(gram).mean(0))


def parabolas(m: Measurements, grid: Grid, weight: float) -> tuple[Tensor, dict[str, float]]:
    """a_jo (J, O), and what it does."""
    unit = (-grid.centres().double()).exp()  # a_jo is counted in the curvature of noise, 1/t
    beta, rate = (unit * time_basis(m.t_hats, grid, order) for order in (0, 1))  # (T, O)
    features = torch.einsum("to,ntj->ntjo", rate, m.phi)
    features += torch.einsum("to,ntj->ntjo", beta, m.phi_dot)
    f = _off_mean(features).flatten(2).flatten(0, 1)  # (N · T, J · O)
    r = _off_mean(m.residuals).flatten()
    grown = torch.einsum("to,tp,tjk->jokp", beta, beta, m.gram) / len(beta)
    grown = grown.reshape(f.shape[1], f.shape[1])
    system = grown + weight / len(f) * f.T @ f
    system += RIDGE * system.diagonal().mean() * torch.eye(len(system), dtype=torch.float64)
    a = torch.linalg.solve(system, -weight / len(f) * f.T @ r)
    facts = {
        "spread_before": float(r.square().mean().sqrt()),
        "spread_after": float((r + f @ a).square().mean().sqrt()),
        "denoising": float(0.5 * a @ grown @ a),
    }
    return unit * a.view(m.phi.shape[2], -1), facts


def _terms(
    prior: Prior, x: Tensor, t_hat: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """∂_t̂R − s, Φ_j and Φ̇_j of an image with fresh noise of t̂, per pixel, in float64."""
    y, noise = _noisy(prior, x, t_hat, generator)
    layers, h, h_dot = prior.collapse(prior.times(t_hat, 1), derivatives=1), y, None
    for k, phi in zip(prior.kernels(), layers, strict=True):
        value, first = phi.tables
        u = convolve(h, k)
        u_dot = torch.zeros_like(u) if h_dot is None else convolve(h_dot, k)
        h, slope, h_dot = (torch.empty_like(u) for _ in range(3))
        evaluate_into(u, value, phi.inverse_gamma, h, slope)
        evaluate_into(u, first, phi.inverse_gamma, h_dot)
        h_dot.addcmul_(slope, u_dot)
    assert h_dot is not None
    d = y.numel()
    s = 0.5 * (d - noise.double().square().sum())
    residual = h_dot.sum(dtype=torch.float64) - s
    both = (0.5 * u.square(), u * u_dot)
    squares, products = (v.sum((0, 2, 3), dtype=torch.float64) for v in both)
    return residual / d, squares / d, products / d


def _gram(prior: Prior, x: Tensor, t_hat: float, generator: torch.Generator) -> Tensor:
    """G (J, J) of an image with fresh noise of t̂."""
    y, _ = _noisy(prior, x, t_hat, generator)
    h, slopes = y, []
    filters = prior.kernels()
    for k, phi in zip(filters, prior.collapse(prior.times(t_hat, 1)), strict=True):
        u = convolve(h, k)
        h = evaluate(u, phi.tables[0], phi.inverse_gamma)
        slopes.append(evaluate(u, phi.slope_tables(), phi.inverse_gamma))
    back = torch.diag_embed(u[0].movedim(0, -1)).permute(
        2, 3, 0, 1
    )  # ∂Φ_j/∂u, one image for each j
    for k, slope in zip(reversed(filters), reversed([None, *slopes[:-1]]), strict=True):
        back = convolve_transpose(back.contiguous(), k)
        if slope is not None:
            back = back * slope
    v = back.flatten(1).double()
    return math.exp(t_hat) * v @ v.T / y.numel()


def _noisy(
    prior: Prior, x: Tensor, t_hat: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    x = x.to(prior.filters[0])
    noise = torch.randn(x.shape, generator=generator).to(x)
    return x + math.exp(t_hat / 2) * noise, noise


def _middle(image: Tensor) -> Tensor:
    top, left = (max(n - PATCH, 0) // 2 for n in image.shape[1:])
    return image[:, top : top + PATCH, left : left + PATCH]


def _off_mean(values: Tensor) -> Tensor:
    """Less their mean over images."""
    return values - values.mean(0)
