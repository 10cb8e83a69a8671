r"""Inner functions that go on in straight lines beyond the knots, so that no picture blows up.

A spline is continued beyond its end knots by value, slope and curvature (:mod:`gncprior.splines`).  For the last
potentials that is as it should be: an energy that rises like u² keeps features from running away.  An inner
function with a bent tail squares what is too large already.  With two of them R grows like the eighth power of
the contrast and ∇R like the seventh, and no step is short enough: what a photograph never shows, such as
print in black and white, came back as not a number.  With straight tails R grows like the square of the contrast.

The rule of continuation has straight tails among its cases, as it takes negative curvature for none.  Half the
curvature at the first knot, in units of the knots' distance, is a₂ = (w₀ + 4w₁ − 10w₂ + 4w₃ + w₄)/16, and likewise
at the last.  The outermost weight w₀, whose β reaches half a knot into the grid, is set such that a₂ is zero, or
rather so little below that it stays there when rounded.  That is linear in the weights at every knot in t̂, so
functions that are lines at t_max (:func:`gncprior.convexity.settle_at_t_max`) remain so.
"""

from __future__ import annotations

import torch

from gncprior.prior import Prior
from gncprior.splines import BASIS

_BELOW = 1e-6  # how far a₂ is below zero, as a share of the sizes of its terms


@torch.no_grad()
def straighten_tails(prior: Prior) -> None:
    """Let all functions but the last layer's be lines beyond their end knots."""
    for splines in prior._splines()[:-1]:
        taps = torch.tensor(BASIS[2], dtype=torch.float64, device=splines.weight.device)
        for w in (splines.weight, splines.weight.flip(-1)):
            inner = w[..., 1 : len(taps)].double() * taps[1:]
            outer = -(inner.sum(-1) + _BELOW * inner.abs().sum(-1)) / taps[0]
            splines.weight[..., 0 if w is splines.weight else -1] = outer.to(w)
