r"""How ∇R answers to x and to t̂: what back-propagation through a gradient step needs.

For a direction v, one sweep gives

.. math:: ∇^2_xR(x,\hat t)\,v \qquad\text{and}\qquad ⟨v, ∂_{\hat t}∇_xR(x,\hat t)⟩ .

With u_l = K_l h_{l−1}, h_l = φ_l(u_l), the derivatives in the direction v are u̇_l = K_l ḣ_{l−1},
ḣ_l = φ_l'(u_l)·u̇_l.  Going back, a_l = K_{l+1}ᵀ g_{l+1} with a_L = 1 and g_l = φ_l'·a_l, and in the
direction v, ġ_l = φ_l''·u̇_l·a_l + φ_l'·ȧ_l.  Then ∇²R v = K_1ᵀ ġ_1, and since
∂R/∂t̂ = Σ_l ⟨a_l, ∂_t̂φ_l(u_l)⟩, the second is Σ_l ⟨ȧ_l, ∂_t̂φ_l⟩ + ⟨a_l, ∂_t̂φ_l'·u̇_l⟩.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gncprior.buffers import Buffers
from gncprior.filters import convolve_into, convolve_transpose_into
from gncprior.prior import Prior
from gncprior.splines import evaluate_into


@torch.no_grad()
def gradient_adjoint(
    prior: Prior, x: Tensor, t_hat: Tensor, v: Tensor, *, buffers: Buffers | None = None
) -> tuple[Tensor, Tensor]:
    """∇²R(x,t̂) v, in memory of ``buffers``, and ⟨v, ∂_t̂∇R(x,t̂)⟩ per image, (B,) in float64.

    t̂ is one value per image, (B,).
    """
    buffers = Buffers() if buffers is None else buffers
    layers = prior.collapse(t_hat, derivatives=1)
    filters = prior.kernels()
    last = len(filters) - 1
    shape = (len(x), prior.architecture.filters, *x.shape[2:])

    def features(name: str) -> Tensor:
        return buffers.get(name, shape, x)

    h, dh = x.contiguous(), v.contiguous()
    sweeps: list[tuple[Tensor, ...]] = []
    for i, (k, phi) in enumerate(zip(filters, layers, strict=True)):
        u = convolve_into(h, k, features(f"u {i}"))
        du = convolve_into(dh, k, features("du"))
        rate, bent_rate = features(f"rate {i}"), features(f"bent rate {i}")
        only_slope = i == last  # ȧ_L = 0: the value of ∂_t̂φ_L is not needed
        evaluate_into(u, phi.tables[1], phi.inverse_gamma, None if only_slope else rate, bent_rate)
        h, bend = features("h"), features(f"bend {i}")
        evaluate_into(u, phi.tables[0], phi.inverse_gamma, h if i < last else None, u, bend)
        slope = u  # φ' has taken the place of u
        bent_rate.mul_(du)
        bend.mul_(du)
        dh = du.mul_(slope)
        sweeps.append((slope, bend, rate, bent_rate))
    slope, bend, _, bent_rate = sweeps[last]
    mixed = _total(bent_rate)
    g, dg = slope, bend
    for i in reversed(range(last)):
        a = convolve_transpose_into(g, filters[i + 1], features("h"))
        da = convolve_transpose_into(dg, filters[i + 1], features("du"))
        slope, bend, rate, bent_rate = sweeps[i]
        mixed += _total(rate.mul_(da)) + _total(bent_rate.mul_(a))
        dg = bend.mul_(a).addcmul_(slope, da)
        g = slope.mul_(a)
    product = convolve_transpose_into(dg, filters[0], buffers.get("product", x.shape, x))
    return product, mixed


def _total(h: Tensor) -> Tensor:
    return h.flatten(1).sum(1, dtype=torch.float64)
