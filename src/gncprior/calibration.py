r"""Calibration in t̂, and the noise level read off the energy.

For the true density E_{y|t}[∂_t̂ R(y,t̂)] = 0 at every t̂: the energy is a negative log-density in y for each
t̂, and its normalisation is what this condition fixes.  Score matching in y cannot see it and the implicit
term in t̂ only weakly, so it is fitted after training: the part of the last potentials that is constant in
the feature, C(t̂), is chosen such that

.. math:: C'(\hat t) = −E\, ∂_{\hat t}R(y,\hat t)\,/\,\text{pixels},

per pixel, so that it holds at every image size, and without any change of ∇_x R.  For priors fine-tuned to
inpaint, :func:`set_pace` chooses C such that the joint scheme takes its time.

With one layer the part of the potentials that is linear in the feature is as free: Σ_p (K x)_p = ⟨Kᵀ1, x⟩,
and Kᵀ1 = 0 for zero-mean filters but for a border as wide as they are, where it pulls at every picture, a
flat one too.  :func:`centre` takes it off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from gncprior.buffers import Buffers
from gncprior.fidelity import Fidelity
from gncprior.filters import convolve
from gncprior.prior import Prior
from gncprior.splines import BASIS, ORDER, soft_histogram, time_basis

MIDDLE = 96  # pixels along an edge of what is looked at first for the noise level
AHEAD = 1.2  # in t̂: where its noise level may be misjudged by


@torch.no_grad()
def time_slopes(prior: Prior, images: Sequence[Tensor], t_hats: Tensor, seed: int = 0) -> Tensor:
    """∂R/∂t̂ per pixel of every image with noise of every t̂: (images, t̂).

    Inner filters may multiply in bfloat16: over all pixels its errors cancel.
    """
    generator = torch.Generator().manual_seed(seed)
    like = prior.filters[0]
    slopes = torch.zeros(len(images), len(t_hats), dtype=torch.float64)
    for i, image in enumerate(images):
        x = image.to(like)[None]
        for j, t_hat in enumerate(t_hats.tolist()):
            noise = torch.randn(x.shape, generator=generator).to(like)
            _, _, slope = prior.joint_grad(x + math.exp(t_hat / 2) * noise, t_hat, half=True)
            slopes[i, j] = float(slope) / (x.shape[2] * x.shape[3])
    return slopes


@torch.no_grad()
def centre(prior: Prior) -> None:
    """Make ∂φ/∂u(0, t̂) = 0 at every t̂ in a prior of one layer: flat pictures become stationary points.

    With more layers the linear part of the last potentials is one of the energy, and is left alone.
    """
    splines = prior._splines()
    if len(splines) > 1:
        return
    weight, grid = splines[0].weight, splines[0].x_grid
    middle = (grid.knots - 1) / 2  # where u = 0 is among the knots: on one, or half-way
    knot = int(middle)
    s = middle - knot
    taps = torch.tensor(
        [sum(k * BASIS[k][m] * s ** (k - 1) for k in range(1, ORDER)) for m in range(ORDER)],
        dtype=torch.float64,
    ).to(weight)
    near = weight[..., knot : knot + ORDER]
    slope = (near * taps).sum(-1, keepdim=True) / grid.gamma
    weight.sub_(slope * grid.centres().to(weight))  # Σ μ_l β_l(u) = u


@torch.no_grad()
def calibrate(
    prior: Prior, images: Sequence[Tensor], points: int = 37, seed: int = 0
) -> dict[str, float]:
    """Fit C(t̂) on clean images (C, H, W), add it to the prior, and say how large the mean slope was and is."""
    grid = prior.architecture.t_grid
    t_hats = torch.linspace(grid.low, grid.high, points, dtype=torch.float64)
    before = time_slopes(prior, images, t_hats, seed).mean(0)
    after = before + _add_constants(prior, t_hats, -before)
    return {
        "mean_time_slope_before": float(before.abs().max()),
        "mean_time_slope_after": float(after.abs().max()),
    }


@torch.no_grad()
def set_pace(
    prior: Prior, problems: Sequence[tuple[Fidelity, Tensor]], steps: int
) -> dict[str, float]:
    """Fit C(t̂) such that joint minimisation goes from t̂_max to t̂_min in about so many steps.

    In a prior that was fine-tuned to inpaint t is no noise level any more, and what ∂R/∂t̂ says of noisy images
    has no meaning for the images between.  Here it is fitted on these: along the predefined scheme on
    problems (D, x_0), ∂R/∂t̂ per pixel becomes the distance of its t̂_i on average, so that the step
    t̂ − ∂_t̂R/d of the joint scheme is one of the predefined scheme.  Where that diverges, nothing is changed.
    """
    low, high = prior.t_hat_range
    t_hats = torch.linspace(high, low, steps, dtype=torch.float64)
    buffers, means = Buffers(), []
    for fidelity, x in problems:
        slopes = torch.zeros_like(t_hats)
        for i, t_hat in enumerate(t_hats.tolist()):
            _, grad, slope = prior.joint_grad(x, t_hat, buffers=buffers, half=True)
            slopes[i] = float(slope.sum()) * x.shape[1] / x.numel()
            x = fidelity.prox(x - math.exp(t_hat) * grad, math.exp(t_hat))
        if slopes.isfinite().all():  # else steps e^t̂ are too long for this prior
            means.append(slopes)
    pace = (high - low) / (steps - 1)
    if not means:
        return {"pace": math.inf}
    slopes = torch.stack(means).mean(0)
    after = slopes + _add_constants(prior, t_hats, pace - slopes)
    return {
        "pace": pace,
        "largest_deviation_before": float((slopes - pace).abs().max()),
        "largest_deviation_after": float((after - pace).abs().max()),
    }


def _add_constants(prior: Prior, t_hats: Tensor, wanted: Tensor) -> Tensor:
    """Add C(t̂) with C' as close to what is wanted at t̂ as the knots allow, and return that C'.

    C = Σ_o δ_o β_o(t̂) by least squares; the constant, which C' does not see, stays 0.
    """
    basis = time_basis(t_hats, prior.architecture.t_grid, order=1)
    delta = torch.linalg.lstsq(basis, wanted[:, None], driver="gelsd").solution[:, 0]
    last = prior._splines()[-1]
    # a constant in x is a constant in all weights; the filters share it
    last.weight.add_((delta / len(last.weight)).to(last.weight)[None, :, None])
    return basis @ delta


@torch.no_grad()
def noise_level(prior: Prior, y: Tensor, points: int = 32) -> tuple[Tensor, Tensor]:
    """t̂* = the first minimum of R(y,·) met coming down from t̂_max, and ∂²R/∂t̂² there; each (B,).

    Pairs of an image and a t much below its noise are never seen in training, so R is extrapolation
    there and a global minimum would be one of the extrapolation.  1/√(∂²R/∂t̂²) is the error bar of t̂*.
    """
    found = [joint_noise_level(prior, [one[None]], points) for one in y]
    best, curvature = zip(*found, strict=True)
    return torch.tensor(best, dtype=torch.float64), torch.tensor(curvature, dtype=torch.float64)


@torch.no_grad()
def joint_noise_level(
    prior: Prior, images: Sequence[Tensor], points: int = 32
) -> tuple[float, float]:
    """The same for images (1, C, H, W) that have one noise level in common, such as parts of a picture.

    With more than one layer every t̂ takes a pass through all of them.  Far above the noise the slope is
    ½ per pixel, whatever the picture, so the way down is found in the middle of the images, and walked on the
    whole of them from AHEAD above where it ended.
    """
    low, high = prior.t_hat_range
    slope = cache(_time_slope(prior, images))
    if len(prior._splines()) > 1:
        middles = [_middle(y) for y in images]
        near = first_minimum(_time_slope(prior, middles), low, high, points)[0] + AHEAD
        step = (high - low) / points
        spared = max(int((high - near) / step), 0)
        if slope(high - spared * step) > 0:
            high, points = high - spared * step, points - spared
    return first_minimum(slope, low, high, points)


def _middle(y: Tensor) -> Tensor:
    """At most MIDDLE × MIDDLE pixels."""
    top, left = (max(n - MIDDLE, 0) // 2 for n in y.shape[2:])
    return y[:, :, top : top + MIDDLE, left : left + MIDDLE].contiguous()


def first_minimum(
    slope: Callable[[float], float], low: float, high: float, points: int
) -> tuple[float, float]:
    """Walk down from ``high`` to the first minimum that lies below R(high), then narrow the interval.

    The slope at the very end of the range is what training determines worst: where R first rises a little
    on the way down, ``high`` is a minimum only if no deeper one follows.  Where there is none in between, the
    minimum is an end of the range.
    """
    step = (high - low) / points
    above, slope_above = high, slope(high)
    fall = 0.0  # R(high) − R(above), by the trapezoidal rule
    for k in range(1, points + 1):
        below = max(high - k * step, low)
        slope_below = slope(below)
        if fall >= 0 and slope_above > 0 >= slope_below:
            break
        fall += 0.5 * (slope_above + slope_below) * (above - below)
        above, slope_above = below, slope_below
    else:
        return (low if fall > 0 else high), 0.0
    curvature = (slope_above - slope_below) / (above - below)
    for _ in range(4):
        middle = 0.5 * (above + below)
        found = slope(middle)
        if found > 0:
            above, slope_above = middle, found
        else:
            below, slope_below = middle, found
    # a line is good enough in between
    return above - (above - below) * slope_above / (slope_above - slope_below), curvature


def time_histogram(prior: Prior, images: Sequence[Tensor]) -> Tensor | None:
    """H with R = ⟨tables(t̂), H⟩ for all images together at every t̂; None where no single pass serves every t̂.

    It serves for the paper's prior of one layer.
    """
    splines = prior._splines()
    if len(splines) > 1 or splines[0].spread is not None:
        return None
    phi, kernels = splines[0].collapse(prior.times(0.0, 1)), prior.kernels()[0]
    histogram = torch.zeros((), dtype=torch.float64)
    for y in images:
        histogram = histogram + soft_histogram(convolve(y, kernels), phi.inverse_gamma, phi.knots)
    return histogram


def _time_slope(prior: Prior, images: Sequence[Tensor]) -> Callable[[float], float]:
    """t̂ ↦ ∂R/∂t̂ of all images."""
    histogram = time_histogram(prior, images)
    if histogram is None:
        buffers = Buffers()
        return lambda t_hat: sum(
            float(prior.joint_grad(y, t_hat, buffers=buffers)[2]) for y in images
        )

    def slope(t_hat: float) -> float:
        tables = prior._splines()[0].collapse(prior.times(t_hat, 1), derivatives=1).tables[1]
        return float((tables.double() * histogram).sum())

    return slope
