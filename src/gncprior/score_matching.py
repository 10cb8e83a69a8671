"""Joint score matching in the image and in the log-variance (paper, section 3.2).

    Ĵ(θ) = E ½[ ‖e^{t̂/2} ∇_y R(y,t̂) − n‖² + m_t((∂_t̂R)² − 2∂²_t̂R) ],   y = x + e^{t̂/2} n,  m_t = 1/d

Both terms are reported, and differentiated, per pixel (divided by d) and as means over images.  The
implicit second term lacks the boundary term of its integration by parts,
(m_t/(t̂_max−t̂_min)) (E ∂_t̂R(y,t̂_max) − E ∂_t̂R(y,t̂_min)), which is added on request.

The term in t̂ has an explicit form too, as the term in x has.  As y given x is Gaussian, the ∂_t̂ of the negative
log-density of y is E[s | y] with s = ½(d − ‖n‖²), and by completing the square

    E[(∂_t̂R)² − 2∂²_t̂R] + boundary = E (∂_t̂R − s)² + const.

This regression needs no boundary term, and unlike −2∂²_t̂R of a batch it is bounded below.

The gradient in θ needs no graph of graphs.  With the residual r = e^{t̂/2}∇R − n, v = e^{t̂/2} r and
α = m_t ∂_t̂R held fixed it is that of ⟨∇R, v⟩ + α ∂_t̂R − m_t ∂²_t̂R, which :mod:`gncprior.tangents` takes; in the
explicit form α = m_t(∂_t̂R − s), and the last term is not there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gncprior.errors import GncpriorError
from gncprior.prior import Prior
from gncprior.tangents import Tangents


@dataclass(frozen=True)
class Terms:
    """The loss per pixel, averaged over images: denoising term, t̂ term, boundary term (weighed)."""

    x: float
    t: float
    boundary: float

    @property
    def total(self) -> float:
        return self.x + self.t + self.boundary


class ScoreMatching:
    """The objective Ĵ of a prior: called with images, noise and t̂ it returns the terms and sets the gradients.

    ``t_weight`` multiplies m_t; ``t_fraction`` is the part of the batch on which the t̂ term is
    computed for L ≥ 2 (an unbiased estimate if t̂ is in random order); ``boundary`` adds the boundary
    term, on the same part; ``explicit`` takes the other form of the t̂ term; ``half`` lets inner filters
    multiply in bfloat16.
    """

    def __init__(
        self,
        prior: Prior,
        t_weight: float = 1.0,
        t_fraction: float = 1.0,
        boundary: bool = False,
        explicit: bool = False,
        half: bool = False,
    ) -> None:
        if not (t_weight >= 0 and 0 < t_fraction <= 1):
            raise GncpriorError(
                "The weight of the t̂ term must be ≥ 0 and its part of the batch in (0, 1]."
            )
        if boundary and explicit:
            raise GncpriorError("The explicit form of the t̂ term has no boundary term.")
        self.prior, self.t_weight, self.t_fraction = prior, t_weight, t_fraction
        self.boundary, self.explicit = boundary, explicit
        self._tangents = Tangents(prior, half)

    @torch.no_grad()
    def __call__(self, x: Tensor, noise: Tensor, t_hat: Tensor) -> Terms:
        """The terms; ``grad`` of every parameter is overwritten."""
        for p in self.prior.parameters():
            p.grad = None
        images, d = len(x), x[0].numel()
        some = max(1, round(self.t_fraction * images))
        part = images if self.prior.architecture.layers == 1 else some
        part = part if self.t_weight > 0 else 0
        root = _root(t_hat)
        gradient, first = self._tangents.first(torch.addcmul(x, noise, root), t_hat, part)
        residual = gradient.mul_(root).sub_(noise)
        x_term = 0.5 * float(residual.flatten().dot(residual.flatten())) / (d * images)
        w = self.t_weight / (d**2 * part) if part else 0.0  # m_t = 1/d, per pixel
        v = residual.mul_(root / (d * images))
        if self.explicit:
            first -= 0.5 * (d - noise[:part].double().square().sum((1, 2, 3)))  # s
            self._tangents.second(v, w * first, 0.0)
            t_term = 0.5 * w * float(first.square().sum())
        else:
            second = self._tangents.second(v, w * first, w)
            t_term = 0.5 * w * float((first**2 - 2 * second).sum())
        boundary = self._boundary_term(x[:some], noise[:some]) if self.boundary and part else 0.0
        return Terms(x_term, t_term, boundary)

    def _boundary_term(self, x: Tensor, noise: Tensor) -> float:
        """Both ends of the range in one batch: a sum of ∂_t̂R with signs."""
        low, high = self.prior.t_hat_range
        ends = torch.tensor([high, low], dtype=x.dtype, device=x.device).repeat_interleave(len(x))
        y = torch.addcmul(torch.cat([x, x]), torch.cat([noise, noise]), _root(ends))
        first = self._tangents.first(y, ends, len(y))[1]
        weight = self.t_weight / ((high - low) * x[0].numel() ** 2 * len(x))
        alpha = torch.full_like(first, weight)
        alpha[len(x) :] *= -1
        self._tangents.second(torch.zeros_like(y), alpha, 0.0)
        return float((alpha * first).sum())


def loss_by_autograd(
    prior: Prior,
    x: Tensor,
    noise: Tensor,
    t_hat: Tensor,
    t_weight: float = 1.0,
    boundary: bool = False,
    explicit: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three terms written down plainly, with a graph: the yardstick of :class:`ScoreMatching`."""
    y = x + _root(t_hat) * noise
    y.requires_grad_(True)
    (gradient,) = torch.autograd.grad(prior.energy(y, t_hat).sum(), y, create_graph=True)
    d = x[0].numel()
    x_term = 0.5 * (_root(t_hat) * gradient - noise).square().sum() / (d * len(x))
    t_term = t_weight * _t_term(prior, y, t_hat, noise if explicit else None)
    edge = t_weight * _boundary_term(prior, x, noise) if boundary else torch.zeros_like(t_term)
    return x_term, t_term, edge


def _root(t_hat: Tensor) -> Tensor:
    return (0.5 * t_hat).exp()[:, None, None, None]


def _t_term(prior: Prior, y: Tensor, t_hat: Tensor, noise: Tensor | None) -> Tensor:
    """The implicit form or, given the noise, the explicit one."""
    d = y[0].numel()
    first, second = prior.t_derivatives(y, t_hat)
    if noise is not None:
        s = 0.5 * (d - noise.square().sum((1, 2, 3)))
        return 0.5 * (first - s).square().mean() / d**2
    return 0.5 * (first**2 - 2 * second).mean() / d**2


def _boundary_term(prior: Prior, x: Tensor, noise: Tensor) -> Tensor:
    low, high = prior.t_hat_range
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for sign, end in ((1, high), (-1, low)):
        t_hat = torch.full((len(x),), end, dtype=x.dtype, device=x.device)
        first, _ = prior.t_derivatives(x + _root(t_hat) * noise, t_hat)
        total = total + sign * first.mean()
    return total / (high - low) / x[0].numel() ** 2
