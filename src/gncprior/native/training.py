"""Calls the native kernels that only training needs; see :mod:`gncprior.native.kernels`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gncprior.native.kernels import _check, _float32, _library, _pointer


def _dense(*tensors: Tensor | None) -> None:
    dense = all(t is None or t.is_contiguous() for t in tensors)
    _check(dense and _float32(*tensors), "kernels need dense float32 arrays")


def expand(
    weight: Tensor, first: Tensor, beta: Tensor, part: int, tables: Sequence[Tensor]
) -> None:
    """Write tables (B, C, 5, N+2) of weights (C, O, N+4), and those of derivatives of the first images.

    beta (3, B, 5) belongs to the five weights in t̂ from ``first`` (B,) on.
    """
    _dense(weight, beta, *tables)
    channels, times, length = weight.shape
    images, knots = len(first), length - 4
    shapes = [(count, channels, 5, knots + 2) for count in (images, part, part)]
    _check(beta.shape == (3, images, 5), "beta does not fit")
    _check(
        all(t.shape == s for t, s in zip(tables, shapes, strict=False)), "tables do not fit weights"
    )
    _check(len(tables) == (3 if part else 1), "tables of derivatives are missing")
    pointers = [*map(_pointer, tables), None, None][:3]
    _library().gnc_expand(
        weight.data_ptr(), first.data_ptr(), beta.data_ptr(), images, part, channels, times, knots,
        *pointers, torch.get_num_threads(),
    )  # fmt: skip


def contract(
    tables: Tensor, first: Tensor, beta: Tensor, grads: Sequence[Tensor], weight: Tensor
) -> None:
    """Write the gradient in the weights, given those (float64) in the tables: the transpose of expand."""
    _dense(tables, beta, weight)
    dense = all(g.is_contiguous() and g.dtype == torch.float64 for g in grads)
    _check(dense, "gradients of tables must be dense float64 arrays")
    channels, times, length = weight.shape
    images, part = len(first), len(grads[1]) if len(grads) > 1 else 0
    _check(len(grads) == (3 if part else 1) and beta.shape == (3, images, 5), "arrays do not fit")
    for g, count in zip(grads, (images, part, part), strict=False):
        _check(g.shape == (count, channels, 5, length - 2), "gradients do not fit weights")
    _check(tables.shape == grads[0].shape, "tables do not fit their gradient")
    pointers = [*map(_pointer, grads), None, None][:3]
    _library().gnc_contract(
        tables.data_ptr(), first.data_ptr(), beta.data_ptr(), images, part, channels, times,
        length - 4, *pointers, weight.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip


Pass = tuple[Tensor, Tensor, Tensor | None, Sequence[Tensor | None], Tensor, float]


def _arguments(layer: Pass) -> list[int | float | None]:
    """u, Kz, u̇ (or None), tables of φ, φ_t̂ and αφ_t̂ − wφ_t̂t̂ (or None), 1/γ and w."""
    u, kz, u_dot, tables, inverse_gamma, w = layer
    _dense(u, kz, u_dot, *tables, inverse_gamma)
    images, channels = u.shape[:2]
    value, rate, mixed = tables
    assert value is not None
    part = 0 if rate is None else len(rate)
    _check(u.shape == kz.shape and inverse_gamma.shape == (images, channels), "arrays do not fit u")
    _check(u_dot is None or u_dot.shape == u[:part].shape, "u̇ does not fit u")
    _check(value.shape[:3] == (images, channels, 5), "tables do not fit u")
    later = [None if t is None else t.shape for t in (rate, mixed)]
    _check(later == [None if rate is None else value[:part].shape] * 2, "tables do not fit u")
    return [
        *map(_pointer, (u, kz, u_dot, *tables, inverse_gamma)), images, part, channels,
        u[0, 0].numel(), value.shape[3] - 2, w,
    ]  # fmt: skip


def rates(layer: Pass, z: Tensor, h_dot: Tensor) -> None:
    """Write z (as u) and ḣ of the first images; the formulas stand in :mod:`gncprior.tangents`."""
    arguments = _arguments(layer)
    u, rate = layer[0], layer[3][1]
    _dense(z, h_dot)
    part = 0 if rate is None else len(rate)
    _check(z.shape == u.shape and h_dot.shape == u[:part].shape, "outputs do not fit u")
    _library().gnc_rates(*arguments, z.data_ptr(), h_dot.data_ptr(), torch.get_num_threads())


def adjoints(
    layer: Pass, a: Tensor | None, outer_p: Tensor | None, outer_q: Tensor | None, p: Tensor, q: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Write p and q; returns gradients in the tables and the sums of ∂²_t̂R, float64, None for zero."""
    arguments = _arguments(layer)
    u, u_dot, value, rate = layer[0], layer[2], layer[3][0], layer[3][1]
    _dense(a, outer_p, outer_q, p, q)
    assert value is not None
    part = 0 if rate is None else len(rate)
    whole = (a, outer_p, p)
    _check(all(t is None or t.shape == u.shape for t in whole), "arrays do not fit u")
    _check(outer_q is None or outer_q.shape == u[:part].shape, "Q does not fit u")
    _check(u_dot is None or q.shape == u_dot.shape, "q does not fit u̇")
    grads = torch.empty(value.shape, dtype=torch.float64)
    rate_grads = second = None
    if outer_q is not None or u_dot is not None:
        rate_grads = torch.empty(part, *value.shape[1:], dtype=torch.float64)
    if u_dot is not None:
        second = torch.empty(part, u.shape[1], dtype=torch.float64)
    _library().gnc_adjoints(
        *arguments, *map(_pointer, (a, outer_p, outer_q, p, q, grads, rate_grads, second)),
        torch.get_num_threads(),
    )  # fmt: skip
    return grads, rate_grads, None if second is None else second.sum(1)
