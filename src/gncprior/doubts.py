r"""When a restored picture cannot be right: one number for how far it is from what the data allow.

Deep priors were learned from photographs, and steps that serve those best may run away on print or patterns in
black and white.  Two things are known of every result, whatever the prior:

* what denoising takes off is noise of σ (the discrepancy principle).  In a block of 32 × 32 pixels the root mean
  square of x − z is about σ, or less where texture is kept: on photographs never more than 1.05 σ was seen;
* values that were inpainted are hardly beyond those around them: on photographs never by more than 0.09 of
  the range of the known ones.

A doubt is the worst of that over a part of the picture, in units of :data:`MOST_RESIDUAL` or
:data:`MOST_OVERSHOOT`: above 1 there is reason for a second opinion.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

BLOCK = 32
MOST_RESIDUAL = 1.25  # σ
MOST_OVERSHOOT = 0.25  # of the range of what is known
_LEAST_RANGE = 0.05  # a flat picture has no range of its own


def residual_doubt(x: Tensor, z: Tensor, sigma: float) -> float:
    """The largest root mean square of x − z (C, h, w) in a block."""
    square = (x - z).double().square()
    worst = avg_pool2d(square, BLOCK, ceil_mode=True).max() if _fits(square) else square.mean()
    return _number(worst.sqrt() / (MOST_RESIDUAL * sigma))


def overshoot_doubt(x: Tensor, z: Tensor, unknown: Tensor) -> float:
    """How far unknown pixels of x (C, h, w) are beyond the known ones of z."""
    known = z[~unknown]
    low, high = known.min(), known.max()
    beyond = torch.maximum(low - x, x - high).amax().clamp(min=0)
    return _number(beyond / (MOST_OVERSHOOT * (high - low).clamp(min=_LEAST_RANGE)))


def _fits(x: Tensor) -> bool:
    return min(x.shape[-2:]) >= BLOCK


def _number(doubt: Tensor) -> float:
    """Infinite where there is no number, for then there is no picture either."""
    value = float(doubt)
    return math.inf if math.isnan(value) else value
