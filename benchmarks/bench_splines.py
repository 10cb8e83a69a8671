"""Splines against the price of moving memory, and against five basis functions a pixel.

The floor is a kernel that reads every number once and writes two.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from measure import Row, Setting, main, ratio

from gncprior.native import kernels
from gncprior.splines import Grid, tables_of

GRID = Grid(63, -3.5, 3.5)


class Jobs:
    """The things compared, on features that hardly ever leave the grid, with room for two results."""

    def __init__(self, *shape: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(shape, generator=generator).mul_(0.8)
        self.g = torch.randn(shape, generator=generator)
        self.c = torch.randn(*shape[:2], GRID.weights, generator=generator)
        self.tables = tables_of(self.c)
        self.inverse_gamma = torch.full(shape[:2], 1 / GRID.gamma)
        self.a, self.b = torch.empty_like(self.x), torch.empty_like(self.x)

    def spline(self) -> None:
        kernels.evaluate(self.x, self.tables, self.inverse_gamma, (self.a, self.b, None))

    def local_bases(self) -> None:
        kernels.local_bases(self.x, self.c, self.inverse_gamma, self.a, self.b)

    def scatter(self) -> None:
        kernels.scatter(self.x, self.g, self.inverse_gamma, GRID.knots)

    def floor(self) -> None:
        kernels.read_once_write_twice(self.x, self.a, self.b)


def measure(setting: Setting) -> Iterator[Row]:
    shape = (1, 8, 64, 64) if setting.quick else (8, 48, 256, 256)
    name = "×".join(map(str, shape))
    on = Jobs(*shape)
    yield ratio(f"φ and φ' on {name} / floor", on.spline, on.floor, setting, at_most=1.5)
    yield ratio(f"scatter on {name} / floor", on.scatter, on.floor, setting, at_most=4)
    yield ratio(f"5 local bases / φ and φ' on {name}", on.local_bases, on.spline, setting)
    torch.set_num_threads(1)
    yield ratio("the same with one thread", on.local_bases, on.spline, setting, at_least=20)
    on = Jobs(1, 8, 128, 128)  # without the memory's part in it
    yield ratio("the same with one thread in cache", on.local_bases, on.spline, setting)
    yield ratio("φ and φ' / floor with one thread in cache", on.spline, on.floor, setting)
    yield ratio("scatter / floor with one thread in cache", on.scatter, on.floor, setting)
    torch.set_num_threads(setting.threads)


if __name__ == "__main__":
    main("splines", measure)
