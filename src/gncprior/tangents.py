r"""Derivatives of the prior along a direction in image and t̂, and their gradient in the parameters.

What training needs of a prior is ∇R and ∂_t̂R and then, with v, α and w held fixed, the gradient in θ of

.. math:: F(θ) = ⟨∇R, v⟩ + α ∂_t̂R − w ∂²_t̂R

summed over images.  No graph is needed: F is the rate of R along (v, α), less w times the second
Taylor coefficient in t̂, and both are propagated through the layers.  With u_l = K_l h_{l−1} and
h_l = φ_l(u_l), with ḣ and u̇ the derivatives in t̂ and z what belongs to F (linear in rates, and so one
for the sum), a first pair of sweeps gives

    g_L = φ_L',   A_{l−1} = K_lᵀ g_l,   g_{l−1} = φ'A_{l−1},   ∇R = K_1ᵀ g_1,   ∂_t̂R = Σ_l ⟨A_l, φ_t̂⟩   (A_L = 1)

and a second pair, forward from u̇_1 = 0, K_1 v and back from P_L = Q_L = 0, gives F = ⟨1, z_L⟩ and its adjoints:

    ḣ = φ_t̂ + φ'u̇,   z = φ'Kz + αφ_t̂ − w(φ_t̂t̂ + 2φ'_t̂ u̇ + φ''u̇²)
    q = φ'Q − 2wA(φ'_t̂ + φ''u̇)
    p = φ'P + Q(φ'_t̂ + φ''u̇) + A[φ''Kz + αφ'_t̂ − w(φ'_t̂t̂ + 2φ''_t̂ u̇ + φ'''u̇²)]

with Q_{l−1} = K_lᵀ q_l the adjoint of ḣ, P_{l−1} = K_lᵀ p_l that of h; that of z is A, which is known
already.  The filters' gradient is ∂⟨K z, g⟩ + ∂⟨K ḣ, q⟩ + ∂⟨K h, p⟩, and the tables' are moments of
u (M = scatter, D = ∂/∂x):

    φ: M(P) + Dᵀ M(A Kz + Q u̇) − w DᵀDᵀ M(A u̇²),   φ_t̂: M(Q) + α M(A) − 2w Dᵀ M(A u̇),   φ_t̂t̂: −w M(A).

The same moments give ∂_t̂R and ∂²_t̂R as products with the tables, summed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gncprior.buffers import Buffers
from gncprior.expansions import Expansion, expand
from gncprior.filters import convolve_into, convolve_transpose_into, weight_grad_into, zero_mean
from gncprior.prior import Prior
from gncprior.splines import (
    Collapsed,
    Splines,
    differentiate,
    differentiate_transpose,
    evaluate_into,
    soft_histogram,
)


@dataclass
class _Layer:
    """What the sweeps leave behind in a layer; all of it is memory of the buffers.

    ``inputs`` holds z, ḣ, h of the layer below one after the other and ``outputs`` g, q, p, so that
    one convolution serves two of them and one weight gradient all three.
    """

    kernel: Tensor
    phi: Expansion
    inputs: Tensor
    outputs: Tensor
    u: Tensor
    slope: Tensor  # φ'
    curvature: Tensor  # φ''
    half: bool
    adjoint: Tensor | None = None  # A; None stands for ones
    mass: Tensor | None = None  # M(A)
    rates: Tensor | None = None  # Kz, then u̇
    slope_rate: Tensor | None = None  # φ'_t̂ + φ''u̇
    source: Tensor | None = None  # αφ'_t̂ − w(φ'_t̂t̂ + 2φ''_t̂ u̇ + φ'''u̇²)


class Tangents:
    """The two pairs of sweeps for a prior, in memory that is kept: :meth:`first`, then :meth:`second`.

    Terms in t̂ are computed for the first ``part`` images of a batch only.  With ``half`` the filters
    between the layers, which are nearly all of the work, multiply in bfloat16 where they can.
    """

    def __init__(self, prior: Prior, half: bool = False) -> None:
        self.prior, self.half = prior, half
        self._buffers = Buffers()
        self._layers: list[_Layer] = []
        self._part = 0

    @torch.no_grad()
    def first(self, y: Tensor, t_hat: Tensor, part: int) -> tuple[Tensor, Tensor]:
        """∇R(y,t̂), good until the next call, and ∂_t̂R of the first ``part`` images in float64."""
        self._part = part
        splines = [s for s in self.prior.splines if isinstance(s, Splines)]
        self._layers = layers = [
            self._layer(i, k, expand(s, t_hat, part), y)
            for i, (k, s) in enumerate(zip(self.prior.kernels(), splines, strict=True))
        ]
        images = len(y)
        layers[0].inputs[-images:] = y
        for layer, above in zip(layers, [*layers[1:], None], strict=True):
            convolve_into(layer.inputs[-images:], layer.kernel, layer.u, layer.half)
            value = None if above is None else above.inputs[-images:]
            phi = layer.phi
            tables, inverse = phi.tables[0], phi.inverse_gamma
            evaluate_into(layer.u, tables, inverse, value, layer.slope, layer.curvature)

        dt = torch.zeros(part, dtype=torch.float64, device=y.device)
        for i in reversed(range(len(layers))):
            layer, phi = layers[i], layers[i].phi
            if part:
                weight = None if layer.adjoint is None else layer.adjoint[:part]
                layer.mass = self._moments(layer, weight)
                dt += _product(phi.tables[1], layer.mass)
            g = layer.outputs[:images]
            if i:
                below = layers[i - 1]
                shape = below.u.shape
                below.adjoint = self._buffers.get(f"adjoint {i - 1}", shape, y)
                convolve_transpose_into(g, layer.kernel, below.adjoint, layer.half)
                torch.mul(below.slope, below.adjoint, out=below.outputs[:images])
        gradient = self._buffers.get("gradient", y.shape, y)
        return convolve_transpose_into(layers[0].outputs[:images], layers[0].kernel, gradient), dt

    @torch.no_grad()
    def second(self, v: Tensor, alpha: Tensor, w: float) -> Tensor:
        """Adds ∂F/∂θ to the gradients of the parameters; ∂²_t̂R of the first images, in float64.

        ``alpha`` has one number (float64) for each of them.
        """
        self._rates(v, alpha, w)
        return self._adjoints(alpha, w)

    def _rates(self, v: Tensor, alpha: Tensor, w: float) -> None:
        """Forward: Kz and u̇ of every layer, and the sources of the adjoints."""
        layers, part, images = self._layers, self._part, len(v)
        layers[0].inputs[:images] = v
        for i, (layer, above) in enumerate(zip(layers, [*layers[1:], None], strict=True)):
            shape = layer.u.shape[1:]
            moving = images + (part if i else 0)  # the image itself does not move with t̂
            layer.rates = self._buffers.get(f"rates {i}", (moving, *shape), v)
            convolve_into(layer.inputs[:moving], layer.kernel, layer.rates, layer.half)
            z = h_dot = value = None
            if above is not None:
                z, h_dot = above.inputs[:images], above.inputs[images:-images]
                torch.mul(layer.slope, layer.rates[:images], out=z)
            if not part:
                continue

            u, inverse = layer.u[:part], layer.phi.inverse_gamma[:part]
            slope, curvature = layer.slope[:part], layer.curvature[:part]
            t0, t1, t2 = layer.phi.tables
            layer.slope_rate = slope_rate = self._buffers.get(f"slope rate {i}", u.shape, v)
            layer.source = source = self._buffers.get(f"source {i}", u.shape, v)
            bend, third = (self._buffers.get(name, u.shape, v) for name in ("bend", "third"))
            evaluate_into(u, t1, inverse, h_dot, slope_rate, bend if i else None)
            if z is not None:
                value = self._buffers.get("value", u.shape, v)
            mixed = alpha[:, None, None, None].to(v.dtype) * t1 - w * t2
            evaluate_into(u, mixed, inverse, value, source)
            if z is not None and value is not None:
                z[:part].add_(value)
            if i:
                u_dot = layer.rates[images:]
                evaluate_into(u, differentiate(t0[:part], inverse), inverse, None, None, third)
                source.addcmul_(third.mul_(u_dot).add_(bend, alpha=2), u_dot, value=-w)
                torch.mul(curvature, u_dot, out=bend)
                if z is not None and h_dot is not None:
                    h_dot.addcmul_(slope, u_dot)
                    z[:part].addcmul_(
                        torch.add(bend, slope_rate, alpha=2, out=third), u_dot, value=-w
                    )
                slope_rate.add_(bend)

    def _adjoints(self, alpha: Tensor, w: float) -> Tensor:
        """Back: p and q of every layer, and from them the gradients of filters and tables."""
        layers, part = self._layers, self._part
        images = len(layers[0].u)
        second = torch.zeros_like(alpha)
        outer_p = outer_q = None  # P and Q
        for i in reversed(range(len(layers))):
            layer, a = layers[i], layers[i].adjoint
            phi, slope, rates = layer.phi, layer.slope, layer.rates
            assert rates is not None
            u_dot = rates[images:] if i and part else None
            p, q = layer.outputs[-images:], layer.outputs[images:-images]
            torch.mul(layer.curvature, rates[:images], out=p)
            if layer.source is not None:
                p[:part].add_(layer.source)
            if a is not None:
                p.mul_(a)
                rates[:images].mul_(a)
            if u_dot is not None:
                assert layer.slope_rate is not None
                torch.mul(layer.slope_rate, -2 * w, out=q)
                if a is not None:
                    q.mul_(a[:part])
            if outer_p is not None:
                p.addcmul_(slope, outer_p)
            if outer_q is not None and layer.slope_rate is not None:
                p[:part].addcmul_(outer_q, layer.slope_rate)
                if u_dot is not None:
                    q.addcmul_(slope[:part], outer_q)
                    rates[:part].addcmul_(outer_q, u_dot)

            grad = _transposed(self._moments(layer, rates[:images]), phi)
            if outer_p is not None:
                grad += self._moments(layer, outer_p)
            grads = [grad]
            if part:
                mass = layer.mass
                assert mass is not None
                t1_grad = alpha[:, None, None, None] * mass
                second += _product(phi.tables[2], mass)
                if outer_q is not None:
                    t1_grad += self._moments(layer, outer_q)
                if u_dot is not None:
                    weight = u_dot if a is None else self._buffers.get("bend", u_dot.shape, u_dot)
                    if a is not None:
                        torch.mul(a[:part], u_dot, out=weight)
                    moments = _transposed(self._moments(layer, weight), phi)
                    second += 2 * _product(phi.tables[1], moments)
                    t1_grad -= 2 * w * moments
                    moments = self._moments(layer, weight.mul_(u_dot))
                    moments = _transposed(_transposed(moments, phi), phi)
                    second += _product(phi.tables[0], moments)
                    grad[:part] -= w * moments
                grads += [t1_grad, -w * mass]
            _add(phi.splines.weight, phi.transpose(grads))

            filters_grad = weight_grad_into(
                layer.inputs, layer.outputs, torch.empty_like(layer.kernel), layer.half
            )
            _add(self.prior.filters[i], filters_grad if i else zero_mean(filters_grad))
            if i:
                shape = (part + images, *layer.inputs.shape[1:])
                outer = self._buffers.get(f"outer {i}", shape, p)
                convolve_transpose_into(layer.outputs[images:], layer.kernel, outer, layer.half)
                outer_q, outer_p = outer[:part], outer[part:]
        return second

    def _layer(self, i: int, kernel: Tensor, phi: Expansion, y: Tensor) -> _Layer:
        images, filters = len(y), kernel.shape[0]
        stacked = 2 * images + (self._part if i else 0)

        def memory(name: str, count: int, channels: int = filters) -> Tensor:
            return self._buffers.get(f"{name} {i}", (count, channels, *y.shape[2:]), y)

        outputs = memory("outputs", stacked)
        last = i == self.prior.architecture.layers - 1
        return _Layer(
            kernel=kernel,
            phi=phi,
            inputs=memory("inputs", stacked, kernel.shape[1]),
            outputs=outputs,
            u=memory("u", images),
            slope=outputs[:images] if last else memory("slope", images),  # g_L = φ_L'
            curvature=memory("curvature", images),
            half=self.half and i > 0,
        )

    def _moments(self, layer: _Layer, weight: Tensor | None) -> Tensor:
        """M(weight) of the first images, as many as the weight has; those of ones for ∂_t̂R."""
        count = self._part if weight is None else len(weight)
        phi = layer.phi
        return soft_histogram(layer.u[:count], phi.inverse_gamma[:count], phi.knots, weight)


def _product(tables: Tensor, moments: Tensor) -> Tensor:
    """⟨T, M⟩ of every image."""
    return (tables[: len(moments)] * moments).sum((1, 2, 3))


def _transposed(moments: Tensor, phi: Collapsed) -> Tensor:
    return differentiate_transpose(moments, phi.inverse_gamma[: len(moments)])


def _add(parameter: Tensor, grad: Tensor) -> None:
    parameter.grad = grad if parameter.grad is None else parameter.grad + grad
