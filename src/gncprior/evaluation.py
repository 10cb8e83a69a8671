r"""Measuring restoration: one protocol for all methods, so that numbers can be compared.

Images are taken in the order of their file names, k = 0, 1, …, scaled to [0, 1].

* denoising: z = x + σ·default_rng(k).standard_normal(shape), in float64, neither clipped nor rounded; the
  shape is (H, W), or (H, W, 3) in colour;
* noise: the same z, of which only σ is estimated; the error is |σ̂ − σ|/σ;
* inpainting: a pixel is unknown, and set to 0, where default_rng(1000 + k).random(shape) < share.

PSNR = −10 log10 of the mean squared error over all channels, of the result as it is and clipped to
[0, 1]; scores of a set are means of those of its images.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gncprior import datasets, schedules
from gncprior.datasets import Dataset
from gncprior.errors import GncpriorError
from gncprior.fidelity import Denoising, Inpainting
from gncprior.images import list_images, read_image
from gncprior.metrics import WINDOW, psnr, ssim
from gncprior.prior import Prior
from gncprior.restore import estimate_sigma
from gncprior.solvers import solve_joint, solve_scheduled, tweedie
from gncprior.symmetries import mean_over, turn
from gncprior.tiles import TiledEnergy
from gncprior.unrolled import DENOISE, INPAINT, Schedules, unroll

NOISE = "noise"  # beside the tasks that have schedules
METHODS = ("learned", "scheduled", "joint", "tweedie")
MASK_SEED = 1000

# A restoration: an observation (1, C, H, W) and, for inpainting, its mask → an image.
Restore = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Score:
    """What one image came to; SSIM is of the clipped result, NaN where the image is too small for it."""

    name: str
    psnr: float
    psnr_clipped: float
    ssim: float
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """What the noise level of one image was taken for, and |σ̂ − σ|/σ."""

    name: str
    sigma: float
    error: float
    seconds: float


# ---------------------------------------------------------------- images


def open_images(folder: Path | str | None, which: str = "test", channels: int = 1) -> Dataset:
    """BSDS68 (``test``) or the 32 images for choosing (``val``) below a folder, or else all its images.

    Without a folder, ``$GNCPRIOR_DATA`` is taken.
    """
    folder = folder or os.environ.get(datasets.ENVIRONMENT_VARIABLE) or None
    if which not in ("test", "val"):
        raise GncpriorError(f"There is no set {which!r}: choose test (BSDS68) or val.")
    if folder is None:
        raise GncpriorError(
            f"Name a folder of images with --data or ${datasets.ENVIRONMENT_VARIABLE}."
        )
    folder = Path(folder)
    if which == "val":
        root = datasets.find_bsds500(folder)
        if root is None:
            raise GncpriorError(f"{folder} does not hold BSDS500, of which the set val is a part.")
        return datasets.bsds500(root, channels)[1]
    if (folder / "BSDS68").is_dir() and channels == 1:
        folder = folder / "BSDS68"
    elif datasets.find_bsds500(folder) is not None:
        return datasets.bsds68(folder, channels)
    files = list_images(folder)
    if not files:
        raise GncpriorError(f"There are no images in {folder}.")
    images = [np.atleast_3d(read_image(file, channels)).transpose(2, 0, 1) for file in files]
    return Dataset(folder.name, tuple(file.name for file in files), tuple(images))


def observe(x: np.ndarray, k: int, task: str, level: float) -> tuple[np.ndarray, np.ndarray | None]:
    """What is seen of image k (C, H, W), in float64; for inpainting with the mask."""
    if task in (DENOISE, NOISE):
        height, width = x.shape[1:]
        noise = np.random.default_rng(k).standard_normal((height, width, len(x)))
        return x + level * noise.transpose(2, 0, 1), None
    pixels = np.random.default_rng(MASK_SEED + k).random(x.shape[1:])
    mask = np.broadcast_to(pixels < level, x.shape)  # a pixel is unknown in all its channels
    return np.where(mask, 0.0, x), mask


# ---------------------------------------------------------------- methods


def restoration(
    prior: Prior,
    task: str,
    level: float,
    method: str,
    *,
    steps: int = 30,
    t0: float | None = None,
    learned: Schedules | None = None,
    half: bool = False,
    views: int = 1,
) -> Restore:
    """The named method as a function of the observation.

    ``t0`` is the smoothing variance at which scheduled and joint start: σ² for denoising and the
    prior's largest for inpainting, unless given.  ``learned`` is needed by the method of that name.
    With ``half`` inner filters may multiply in bfloat16.  The result is the mean of that many views.
    """
    if task not in (DENOISE, INPAINT) or method not in METHODS:
        raise GncpriorError(f"There is no method {method!r} for the task {task!r}.")
    low, high = prior.t_hat_range
    if t0 is not None:
        t_hat0 = schedules.t_hat_from_t(t0)
    else:
        t_hat0 = schedules.t_hat_from_sigma(level) if task == DENOISE else high
    if method == "learned" and (learned is None or learned.task != task):
        raise GncpriorError(f"The learned method needs schedules for the task {task}.")
    energy = TiledEnergy(prior if learned is None else learned.prior_at(prior, level), half=half)

    def view(z: Tensor, mask: Tensor | None) -> Tensor:
        if method == "tweedie":
            if mask is not None:
                raise GncpriorError("One step of Tweedie's formula denoises; it cannot inpaint.")
            return tweedie(energy, z, level)
        fidelity = Denoising(z, level) if mask is None else Inpainting(z, mask)
        if method == "joint":
            return solve_joint(energy, fidelity, fidelity.start(), t_hat0, max_iter=steps).x
        if learned is not None:
            return unroll(energy, fidelity, fidelity.start(), learned.at(level))
        t_hats = schedules.linear(min(max(t_hat0, low), high), low, steps)
        return solve_scheduled(energy, fidelity, fidelity.start(), t_hats).x

    def restore(z: Tensor, mask: Tensor | None) -> Tensor:
        return mean_over(views, lambda k: view(turn(z, k), None if mask is None else turn(mask, k)))

    return restore


def channelwise(restore: Restore) -> Restore:
    """A restoration of grey images, of the channels of a colour image one by one."""
    return lambda z, mask: restore(
        z.transpose(0, 1), None if mask is None else mask.transpose(0, 1)
    ).transpose(0, 1)


def blind(told: Callable[[float], Restore]) -> Restore:
    """A restoration that is not told σ: it is estimated for every image."""
    return lambda z, mask: told(estimate_sigma(z[0], channel_axis=0))(z, mask)


def evaluate(
    images: Dataset,
    task: str,
    level: float,
    restore: Restore,
    *,
    limit: int | None = None,
    done: Callable[[Score], None] | None = None,
) -> list[Score]:
    """Degrade, restore and score the first ``limit`` images; ``done`` is told of each."""
    scores = []
    for name, x, z, mask in _observations(images, task, level, limit):
        begin = time.perf_counter()
        result = restore(z, mask)
        seconds = time.perf_counter() - begin
        scores.append(score(name, result[0], x, seconds))
        if done is not None:
            done(scores[-1])
    return scores


def estimates(
    images: Dataset,
    level: float,
    prior: str | Path | Prior = "auto",
    *,
    limit: int | None = None,
    done: Callable[[Estimate], None] | None = None,
) -> list[Estimate]:
    """Add noise of a level to the first ``limit`` images and estimate it; ``done`` is told of each."""
    found = []
    for name, _, z, _ in _observations(images, NOISE, level, limit):
        begin = time.perf_counter()
        sigma = estimate_sigma(z[0], channel_axis=0, prior=prior)
        seconds = time.perf_counter() - begin
        found.append(Estimate(name, sigma, abs(sigma - level) / level, seconds))
        if done is not None:
            done(found[-1])
    return found


def _observations(
    images: Dataset, task: str, level: float, limit: int | None
) -> Iterator[tuple[str, np.ndarray, Tensor, Tensor | None]]:
    """Name, x (C, H, W), z and mask (1, C, H, W)."""
    for k in range(len(images) if limit is None else min(limit, len(images))):
        x = images.images[k] / 255.0
        z, mask = observe(x, k, task, level)
        unknown = None if mask is None else torch.from_numpy(mask.copy())[None]
        yield images.names[k], x, torch.from_numpy(z).float()[None], unknown


def score(name: str, result: Tensor, x: np.ndarray, seconds: float) -> Score:
    """PSNR and SSIM of a result (C, H, W)."""
    clipped = result.clamp(0, 1)
    large = min(x.shape[1:]) >= WINDOW
    return Score(
        name,
        float(psnr(result, x, data_range=1.0)),
        float(psnr(clipped, x, data_range=1.0)),
        float(ssim(clipped, x, data_range=1.0)) if large else float("nan"),
        seconds,
    )


def report(
    scores: Sequence[Score] | Sequence[Estimate], settings: dict[str, Any]
) -> dict[str, Any]:
    """Settings, means and the scores of every image, ready for JSON."""
    if not scores:
        raise GncpriorError("Nothing was evaluated: there are no images.")
    rows = [asdict(s) for s in scores]
    mean = {key: statistics.fmean(row[key] for row in rows) for key in rows[0] if key != "name"}
    return {"settings": settings, "mean": mean, "images": rows}
