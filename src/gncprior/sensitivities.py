r"""How ∇R answers to x, to t̂ and to its parameters: what back-propagation through a gradient step needs.

For a direction v, one sweep forward and one back give the derivatives of ⟨∇_xR(x,t̂), v⟩:

.. math:: ∇^2_xR\,v,\qquad ⟨∂_{\hat t}∇_xR, v⟩, \qquad ∂_θ⟨∇_xR, v⟩ .

With u_l = K_l h_{l−1} and h_l = φ_l(u_l), the rates in the direction v are u̇_l = K_l ḣ_{l−1} and
ḣ_l = φ_l'(u_l)·u̇_l, and ⟨∇R, v⟩ = Ṙ = ⟨1, φ_L'·u̇_L⟩.  Going back, with a_L = 1 and ȧ_L = 0,

    g_l = φ_l'·a_l,    ġ_l = φ_l''·u̇_l·a_l + φ_l'·ȧ_l,    a_{l−1} = K_lᵀ g_l,    ȧ_{l−1} = K_lᵀ ġ_l,

and ∇²R v = ȧ_0.  A function φ_l enters Ṙ by Σ ȧ_l·φ_l(u_l) + u̇_l·a_l·φ_l'(u_l), so that sum with
∂_t̂φ_l in its place is the derivative in t̂, and its moments are those in the weights of φ_l; the
filters enter by ∂⟨K_l ḣ_{l−1}, g_l⟩ + ∂⟨K_l h_{l−1}, ġ_l⟩.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gncprior.buffers import Buffers
from gncprior.filters import convolve_into, convolve_transpose_into, weight_grad, zero_mean
from gncprior.prior import Prior
from gncprior.splines import differentiate_transpose, evaluate_into, scatter


@torch.no_grad()
def gradient_adjoint(
    prior: Prior, x: Tensor, t_hat: Tensor, v: Tensor,
    *, buffers: Buffers | None = None, parameters: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """∇²R(x,t̂) v, in memory of ``buffers``, and ⟨v, ∂_t̂∇R(x,t̂)⟩ per image, (B,) in float64.

    t̂ is one value per image, (B,).  With ``parameters`` the derivative of ⟨∇R, v⟩, summed over images,
    is added to ``grad`` of every parameter.
    """
    buffers = Buffers() if buffers is None else buffers
    with torch.set_grad_enabled(parameters):  # the small map from weights to tables is autograd's
        layers = prior.collapse(t_hat, derivatives=1)
    filters = prior.kernels()
    last = len(filters) - 1
    shape = (len(x), prior.architecture.filters, *x.shape[2:])

    def features(name: str) -> Tensor:
        return buffers.get(name, shape, x)

    h, dh = x.contiguous(), v.contiguous()
    inputs, u, du, slope, curvature = [(h, dh)], [], [], [], []
    for i, (k, phi) in enumerate(zip(filters, layers, strict=True)):
        u.append(convolve_into(h, k, features(f"u {i}")))
        du.append(convolve_into(dh, k, features(f"du {i}")))
        slope.append(features(f"slope {i}"))
        curvature.append(features(f"curvature {i}"))
        outputs = (features(f"h {i}") if i < last else None, slope[i], curvature[i])
        evaluate_into(u[i], phi.tables[0], phi.inverse_gamma, *outputs)
        if i < last:
            h, dh = features(f"h {i}"), torch.mul(slope[i], du[i], out=features(f"dh {i}"))
            inputs.append((h, dh))

    mixed = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    a: Tensor | None = None
    da: Tensor | None = None
    product: Tensor | None = None
    table_grads: list[Tensor] = []
    for i in reversed(range(last + 1)):
        phi, k = layers[i], filters[i]
        # u̇·a, ġ and g take the places of u̇, φ'' and φ'
        ua = du[i] if a is None else du[i].mul_(a)
        dg = curvature[i].mul_(ua)
        g = slope[i]
        if a is not None and da is not None:
            dg.addcmul_(g, da)
            g.mul_(a)
        rate = None if da is None else features("rate")
        rate_slope = features("rate slope")
        evaluate_into(u[i], phi.tables[1].detach(), phi.inverse_gamma, rate, rate_slope)
        mixed += _total(rate_slope.mul_(ua))
        if rate is not None and da is not None:
            mixed += _total(rate.mul_(da))
        if parameters:
            moments = scatter(u[i], ua, phi.inverse_gamma, phi.knots)
            moments = differentiate_transpose(moments, phi.inverse_gamma)
            if da is not None:
                moments = moments + scatter(u[i], da, phi.inverse_gamma, phi.knots)
            table_grads.insert(0, moments.to(x.dtype))
            size = (k.shape[-2], k.shape[-1])
            grad = weight_grad(inputs[i][1], g, size) + weight_grad(inputs[i][0], dg, size)
            _add(prior.filters[i], zero_mean(grad) if i == 0 else grad)
        if i:
            a = convolve_transpose_into(g, k, features("a"))
            da = convolve_transpose_into(dg, k, features("da"))
        else:
            product = convolve_transpose_into(dg, k, buffers.get("product", x.shape, x))
    if parameters:
        torch.autograd.backward([phi.tables[0] for phi in layers], table_grads)
    assert product is not None
    return product, mixed


def _add(parameter: Tensor, grad: Tensor) -> None:
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def _total(h: Tensor) -> Tensor:
    return h.flatten(1).sum(1, dtype=torch.float64)
