r"""Figure `convexity`: how convex the priors are over t, the "gradually" of their name.

For images with noise of variance t, the smallest eigenvalue of t∇²R(·,t) off the constant image, found
by the Lanczos method of :mod:`gncprior.convexity`.  The factor t makes it a pure number: for the true
density t∇²R = 1 − Cov(x | y)/t, which is 1 where nothing is known of the image but its noise, and below 0
where the images that may lie behind y differ by more than the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gncprior import plots
from gncprior.convexity import smallest_curvature
from gncprior.experiments.common import COLORS, Progress, open_priors, pictures, quiet, title
from gncprior.prior import Prior

NAME = "convexity"
CROP = 64
POINTS, QUICK_POINTS = 17, 4  # values of t̂
IMAGES = 4  # by default


def run(
    out: Path,
    quick: bool = False,
    *,
    priors: Sequence[str] = (),
    data: Path | None = None,
    limit: int | None = None,
    progress: Progress = quiet,
) -> list[Path]:
    """Measure, save and draw; the middle, 64 × 64 pixels, of every image is used."""
    images = pictures(data, IMAGES if limit is None else limit, quick).cropped(CROP)
    x = [images.tensor(k)[0] for k in range(len(images))]
    models = open_priors(priors)
    arrays: dict[str, np.ndarray] = {"priors": np.array(list(models))}
    for number, (label, prior) in enumerate(models.items()):

        def watch(done: int, total: int, number: int = number) -> None:
            progress(number * total + done, len(models) * total)

        t_hats, smallest = measure(prior, x, QUICK_POINTS if quick else POINTS, watch)
        arrays |= {f"{label}.t_hat": t_hats, f"{label}.smallest": smallest}
    saved = plots.save_data(out, NAME, arrays)
    return [saved, *draw(plots.load_data(saved), out)]


def measure(
    prior: Prior, images: Sequence[Tensor], points: int, progress: Progress = quiet
) -> tuple[np.ndarray, np.ndarray]:
    """t̂ (T,), and the smallest eigenvalue of t∇²R for every t̂ and image (T, images)."""
    t_hats = np.linspace(*prior.t_hat_range, points)
    generator = torch.Generator().manual_seed(0)
    smallest = np.zeros((points, len(images)))
    for i, t_hat in enumerate(t_hats.tolist()):
        for k, x in enumerate(images):
            y = x + np.exp(t_hat / 2) * torch.randn(x.shape, generator=generator)
            smallest[i, k] = smallest_curvature(prior, y, t_hat)[0]
            progress(i * len(images) + k + 1, points * len(images))
    return t_hats, smallest


def draw(data: dict[str, np.ndarray], out: Path) -> list[Path]:
    """A line for the median image of every prior, in the band of all images."""
    with plots.figure(6.4, 3.6) as fig:
        ax = fig.subplots()
        for label, color in zip(map(str, data["priors"]), COLORS, strict=False):
            t, values = np.exp(data[f"{label}.t_hat"]), data[f"{label}.smallest"]
            ax.semilogx(t, np.median(values, axis=1), color=color, label=title(label), marker=".")
            ax.fill_between(t, values.min(1), values.max(1), color=color, alpha=0.2, linewidth=0)
        ax.axhline(0, color="0.5", linewidth=0.8)
        ax.annotate(
            "convex above", (0, 0), (2, 2), xycoords=ax.get_yaxis_transform(),
            textcoords="offset points", color="0.4", ha="left", fontsize=8,
        )  # fmt: skip
        ax.set(
            xlabel="smoothing variance $t$",
            ylabel=r"smallest eigenvalue of $t\,\nabla^2 R(\cdot,t)$",
        )
        ax.legend(frameon=False)
        return plots.save_figure(fig, out, NAME)
