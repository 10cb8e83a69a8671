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

Moreover ∂²_t̂R = Σ_l ⟨A_l, φ_t̂t̂ + 2φ'_t̂ u̇ + φ''u̇²⟩; M(A) gives the first part of it, as it gives ∂_t̂R.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gncprior.buffers import Buffers
from gncprior.expansions import Expansion, expand
from gncprior.filters import convolve_into, convolve_transpose_into, weight_grad_into, zero_mean
from gncprior.passes import Pass, adjoints, rates
from gncprior.prior import Prior
from gncprior.splines import Splines, evaluate_into, soft_histogram


@dataclass
class _Layer:
    """What the sweeps leave behind in a layer; all that is large is memory of the buffers.

    ``inputs`` holds z, ḣ, h of the layer below one after the other and ``outputs`` g, q, p, so that
    one convolution serves two of them and one weight gradient all three.
    """

    kernel: Tensor
    phi: Expansion
    inputs: Tensor
    outputs: Tensor
    u: Tensor
    half: bool
    adjoint: Tensor | None = None  # A; None stands for ones
    mass: Tensor | None = None  # M(A)
    rates: Pass | None = None


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
        images = len(y)
        splines = [s for s in self.prior.splines if isinstance(s, Splines)]
        self._layers = layers = [
            self._layer(i, k, expand(s, t_hat, part), y)
            for i, (k, s) in enumerate(zip(self.prior.kernels(), splines, strict=True))
        ]
        layers[0].inputs[-images:] = y
        for layer, above in zip(layers, [*layers[1:], None], strict=True):
            convolve_into(layer.inputs[-images:], layer.kernel, layer.u, layer.half)
            value = None if above is None else above.inputs[-images:]
            slope = layer.outputs[:images]  # g is φ'A
            evaluate_into(layer.u, layer.phi.tables[0], layer.phi.inverse_gamma, value, slope)

        dt = torch.zeros(part, dtype=torch.float64, device=y.device)
        for i in reversed(range(len(layers))):
            layer, g = layers[i], layers[i].outputs[:images]
            if layer.adjoint is not None:
                g *= layer.adjoint
            if part:
                weight = None if layer.adjoint is None else layer.adjoint[:part]
                inverse, knots = layer.phi.inverse_gamma[:part], layer.phi.knots
                layer.mass = soft_histogram(layer.u[:part], inverse, knots, weight)
                dt += self._product(layer.phi.tables[1], layer.mass)
            if i:
                below = layers[i - 1]
                below.adjoint = self._buffers.get(f"adjoint {i - 1}", below.u.shape, y)
                convolve_transpose_into(g, layer.kernel, below.adjoint, layer.half)
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
        """Forward: Kz and u̇ of every layer."""
        layers, part, images = self._layers, self._part, len(v)
        layers[0].inputs[:images] = v
        for i, (layer, above) in enumerate(zip(layers, [*layers[1:], None], strict=True)):
            moving = images + (part if i else 0)  # the image itself does not move with t̂
            moved = self._buffers.get(f"rates {i}", (moving, *layer.u.shape[1:]), v)
            convolve_into(layer.inputs[:moving], layer.kernel, moved, layer.half)
            mixed = None
            if part:
                _, first, second = layer.phi.tables
                mixed = self._buffers.get(f"mixed {i}", first.shape, first)
                torch.mul(first, alpha[:, None, None, None].to(v.dtype), out=mixed)
                mixed.sub_(second, alpha=w)
            u_dot = moved[images:] if i and part else None
            layer.rates = Pass(layer.u, moved[:images], u_dot, layer.phi, mixed, w)
            if above is not None:
                rates(layer.rates, above.inputs[:images], above.inputs[images:-images])

    def _adjoints(self, alpha: Tensor, w: float) -> Tensor:
        """Back: p and q of every layer, and from them the gradients of filters and weights."""
        part, second = self._part, torch.zeros_like(alpha)
        outer_p = outer_q = None  # P and Q
        for i in reversed(range(len(self._layers))):
            layer = self._layers[i]
            assert layer.rates is not None
            images = len(layer.u)
            p, q = layer.outputs[-images:], layer.outputs[images:-images]
            of = adjoints(layer.rates, layer.adjoint, outer_p, outer_q, p, q)
            grads = [of.value]
            if layer.mass is not None:
                second += self._product(layer.phi.tables[2], layer.mass)
                of_rate = self._buffers.get("of rate", layer.mass.shape, layer.mass)
                torch.mul(layer.mass, alpha[:, None, None, None], out=of_rate)
                grads += [of_rate, layer.mass.mul_(-w)]
            if of.rate is not None:
                grads[1] += of.rate
            if of.second is not None:
                second += of.second
            _add(layer.phi.splines.weight, layer.phi.transpose(grads))
            filters_grad = torch.empty_like(layer.kernel)
            weight_grad_into(layer.inputs, layer.outputs, filters_grad, layer.half)
            _add(self.prior.filters[i], filters_grad if i else zero_mean(filters_grad))
            if i:
                shape = (part + images, *layer.inputs.shape[1:])
                outer = self._buffers.get(f"outer {i}", shape, p)
                convolve_transpose_into(layer.outputs[images:], layer.kernel, outer, layer.half)
                outer_p, outer_q = outer[part:], outer[:part] if part else None
        return second

    def _product(self, tables: Tensor, moments: Tensor) -> Tensor:
        """⟨T, M⟩ of every image."""
        product = self._buffers.get("product", moments.shape, moments)
        return torch.mul(tables[: len(moments)], moments, out=product).sum((1, 2, 3))

    def _layer(self, i: int, kernel: Tensor, phi: Expansion, y: Tensor) -> _Layer:
        images, filters = len(y), kernel.shape[0]
        stacked = 2 * images + (self._part if i else 0)

        def memory(name: str, count: int, channels: int = filters) -> Tensor:
            return self._buffers.get(f"{name} {i}", (count, channels, *y.shape[2:]), y)

        return _Layer(
            kernel=kernel,
            phi=phi,
            inputs=memory("inputs", stacked, kernel.shape[1]),
            outputs=memory("outputs", stacked),
            u=memory("u", images),
            half=self.half and i > 0,
        )


def _add(parameter: Tensor, grad: Tensor) -> None:
    parameter.grad = grad if parameter.grad is None else parameter.grad + grad
