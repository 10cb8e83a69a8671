"""What is done to every pixel of a layer between two convolutions of :mod:`gncprior.tangents`.

The formulas and the letters are those of its docstring; :mod:`gncprior.sensitivities` needs the part of
them that has no t̂.  The native kernels do each pass in one go, with all that is between its inputs and
outputs in the first-level cache; the functions named reference write the same down in torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gncprior.native import kernels, training
from gncprior.splines import Collapsed, differentiate_transpose, evaluate_into, soft_histogram


@dataclass(frozen=True)
class Pass:
    """A layer on its way: its features u, the rates Kz and u̇ (None where it is zero), its tables, w.

    u̇ and the tables of φ_t̂ and αφ_t̂ − wφ_t̂t̂ (``mixed``) are there for the first images only.
    """

    u: Tensor
    kz: Tensor
    u_dot: Tensor | None
    phi: Collapsed
    mixed: Tensor | None
    w: float

    @property
    def part(self) -> int:
        return 0 if self.mixed is None else len(self.mixed)

    def native(self) -> training.Pass:
        first = self.phi.tables[1] if self.mixed is not None else None
        tables = (self.phi.tables[0], first, self.mixed)
        return self.u, self.kz, self.u_dot, tables, self.phi.inverse_gamma, self.w

    def jet(self, tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Value, slope and curvature of the images that there are tables of."""
        u = self.u[: len(tables)]
        out = (torch.empty_like(u), torch.empty_like(u), torch.empty_like(u))
        evaluate_into(u, tables, self.phi.inverse_gamma[: len(tables)], *out)
        return out


@dataclass(frozen=True)
class Gradients:
    """What a layer adds, in float64, None for zero, to the gradients in its tables and to ∂²_t̂R."""

    value: Tensor  # M(P) + Dᵀ M(A Kz + Q u̇) − w DᵀDᵀ M(A u̇²)
    rate: Tensor | None  # M(Q) − 2w Dᵀ M(A u̇)
    second: Tensor | None  # ⟨A, 2φ'_t̂ u̇ + φ''u̇²⟩ of every image


def rates(at: Pass, z: Tensor, h_dot: Tensor) -> None:
    """Write z and ḣ."""
    if kernels.serve(at.u):
        training.rates(at.native(), z, h_dot)
    else:
        _rates_reference(at, z, h_dot)


def adjoints(
    at: Pass, a: Tensor | None, outer_p: Tensor | None, outer_q: Tensor | None, p: Tensor, q: Tensor
) -> Gradients:
    """Write p and, where there is u̇, q, given A (None for ones), P and Q (None for zero)."""
    if kernels.serve(at.u):
        return Gradients(*training.adjoints(at.native(), a, outer_p, outer_q, p, q))
    return _adjoints_reference(at, a, outer_p, outer_q, p, q)


def _rates_reference(at: Pass, z: Tensor, h_dot: Tensor) -> None:
    part, v = at.part, at.u_dot
    _, slope, curvature = at.jet(at.phi.tables[0])
    torch.mul(slope, at.kz, out=z)
    if at.mixed is None:
        return
    value, slope_t, _ = at.jet(at.phi.tables[1])
    z[:part] += at.jet(at.mixed)[0]
    h_dot.copy_(value)
    if v is not None:
        h_dot += slope[:part] * v
        z[:part] -= at.w * v * (2 * slope_t + curvature[:part] * v)


def _adjoints_reference(
    at: Pass, a: Tensor | None, outer_p: Tensor | None, outer_q: Tensor | None, p: Tensor, q: Tensor
) -> Gradients:
    part, v, w = at.part, at.u_dot, at.w
    slope, curvature, third = at.jet(at.phi.slope_tables())
    ones = torch.ones_like(at.u) if a is None else a
    moved = ones * at.kz
    torch.mul(curvature, at.kz, out=p)
    rate: Tensor | None = None
    second: Tensor | None = None
    slope_t = slope[:0]  # φ'_t̂ + φ''u̇ in the end
    if at.mixed is not None:
        _, slope_t, curvature_t = at.jet(at.phi.tables[1])
        p[:part] += at.jet(at.mixed)[1]
        if v is not None:
            bend = curvature[:part] * v
            second = (ones[:part] * v * (2 * slope_t + bend)).flatten(1).sum(1, dtype=torch.float64)
            p[:part] -= w * v * (2 * curvature_t + third[:part] * v)
            slope_t += bend
            torch.mul(slope_t * ones[:part], -2 * w, out=q)
            rate = -2 * w * _moments(at, ones[:part] * v, 1)
    p *= ones
    if outer_p is not None:
        p += slope * outer_p
    if outer_q is not None:
        p[:part] += slope_t * outer_q
        of_q = _moments(at, outer_q)
        rate = of_q if rate is None else rate + of_q
        if v is not None:
            q += slope[:part] * outer_q
            moved[:part] += outer_q * v
    value = _moments(at, moved, 1)
    if outer_p is not None:
        value += _moments(at, outer_p)
    if v is not None:
        value[:part] -= w * _moments(at, ones[:part] * v**2, 2)
    return Gradients(value, rate, second)


def _moments(at: Pass, weight: Tensor, derivatives: int = 0) -> Tensor:
    """M(weight), or Dᵀ of it so many times, of as many images as there are weights of."""
    inverse = at.phi.inverse_gamma[: len(weight)]
    moments = soft_histogram(at.u[: len(weight)], inverse, at.phi.knots, weight)
    for _ in range(derivatives):
        moments = differentiate_transpose(moments, inverse)
    return moments
