r"""How ∇R answers to x, to t̂ and to its parameters: what back-propagation through a gradient step needs.

For a direction v, one sweep forward and one back give the derivatives of ⟨∇_xR(x,t̂), v⟩:

.. math:: ∇^2_xR\,v,\qquad ⟨∂_{\hat t}∇_xR, v⟩, \qquad ∂_θ⟨∇_xR, v⟩ .

With u_l = K_l h_{l−1} and h_l = φ_l(u_l), the rates in the direction v are u̇_l = K_l ḣ_{l−1} and
ḣ_l = φ_l'(u_l)·u̇_l, and ⟨∇R, v⟩ = Ṙ = ⟨1, φ_L'·u̇_L⟩.  Going back, with a_L = 1 and ȧ_L = 0,

    g_l = φ_l'·a_l,    ġ_l = φ_l''·u̇_l·a_l + φ_l'·ȧ_l,    a_{l−1} = K_lᵀ g_l,    ȧ_{l−1} = K_lᵀ ġ_l,

and ∇²R v = ȧ_0.  A function φ_l enters Ṙ by Σ ȧ_l·φ_l(u_l) + u̇_l·a_l·φ_l'(u_l).  That is linear in its
tables, so the moments it has with them are the derivative in the weights of φ_l, and their product with
the tables of ∂_t̂φ_l is the derivative in t̂; the filters enter by ∂⟨K_l ḣ_{l−1}, g_l⟩ + ∂⟨K_l h_{l−1}, ġ_l⟩.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gncprior.buffers import Buffers
from gncprior.filters import convolve_into, convolve_transpose_into, weight_grad_into, zero_mean
from gncprior.passes import Pass, adjoints
from gncprior.prior import Prior
from gncprior.splines import evaluate_into


@torch.no_grad()
def gradient_adjoint(
    prior: Prior, x: Tensor, t_hat: Tensor, v: Tensor,
    *, buffers: Buffers | None = None, parameters: bool = False, half: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """∇²R(x,t̂) v, in memory of ``buffers``, and ⟨v, ∂_t̂∇R(x,t̂)⟩ per image, (B,) in float64.

    t̂ is one value per image, (B,).  With ``parameters`` the derivative of ⟨∇R, v⟩, summed over images,
    is added to ``grad`` of every parameter.  With ``half`` inner filters may multiply in bfloat16.
    """
    buffers = Buffers() if buffers is None else buffers
    with torch.set_grad_enabled(parameters):  # the small map from weights to tables is autograd's
        layers = prior.collapse(t_hat, derivatives=1)
    filters = prior.kernels()
    images, last = len(x), len(filters) - 1
    shape = (images, prior.architecture.filters, *x.shape[2:])

    def pairs(name: str) -> Tensor:
        """Two features in one batch, so that a filter meets both in one go."""
        return buffers.get(name, (2 * images, *shape[1:]), x)

    inputs = [torch.cat([x, v], out=buffers.get("inputs 0", (2 * images, *x.shape[1:]), x))]
    features, outputs = [], []  # [u, u̇] and [ġ, g], of which g is φ' at first
    for i, (k, phi) in enumerate(zip(filters, layers, strict=True)):
        features.append(convolve_into(inputs[i], k, pairs(f"features {i}"), half and i > 0))
        outputs.append(pairs(f"outputs {i}"))
        (u, du), (_, slope) = features[i].split(images), outputs[i].split(images)
        if i < last:
            inputs.append(pairs(f"inputs {i + 1}"))
        h, dh = inputs[i + 1].split(images) if i < last else (None, None)
        evaluate_into(u, phi.tables[0], phi.inverse_gamma, h, slope)
        if dh is not None:
            torch.mul(slope, du, out=dh)

    mixed = torch.zeros(images, dtype=torch.float64, device=x.device)
    a: Tensor | None = None
    da: Tensor | None = None
    table_grads: list[Tensor] = []
    for i in reversed(range(last + 1)):
        phi, k = layers[i], filters[i]
        (u, du), (dg, g) = features[i].split(images), outputs[i].split(images)
        # u̇, a and ȧ in the places of Kz, A and P: then p is ġ and the moments are M(ȧ) + Dᵀ M(a u̇)
        at = Pass(u, kz=du, u_dot=None, phi=phi, mixed=None, w=0.0)
        moments = adjoints(at, a, da, None, dg, dg).value  # without u_dot no q is written
        if a is not None:
            g.mul_(a)
        mixed += (phi.tables[1].detach() * moments).sum((1, 2, 3))
        if parameters:
            table_grads.insert(0, moments.to(x.dtype))
            grad = weight_grad_into(inputs[i], outputs[i], torch.empty_like(k), half and i > 0)
            _add(prior.filters[i], zero_mean(grad) if i == 0 else grad)
        if i:
            da, a = convolve_transpose_into(outputs[i], k, pairs("adjoints"), half).split(images)
    product = convolve_transpose_into(dg, filters[0], buffers.get("product", x.shape, x))
    if parameters:
        torch.autograd.backward([phi.tables[0] for phi in layers], table_grads)
    return product, mixed


def _add(parameter: Tensor, grad: Tensor) -> None:
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
