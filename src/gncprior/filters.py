r"""Convolutions with symmetric boundary, and the filters they start from (paper, section 3.1).

(K x)_o[r] = Σ_i Σ_k w_{oik} x̃_i[r+k−c], where x̃ is x reflected about its edges (the edge pixel repeated)
and c = ⌊size/2⌋.  The boundary belongs to the operator, and the transpose is the exact one, so that
Kᵀφ'(Kx) is the gradient of ⟨1, φ(Kx)⟩.

The three functions below are each other's derivatives, and so differentiable as often as one likes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gncprior.native import kernels

Size = tuple[int, int]


def reflected(n: int, size: int, device: torch.device | None = None) -> Tensor:
    """For a line of n pixels, the pixel that stands at −c … n−1+(size−1−c) when it is reflected."""
    centre = size // 2
    i = torch.arange(-centre, n + size - 1 - centre, device=device) % (2 * n)
    return torch.where(i < n, i, 2 * n - 1 - i)


def _extend(x: Tensor, size: Size) -> Tensor:
    rows = reflected(x.shape[-2], size[0], x.device)
    columns = reflected(x.shape[-1], size[1], x.device)
    return x[..., rows, :][..., columns]


def _fold(x: Tensor, shape: Size, size: Size) -> Tensor:
    """The transpose of :func:`_extend`."""
    rows = reflected(shape[0], size[0], x.device)
    columns = reflected(shape[1], size[1], x.device)
    x = x.new_zeros(*x.shape[:-2], shape[0], x.shape[-1]).index_add(-2, rows, x)
    return x.new_zeros(*x.shape[:-1], shape[1]).index_add(-1, columns, x)


def _size(w: Tensor) -> Size:
    return (w.shape[-2], w.shape[-1])


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        if kernels.serve(x, w):
            return kernels.convolve(x, w)
        return F.conv2d(_extend(x, _size(w)), w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dx = convolve_transpose(g, w) if ctx.needs_input_grad[0] else None
        dw = weight_grad(x, g, _size(w)) if ctx.needs_input_grad[1] else None
        return dx, dw


class _ConvolveTranspose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, r: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(r, w)
        if kernels.serve(r, w):
            return kernels.convolve_transpose(r, w)
        return _fold(F.conv_transpose2d(r, w), (r.shape[-2], r.shape[-1]), _size(w))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        r, w = ctx.saved_tensors
        dr = convolve(g, w) if ctx.needs_input_grad[0] else None
        dw = weight_grad(g, r, _size(w)) if ctx.needs_input_grad[1] else None
        return dr, dw


class _WeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, r: Tensor, size: Size) -> Tensor:
        ctx.save_for_backward(x, r)
        if kernels.serve(x, r):
            return kernels.weight_grad(x, r, size)
        # correlate x with r, images and channels changing places
        extended = _extend(x, size).transpose(0, 1)
        return F.conv2d(extended, r.transpose(0, 1)).transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, r = ctx.saved_tensors
        dx = convolve_transpose(r, g) if ctx.needs_input_grad[0] else None
        dr = convolve(x, g) if ctx.needs_input_grad[1] else None
        return dx, dr, None


def convolve(x: Tensor, w: Tensor) -> Tensor:
    """K x for x (B, I, H, W) and filters w (O, I, kh, kw)."""
    out: Tensor = _Convolve.apply(x, w)
    return out


def convolve_transpose(r: Tensor, w: Tensor) -> Tensor:
    """Kᵀ r for r (B, O, H, W): ⟨K x, r⟩ = ⟨x, Kᵀ r⟩."""
    out: Tensor = _ConvolveTranspose.apply(r, w)
    return out


def weight_grad(x: Tensor, r: Tensor, size: Size) -> Tensor:
    """∂⟨K x, r⟩/∂w, shaped like w."""
    out: Tensor = _WeightGrad.apply(x, r, size)
    return out


def convolve_into(x: Tensor, w: Tensor, out: Tensor, half: bool = False) -> Tensor:
    """K x written into ``out``, without a graph.

    ``half`` (here and below) allows products of bfloat16, where the kernels in use have them.
    """
    with torch.no_grad():
        if kernels.serve(x, w, out):
            return kernels.convolve(x, w, out, half)
        return out.copy_(convolve(x, w))


def convolve_transpose_into(r: Tensor, w: Tensor, out: Tensor, half: bool = False) -> Tensor:
    """Kᵀ r written into ``out``, without a graph."""
    with torch.no_grad():
        if kernels.serve(r, w, out):
            return kernels.convolve_transpose(r, w, out, half)
        return out.copy_(convolve_transpose(r, w))


def weight_grad_into(x: Tensor, r: Tensor, out: Tensor, half: bool = False) -> Tensor:
    """∂⟨K x, r⟩/∂w written into ``out``, without a graph."""
    with torch.no_grad():
        if kernels.serve(x, r, out):
            return kernels.weight_grad(x, r, _size(out), out, half)
        return out.copy_(weight_grad(x, r, _size(out)))


# ---------------------------------------------------------------- where filters start


def dct_filters(size: Size, channels: int = 1) -> Tensor:
    """The orthonormal 2-D DCT basis without its constant filters: ((kh·kw − 1)·channels, channels, kh, kw).

    For colour the channels are transformed too (grey, then two differences), and what is constant in
    space is left out of each.
    """

    def basis(n: int) -> Tensor:
        k = torch.arange(n, dtype=torch.float64)
        rows = torch.cos(math.pi / n * (k[None, :] + 0.5) * k[:, None]) * math.sqrt(2 / n)
        rows[0] /= math.sqrt(2)
        return rows

    down, across, colour = basis(size[0]), basis(size[1]), basis(channels)
    filters = torch.einsum("pc,qy,rx->qrpcyx", colour, down, across)
    frequency = (
        torch.arange(size[0])[:, None, None] ** 2
        + torch.arange(size[1])[None, :, None] ** 2
        + torch.arange(channels)[None, None, :] * 0.5
    )
    filters = filters.reshape(-1, channels, *size)[channels:]  # the first have q = r = 0
    order = frequency.flatten()[channels:].argsort(stable=True)  # low frequencies first
    return filters[order]


def zero_mean(w: Tensor) -> Tensor:
    """Filters made blind to a constant in every channel: to a grey, or to a colour."""
    return w - w.mean(dim=(2, 3), keepdim=True)
