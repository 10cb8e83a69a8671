r"""Large pictures in tiles.

A step of a solver looks only a few pixels far, so a part of the result is found from that part of the
picture and a halo around it:

* ∇R(x) at a pixel depends on x within ``reach`` = 2·(⌊k_1/2⌋ + (L−1)⌊k/2⌋) pixels: K_1, …, K_L and back.
  :class:`TiledEnergy` computes the gradient tile by tile, exactly, and so bounds the memory of the
  48 features;
* I steps depend on x within I·reach pixels.  Far fewer matter: the influence falls by a factor at every
  reach, and :data:`ENOUGH` pixels leave less than 1e-5 (tests measure it).

Edges of the picture itself are no cuts; there the symmetric boundary holds, as it does untiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gncprior.buffers import Buffers
from gncprior.errors import GncpriorError
from gncprior.prior import Prior

ENOUGH = 96
GRADIENT_TILE = 512  # 48 features of it take 50 MB


@dataclass(frozen=True)
class Tile:
    """Where a part of the result is (``inner``), what it is found from (``outer``), and where it is in that."""

    inner: tuple[slice, slice]
    outer: tuple[slice, slice]
    crop: tuple[slice, slice]


def tiles(size: tuple[int, int], side: int, halo: int) -> Iterator[Tile]:
    """Cover height × width by parts of about side × side, all of nearly the same size."""
    if side < 1:
        raise GncpriorError(f"A tile needs at least one pixel, not {side}.")
    for rows in _cuts(size[0], side, halo):
        for columns in _cuts(size[1], side, halo):
            inner, outer, crop = zip(rows, columns, strict=True)
            yield Tile(inner, outer, crop)


def _cuts(n: int, side: int, halo: int) -> Iterator[tuple[slice, slice, slice]]:
    count = -(-n // side)
    for k in range(count):
        start, stop = n * k // count, n * (k + 1) // count
        first, last = max(start - halo, 0), min(stop + halo, n)
        yield slice(start, stop), slice(first, last), slice(start - first, stop - first)


def reach(prior: Prior) -> int:
    """How far ∇R looks."""
    a = prior.architecture
    return 2 * (a.first_size // 2 + (a.layers - 1) * (a.inner_size // 2))


def halo(prior: Prior, steps: int) -> int:
    """The halo for this many steps."""
    return min(steps * reach(prior), max(ENOUGH, reach(prior)))


class TiledEnergy:
    """A prior whose gradient is computed in tiles; everything else is the prior's own.

    With ``half`` its inner filters multiply in bfloat16, where the processor has that.
    """

    def __init__(self, prior: Prior, side: int = GRADIENT_TILE, half: bool = False) -> None:
        self.prior, self.side = prior, side
        self.t_hat_range = prior.t_hat_range
        self._grad = partial(prior.grad, half=half)
        self.energy_and_grad = partial(prior.energy_and_grad, half=half)
        self.joint_grad = partial(prior.joint_grad, half=half)

    @torch.no_grad()
    def grad(self, x: Tensor, t_hat: float | Tensor, *, buffers: Buffers | None = None) -> Tensor:
        """∇_x R(x,t)."""
        size = (x.shape[2], x.shape[3])
        if max(size) <= self.side:
            return self._grad(x, t_hat, buffers=buffers)
        buffers = Buffers() if buffers is None else buffers
        out = buffers.get("gradient of all tiles", x.shape, x)
        for tile in tiles(size, self.side, reach(self.prior)):
            part = self._grad(x[(..., *tile.outer)], t_hat, buffers=buffers)
            out[(..., *tile.inner)] = part[(..., *tile.crop)]
        return out
