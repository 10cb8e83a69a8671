r"""The linear map from the weights of a layer's splines to its tables at given t̂, and its transpose.

For training, where the map is applied both ways in every step: as :meth:`gncprior.splines.Splines.collapse`,
but without a graph.  It is sparse, with five weights around t̂ and five around x.  The transpose sums in
float64 and leaves what has no part in a loss at exactly zero: an optimizer that divides
by the size of a gradient would take whole steps along what is only rounding.

With c = Σ_o w_o β_o(t̂) (or with β_o', β_o'' for the derivatives in t̂) and a row a of the table

    a_k = Σ_m β_km c_m,      transposed      ċ_m += Σ_k β_km ȧ_k,      ẇ_o += β_o(t̂) ċ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gncprior.native import kernels, training
from gncprior.splines import (
    BASIS,
    GHOSTS,
    ORDER,
    Collapsed,
    Splines,
    euler,
    euler_transpose,
    time_window,
)


@dataclass(frozen=True)
class Expansion(Collapsed):
    """Tables at t̂; those of derivatives in t̂ for the first images only."""

    splines: Splines
    index: Tensor  # (B, 5): the weights around t̂
    beta: Tensor  # (3, B, 5): β_o of them and its derivatives, zero where those are not wanted
    rho: Tensor | None  # of the scaled variant

    def transpose(self, grads: list[Tensor]) -> Tensor:
        """The gradient in the weights, given those in the tables (float64, and used up)."""
        if self.rho is not None and len(grads) > 1:
            _unscale(grads, self.rho)
        weight = torch.empty_like(self.splines.weight)
        if kernels.serve(weight):
            training.contract(
                self.tables[0], self.index[:, 0].contiguous(), self.beta, grads, weight
            )
            return weight
        clip = _tails(self.tables[0])[..., 2, :] > 0
        total = torch.zeros_like(weight, dtype=torch.float64)
        for g, beta in zip(grads, self.beta.double(), strict=False):
            c = _contract(g, clip[: len(g)]).transpose(0, 1)
            for m in range(ORDER):
                total.index_add_(1, self.index[: len(g), m], c * beta[: len(g), m, None])
        return total.to(weight.dtype)


@torch.no_grad()
def expand(splines: Splines, t_hat: Tensor, part: int) -> Expansion:
    """Tables of φ at t̂ (B,) and, if ``part`` is not 0, of φ_t̂ and φ_t̂t̂ of the first ``part`` images."""
    weight, knots = splines.weight, splines.x_grid.knots
    inverse, rho = splines.scales(t_hat)
    index, value = time_window(t_hat, splines.t_grid, 0)
    beta = value.new_zeros(3, *value.shape)
    beta[0] = value
    for order in (1, 2) if part else ():
        beta[order, :part] = time_window(t_hat[:part], splines.t_grid, order)[1]
    counts = (len(t_hat), part, part) if part else (len(t_hat),)
    tables = [weight.new_empty(count, weight.shape[0], ORDER, knots + 2) for count in counts]
    if kernels.serve(weight):
        training.expand(weight, index[:, 0].contiguous(), beta, part, tables)
    else:
        for table, values in zip(tables, beta, strict=False):
            _expand(_sum(weight, index, values[: len(table)]), table)
        clip = _ends(tables[0])[..., 2, :] > 0
        for table in tables:
            _continue(table, clip[: len(table)])
    if part and rho is not None:
        rho = rho[:part]
        e0 = euler(tables[0][:part])
        tables[2] += 0.25 * rho**2 * euler(e0) - 0.5 * rho * (1 - rho) * e0 - rho * euler(tables[1])
        tables[1] -= 0.5 * rho * e0
    return Expansion(tuple(tables), inverse, splines, index, beta, rho)


def _unscale(grads: list[Tensor], rho: Tensor) -> None:
    """The transpose of what the scaled variant does to the tables."""
    rho = rho.double()
    part = len(grads[1])
    scaled = rho * grads[2]
    grads[0][:part] += euler_transpose(
        0.25 * euler_transpose(rho * scaled) - 0.5 * (1 - rho) * scaled - 0.5 * rho * grads[1]
    )
    grads[1] -= euler_transpose(scaled)


def _sum(weight: Tensor, index: Tensor, value: Tensor) -> Tensor:
    """Σ_o w_o β_o for every image, as many as there are values: (B, C, N+4)."""
    some = index[: len(value)]
    terms = [weight.index_select(1, some[:, m]) * value[:, m, None] for m in range(ORDER)]
    return torch.stack(terms).sum(0).transpose(0, 1)


def _taps() -> Iterator[tuple[int, int, float]]:
    """k, m and β_km where it is not zero."""
    for k, row in enumerate(BASIS):
        for m, value in enumerate(row):
            if value:
                yield k, m, value


def _expand(c: Tensor, tables: Tensor) -> None:
    """The rows of the tables of coefficients c, but for the first and the last."""
    knots = tables.shape[-1] - 2
    rows = tables[..., 1:-1].zero_()
    for k, m, value in _taps():
        rows[..., k, :].add_(c[..., m : m + knots], alpha=value)


def _contract(grad: Tensor, clip: Tensor) -> Tensor:
    """The transpose of :func:`_expand` and :func:`_continue`."""
    knots = grad.shape[-1] - 2
    ends, tails = _ends(grad), _tails(grad)
    ends[..., :2, :] += tails[..., :2, :]
    ends[..., 2, :] += tails[..., 2, :] * clip
    c = grad.new_zeros(*grad.shape[:-2], knots + 2 * GHOSTS)
    for k, m, value in _taps():
        c[..., m : m + knots].add_(grad[..., k, 1:-1], alpha=value)
    return c


def _continue(tables: Tensor, clip: Tensor) -> None:
    """The first and last row: value, slope and, where the function is convex, curvature of the next."""
    ends, tails = _ends(tables), _tails(tables)
    tails[..., :2, :] = ends[..., :2, :]
    tails[..., 2, :] = ends[..., 2, :] * clip
    tails[..., 3:, :] = 0


def _ends(tables: Tensor) -> Tensor:
    """The rows of the end knots."""
    return tables[..., 1:-1][..., :: tables.shape[-1] - 3]


def _tails(tables: Tensor) -> Tensor:
    """The rows beyond the end knots."""
    return tables[..., :: tables.shape[-1] - 1]
