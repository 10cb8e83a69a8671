"""The eight symmetries of a square, and means over them.

A prior that was learned from pictures in all positions still answers a little differently to a picture that
was turned.  What it makes of the turned picture, turned back, is another restoration of the first one, and the
mean of several is better than each, as their errors differ in part.  Two views are the picture itself and a
quarter turn, four all rotations, and eight the mirror images too.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gncprior.errors import GncpriorError

VIEWS = (1, 2, 4, 8)


def turn(x: Tensor, k: int) -> Tensor:
    """The last two axes of x turned anticlockwise by k mod 4 quarters, and mirrored before from k = 4 on."""
    if k >= 4:
        x = x.flip(-1)
    return x.rot90(k % 4, (-2, -1)).contiguous()


def turn_back(x: Tensor, k: int) -> Tensor:
    """The inverse of :func:`turn`."""
    x = x.rot90(-(k % 4), (-2, -1))
    return (x.flip(-1) if k >= 4 else x).contiguous()


def mean_over(views: int, restore: Callable[[int], Tensor]) -> Tensor:
    """The mean of ``restore(k)``, turned back, over the first views k of a picture."""
    if views not in VIEWS:
        raise GncpriorError(f"The number of views is 1, 2, 4 or 8, not {views}.")
    total = restore(0)
    for k in range(1, views):
        total = total + turn_back(restore(k), k)
    return total / views if views > 1 else total
