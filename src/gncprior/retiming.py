r"""A family with another clock: R'(x, ψ(t̂)) = R(x, t̂), ψ increasing, so that every step has potentials of its own.

The steps of a learned schedule crowd where they serve most: three of ten may have nearly the same t̂, and then
the same potentials, whatever is learned.  ψ moves the I values of t̂ apart, to equal distances in the order that
they have, and leaves t̂_min and t̂_max where they are, so that the family is convex where it was.

With weights w_o over the knots in t̂ the new ones are w' = T w: of all that have R' = R at the I steps and at
both ends those with the least second differences.  The steps of that schedule do exactly what they did; between
them, and so at other levels, whose t̂ are moved by the same ψ, potentials change a little.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from gncprior.errors import GncpriorError
from gncprior.prior import Prior
from gncprior.splines import time_basis
from gncprior.unrolled import Schedules

ENDS = (0.04, 0.86)  # where the least and the largest t̂ come to, as shares of the range


@torch.no_grad()
def spread_times(prior: Prior, schedules: Schedules, level: float) -> tuple[Prior, Schedules]:
    """A prior and its schedules with the t̂ of one level's steps at equal distances."""
    grid = prior.architecture.t_grid
    ends = torch.tensor([grid.low, grid.high], dtype=torch.float64)
    row = int((schedules.levels - level).abs().argmin())
    old = schedules.t_hats[row].double().clamp(grid.low, grid.high)
    if len(old) + 2 > grid.knots + 4:
        raise GncpriorError(
            f"A prior with {grid.knots} knots in t̂ has no potentials of their own for {len(old)} steps."
        )
    new = torch.empty_like(old)
    places = torch.linspace(*ENDS, len(old), dtype=torch.float64)
    new[old.argsort()] = torch.lerp(ends[0], ends[1], places)
    old, new = torch.cat([old, ends]), torch.cat([new, ends])
    refit = _smoothest(time_basis(new, grid).double()) @ time_basis(old, grid).double()  # T
    prior = copy.deepcopy(prior)
    for splines in prior._splines():
        weight = splines.weight
        weight.copy_(torch.einsum("po,jol->jpl", refit, weight.double()).to(weight))
    t_hats = _interpolate(schedules.t_hats.double().clamp(grid.low, grid.high), old, new)
    return prior, replace(schedules, t_hats=t_hats, info={})


def _smoothest(basis: Tensor) -> Tensor:
    """The map from values b at some t̂ to the weights with these values that bend least: min ‖Dw‖², Aw = b."""
    values, size = basis.shape
    second = torch.eye(size, dtype=torch.float64).diff(n=2, dim=0)
    system = torch.zeros(size + values, size + values, dtype=torch.float64)
    system[:size, :size] = second.T @ second + 1e-9 * torch.eye(size, dtype=torch.float64)
    system[:size, size:], system[size:, :size] = basis.T, basis
    right = torch.zeros(size + values, values, dtype=torch.float64)
    right[size:] = torch.eye(values, dtype=torch.float64)
    return torch.linalg.solve(system, right)[:size]


def _interpolate(x: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """ψ: the increasing function, linear in between, that takes every old value to its new one."""
    old, order = old.sort()
    new = new[order]
    right = torch.searchsorted(old, x).clamp(1, len(old) - 1)
    share = (x - old[right - 1]) / (old[right] - old[right - 1]).clamp(min=1e-12)
    return torch.lerp(new[right - 1], new[right], share.clamp(0, 1))
