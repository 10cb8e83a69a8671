r"""The noise level read off the terms of the energy.

For the one-layer prior ∂R/∂t̂ = Σ_j s_j(y,t̂), a term s_j = Σ_p ∂_t̂φ_j((k_j∗y)_p, t̂) for every filter.  Where
the sum vanishes R(y,·) has its minimum, which is the noise level of :mod:`gncprior.calibration`.  But the terms
are neither independent nor equally certain: those of low frequencies see more of the picture than of
its noise.  So they are weighed.  At knots τ_k in t̂ the distance to the noise level is fitted,

.. math:: \hat t − τ_k ≈ δ_k(y) = a_k + Σ_j w_{kj}\, s_j(y,τ_k)/\text{pixels},

by least squares (with a small ridge) over crops of training images with noise of t̂ near τ_k.  The reading is
where δ, linear between the knots, changes sign; of several such places the one next to the first minimum
of R(y,·) from t̂_max downwards.  What the fit leaves over is its error bar.

All terms at all knots come from one soft histogram, so a reading is one pass over the picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gncprior.calibration import time_histogram
from gncprior.checkpoints import SUFFIX, WEIGHTS, read_tensors, write_tensors
from gncprior.errors import GncpriorError
from gncprior.prior import Prior
from gncprior.unrolled import fingerprint

KNOTS = 49
CROP = 160  # pixels, of the crops that are learned from
RIDGE = 0.01
WINDOW = 2.0  # a fit is over noise levels within this many distances of knots
NEAR = 1.5  # how far from the minimum of the energy a reading may lie, in t̂


@dataclass(frozen=True)
class Reading:
    """τ_k, w_kj, a_k, and the deviation of the fit for a picture of CROP × CROP pixels."""

    knots: Tensor  # (K,)
    weights: Tensor  # (K, filters)
    offsets: Tensor  # (K,)
    spreads: Tensor  # (K,)
    info: dict[str, Any] = field(default_factory=dict)

    def read(self, prior: Prior, images: Sequence[Tensor]) -> tuple[float, float]:
        """t̂ and its standard deviation for images (1, C, H, W) that have one noise level in common."""
        s = terms(prior, images, tables(prior, self.knots))
        start = _crossing(self.knots, s.sum(1).tolist())
        delta = ((self.weights * s).sum(1) + self.offsets).tolist()
        found = [t for t in _crossings(self.knots, [-d for d in delta]) if abs(t - start) < NEAR]
        t_hat = min(found, key=lambda t: abs(t - start), default=start)
        pixels = sum(image.shape[-2] * image.shape[-1] for image in images)
        spread = np.interp(t_hat, self.knots.numpy(), self.spreads.numpy())
        return t_hat, float(spread) * max(1.0, CROP / math.sqrt(pixels))

    def save(self, path: Path | str) -> None:
        """Write the file that :func:`load` reads."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        write_tensors(path, tensors, {**self.info, "kind": "noise reading"})


_TENSORS = ("knots", "weights", "offsets", "spreads")


@torch.no_grad()
def tables(prior: Prior, t_hats: Tensor) -> Tensor:
    """Of all ∂_t̂φ_j at every t̂."""
    splines = prior._splines()[0]
    return splines.collapse(prior.times(t_hats, len(t_hats)), derivatives=1).tables[1].double()


@torch.no_grad()
def terms(prior: Prior, images: Sequence[Tensor], tables: Tensor) -> Tensor:
    """s_j(y,t̂) per pixel of all images together, at the t̂ of the tables: (t̂, filters) in float64."""
    histogram = time_histogram(prior, images)
    if histogram is None:
        raise GncpriorError("The noise level is read term by term off priors of one layer only.")
    pixels = sum(image.shape[-2] * image.shape[-1] for image in images)
    return torch.einsum("kjab,jab->kj", tables, histogram[0]).cpu() / pixels


def _crossings(knots: Tensor, values: Sequence[float]) -> list[float]:
    """Where a function, linear between its values at the knots, rises through zero; from above."""
    places = knots.tolist()
    return [
        places[k] + (places[k + 1] - places[k]) * -values[k] / (values[k + 1] - values[k])
        for k in reversed(range(len(places) - 1))
        if values[k] <= 0 < values[k + 1]
    ]


def _crossing(knots: Tensor, values: Sequence[float]) -> float:
    """The first minimum of R from above; where the slope never changes its sign, an end."""
    if values[-1] <= 0:
        return float(knots[-1])
    return next(iter(_crossings(knots, values)), float(knots[0]))


# ---------------------------------------------------------------- learning


@torch.no_grad()
def learn(
    prior: Prior,
    images: Sequence[np.ndarray],
    *,
    levels: int = 16,
    seed: int = 0,
    done: Callable[[], None] | None = None,
) -> Reading:
    """Fit a reading on clean images (C, H, W) of bytes: a crop of each with noise of ``levels`` t̂.

    The noise levels are spread over the prior's range, and ``done`` is told of every image.
    """
    low, high = prior.t_hat_range
    inset = 1e-4 * (high - low)  # at the very ends rounding decides whether t̂ is outside
    knots = torch.linspace(low + inset, high - inset, KNOTS, dtype=torch.float64)
    slopes = tables(prior, knots)
    rng = np.random.default_rng(seed)
    seen, t_hats = [], []
    for image in images:
        corner = [int(rng.integers(0, max(n - CROP, 0) + 1)) for n in image.shape[1:]]
        rows, columns = (slice(c, c + CROP) for c in corner)
        x = image[:, rows, columns] / 255.0
        for level in range(levels):
            t_hat = low + (level + rng.random()) / levels * (high - low)
            y = x + math.exp(t_hat / 2) * rng.standard_normal(x.shape)
            seen.append(terms(prior, [torch.from_numpy(y)[None].to(prior.filters[0])], slopes))
            t_hats.append(t_hat)
        if done is not None:
            done()
    s, t = torch.stack(seen), torch.tensor(t_hats, dtype=torch.float64)
    width = WINDOW * float(knots[1] - knots[0])
    near = [(t - knot).abs() < width for knot in knots]
    if min(int(n.sum()) for n in near) < 2 * s.shape[2]:
        raise GncpriorError("There are too few images to learn how to read the noise level.")
    fits = [_fit(s[n, k], t[n] - knots[k]) for k, n in enumerate(near)]
    weights, offsets, spreads = (torch.stack(part) for part in zip(*fits, strict=True))
    info = {"prior_sha256": fingerprint(prior), "images": len(images), "levels": levels}
    return Reading(knots, weights, offsets, spreads, {**info, "seed": seed})


def _fit(s: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """w, a and the deviation of t ≈ a + ⟨w, s⟩, terms being scaled to unit variance for the ridge."""
    mean, scale = s.mean(0), s.std(0).clamp_min(1e-12)
    z, centred = (s - mean) / scale, t - t.mean()
    gram = z.T @ z / len(z) + RIDGE * torch.eye(z.shape[1], dtype=z.dtype)
    w = torch.linalg.solve(gram, z.T @ centred / len(z))
    deviation = (centred - z @ w).std()
    w = w / scale
    return w, t.mean() - w @ mean, deviation


# ---------------------------------------------------------------- files


def reading_path(prior: str | Path) -> Path:
    """Where the reading of a prior (a shipped one's name, or a file) is: beside it."""
    path = Path(prior)
    folder = path.parent if path.suffix == SUFFIX else WEIGHTS
    return folder / f"{path.stem}-noise{SUFFIX}"


def load(path: Path | str, prior: Prior) -> Reading | None:
    """Read a file; None where there is none, or one of another version of the prior."""
    if not Path(path).is_file():
        return None
    tensors, header = read_tensors(path)
    if header.get("kind") != "noise reading" or set(tensors) != set(_TENSORS):
        raise GncpriorError(f"{path} holds {header.get('kind', 'something')!r} and no reading.")
    if header.get("prior_sha256") != fingerprint(prior):
        return None
    return Reading(**tensors, info=header)
