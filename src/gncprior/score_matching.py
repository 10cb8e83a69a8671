"""Joint score matching in the image and in the log-variance (paper, section 3.2).

    Ĵ(θ) = E ½[ ‖e^{t̂/2} ∇_y R(y,t̂) − n‖² + m_t((∂_t̂R)² − 2∂²_t̂R) ],   y = x + e^{t̂/2} n,  m_t = 1/d

Both terms are reported, and differentiated, per pixel (divided by d) and as means over images.  The
implicit second term lacks the boundary term of its integration by parts,
(m_t/(t̂_max−t̂_min)) (E ∂_t̂R(y,t̂_max) − E ∂_t̂R(y,t̂_min)), which is added on request.

The gradient in θ of the first term needs no graph of graphs.  With the residual r = e^{t̂/2}∇R − n and
v = e^{t̂/2} r held fixed it is that of the directional derivative ⟨∇R, v⟩ = d/dε R(y+εv): one sweep
forward for the features u, one back for ∇R, one forward for their rates u̇ = du/dε, and one back:

    b_L = φ_L''u̇_L,   B_{l−1} = K_lᵀ b_l,   b_{l−1} = φ'B_{l−1} + φ''u̇ A_{l−1},   A_{l−1} = K_lᵀ g_l

with ∂K_l = ∂⟨K_l ḣ_{l−1}, g_l⟩ + ∂⟨K_l h_{l−1}, b_l⟩ and the moments of B_l (for φ_l) and of u̇_l A_l (for φ_l').
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gncprior.buffers import Buffers
from gncprior.errors import GncpriorError
from gncprior.filters import (
    convolve_into,
    convolve_transpose_into,
    weight_grad,
    zero_mean,
)
from gncprior.prior import Prior
from gncprior.splines import (
    Collapsed,
    differentiate,
    differentiate_transpose,
    evaluate_into,
    scatter,
    soft_histogram,
)


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
    term, on the same part.
    """

    def __init__(
        self, prior: Prior, t_weight: float = 1.0, t_fraction: float = 1.0, boundary: bool = False
    ) -> None:
        if not (t_weight >= 0 and 0 < t_fraction <= 1):
            raise GncpriorError(
                "The weight of the t̂ term must be ≥ 0 and its part of the batch in (0, 1]."
            )
        self.prior, self.t_weight, self.t_fraction, self.boundary = (
            prior,
            t_weight,
            t_fraction,
            boundary,
        )
        self._buffers = Buffers()

    def __call__(self, x: Tensor, noise: Tensor, t_hat: Tensor) -> Terms:
        """The terms; ``grad`` of every parameter is overwritten."""
        for p in self.prior.parameters():
            p.grad = None
        y = torch.addcmul(x, noise, _root(t_hat))
        one_layer = self.prior.architecture.layers == 1
        x_term, t_term = self._sweeps(y, noise, t_hat, with_t=one_layer and self.t_weight > 0)
        part = max(1, round(self.t_fraction * len(x)))
        if self.t_weight > 0 and not one_layer:
            with torch.enable_grad():
                loss = self.t_weight * _t_term(self.prior, y[:part], t_hat[:part])
                loss.backward()
            t_term = float(loss.detach())
        boundary = 0.0
        if self.boundary and self.t_weight > 0:
            with torch.enable_grad():
                loss = self.t_weight * _boundary_term(self.prior, x[:part], noise[:part])
                loss.backward()
            boundary = float(loss.detach())
        return Terms(x_term, t_term, boundary)

    @torch.no_grad()
    def _sweeps(self, y: Tensor, noise: Tensor, t_hat: Tensor, with_t: bool) -> tuple[float, float]:
        """The denoising term and its gradient by four sweeps; for L = 1 the t̂ term rides along."""
        prior, images = self.prior, len(y)
        d = y[0].numel()
        scale = 1 / (d * images)
        last = prior.architecture.layers - 1
        w = prior.kernels()
        with torch.enable_grad():  # the small map from weights to tables is left to autograd
            layers = prior.collapse(t_hat, derivatives=2 if with_t else 0)
        shape = (images, prior.architecture.filters, *y.shape[2:])

        def memory(name: str, layer: int) -> Tensor:
            return self._buffers.get(f"{name} {layer}", shape, y)

        def pair(name: str, layer: int, like: Tensor) -> Tensor:
            """Room for h and ḣ (or b and g) one after the other, so that one call serves both."""
            return self._buffers.get(f"{name} {layer}", (2 * images, *like.shape[1:]), y)

        u: list[Tensor] = []
        slope: list[Tensor] = []
        curvature: list[Tensor] = []
        adjoint: list[Tensor] = []
        inputs = [pair("inputs", 0, y)]
        inputs[0][:images] = y
        for i, (k, phi) in enumerate(zip(w, layers, strict=True)):
            u.append(convolve_into(inputs[i][:images], k, memory("u", i)))
            slope.append(memory("slope", i))
            curvature.append(memory("curvature", i))
            value = None
            if i < last:
                inputs.append(pair("inputs", i + 1, u[i]))
                value = inputs[i + 1][:images]
            evaluate_into(u[i], phi.tables[0], phi.inverse_gamma, value, slope[i], curvature[i])

        outputs = [pair("outputs", i, u[i]) for i in range(last + 1)]  # b and g
        outputs[last][images:] = slope[last]
        for i in range(last, 0, -1):
            adjoint.insert(
                0, convolve_transpose_into(outputs[i][images:], w[i], memory("adjoint", i - 1))
            )
            torch.mul(slope[i - 1], adjoint[0], out=outputs[i - 1][images:])
        gradient = convolve_transpose_into(
            outputs[0][images:], w[0], self._buffers.get("gradient", y.shape, y)
        )

        root = _root(t_hat)
        residual = gradient.mul_(root).sub_(noise)
        x_term = 0.5 * scale * float(residual.flatten().dot(residual.flatten()))
        v = inputs[0][images:]
        torch.mul(residual, root * scale, out=v)

        t_term = 0.0
        histogram_grads: tuple[Tensor, ...] = ()
        time_tables = None
        if with_t:
            t_term, histogram_grads, time_tables = self._t_term_of_one_layer(
                u[0], layers[0], d, scale
            )

        rate = []
        for i in range(last + 1):
            rate.append(convolve_into(inputs[i][images:], w[i], memory("rate", i)))
            if i < last:
                torch.mul(slope[i], rate[i], out=inputs[i + 1][images:])

        table_grads: list[Tensor] = []
        outer: Tensor | None = None  # B_l
        for i in range(last, -1, -1):
            phi, b = layers[i], outputs[i][:images]
            torch.mul(curvature[i], rate[i], out=b)
            weight = rate[i]
            if outer is not None:
                b.mul_(adjoint[i]).addcmul_(slope[i], outer)
                weight = rate[i].mul_(adjoint[i])
            moments = differentiate_transpose(
                scatter(u[i], weight, phi.inverse_gamma, phi.knots), phi.inverse_gamma
            )
            if outer is not None:
                moments = moments + scatter(u[i], outer, phi.inverse_gamma, phi.knots)
            table_grads.insert(0, moments)
            if time_tables is not None:  # what the t̂ term says of u, in the buffer of φ''
                evaluate_into(u[i], time_tables, phi.inverse_gamma, curvature[i])
                b.add_(curvature[i])
            kernel = (w[i].shape[-2], w[i].shape[-1])
            filters_grad = weight_grad(inputs[i], outputs[i], kernel)
            prior.filters[i].grad = zero_mean(filters_grad) if i == 0 else filters_grad
            if i:
                outer = convolve_transpose_into(b, w[i], memory("outer", i - 1))

        tables = [phi.tables[0] for phi in layers]
        grads = table_grads
        if with_t:
            tables, grads = [*tables, *layers[0].tables[1:]], [*grads, *histogram_grads]
        torch.autograd.backward(tables, [g.to(y.dtype) for g in grads])
        return x_term, t_term

    def _t_term_of_one_layer(
        self, u: Tensor, phi: Collapsed, d: int, scale: float
    ) -> tuple[float, tuple[Tensor, ...], Tensor]:
        """For L = 1 all sums come from one soft histogram: R_t̂ = ⟨T_t̂, H⟩, R_t̂t̂ = ⟨T_t̂t̂, H⟩."""
        histogram = soft_histogram(u, phi.inverse_gamma, phi.knots)
        first, second = ((t.double() * histogram).sum((1, 2, 3)) for t in phi.tables[1:])
        weight = self.t_weight * scale / d  # m_t = 1/d
        loss = 0.5 * weight * float((first**2 - 2 * second).sum())
        alpha = (weight * first)[:, None, None, None]
        slopes = alpha * phi.tables[1].double() - weight * phi.tables[2].double()
        slopes = differentiate(slopes, phi.inverse_gamma.double()).to(u.dtype)
        return loss, (alpha * histogram, -weight * histogram), slopes


def loss_by_autograd(
    prior: Prior,
    x: Tensor,
    noise: Tensor,
    t_hat: Tensor,
    t_weight: float = 1.0,
    boundary: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three terms written down plainly, with a graph: the yardstick of :class:`ScoreMatching`."""
    y = x + _root(t_hat) * noise
    y.requires_grad_(True)
    (gradient,) = torch.autograd.grad(prior.energy(y, t_hat).sum(), y, create_graph=True)
    d = x[0].numel()
    x_term = 0.5 * (_root(t_hat) * gradient - noise).square().sum() / (d * len(x))
    t_term = t_weight * _t_term(prior, y, t_hat)
    edge = t_weight * _boundary_term(prior, x, noise) if boundary else torch.zeros_like(t_term)
    return x_term, t_term, edge


def _root(t_hat: Tensor) -> Tensor:
    return (0.5 * t_hat).exp()[:, None, None, None]


def _t_term(prior: Prior, y: Tensor, t_hat: Tensor) -> Tensor:
    d = y[0].numel()
    first, second = prior.t_derivatives(y, t_hat)
    return 0.5 * (first**2 - 2 * second).mean() / d**2


def _boundary_term(prior: Prior, x: Tensor, noise: Tensor) -> Tensor:
    low, high = prior.t_hat_range
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for sign, end in ((1, high), (-1, low)):
        t_hat = torch.full((len(x),), end, dtype=x.dtype, device=x.device)
        first, _ = prior.t_derivatives(x + _root(t_hat) * noise, t_hat)
        total = total + sign * first.mean()
    return total / (high - low) / x[0].numel() ** 2
