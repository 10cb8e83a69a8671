"""Figure `gallery`: before and after, at σ = 0.1 and with 80 % of the pixels missing.

Three images.  Of each the part of strongest contrast is enlarged: as it is seen, restored by every prior
with its longest learned schedule (or else the predefined one of :mod:`gncprior.restore`), denoised by
BM3D where the package bm3d is installed, and as it is.  PSNR is that of the whole image.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from gncprior import plots
from gncprior.errors import GncpriorError
from gncprior.evaluation import observe
from gncprior.experiments.common import (
    MISSING,
    SIGMA,
    Progress,
    label_of,
    open_priors,
    pictures,
    quiet,
    title,
)
from gncprior.metrics import psnr
from gncprior.restore import denoise, inpaint
from gncprior.unrolled import DENOISE, INPAINT

NAME = "gallery"
IMAGES = (2, 21, 47)  # positions in BSDS68
CROP = 72
TASKS = {DENOISE: SIGMA, INPAINT: MISSING}
BM3D = "BM3D"

Denoiser = Callable[[np.ndarray, float], np.ndarray]


def run(
    out: Path,
    quick: bool = False,
    *,
    priors: Sequence[str] = (),
    data: Path | None = None,
    images: Sequence[int] = IMAGES,
    progress: Progress = quiet,
) -> list[Path]:
    """Restore, save and draw the images at the given positions, in the order of file names."""
    known = pictures(data, None, quick)
    if quick:
        images = range(len(known))
    for k in images:
        if not 0 <= k < len(known):
            raise GncpriorError(f"There is no image {k}: {known.title} has 0 to {len(known) - 1}.")
    names = list(open_priors(priors))
    bm3d = find_bm3d()
    labels = [label_of(name) for name in names] + [BM3D] * (bm3d is not None)
    arrays: dict[str, np.ndarray] = {"labels": np.array(labels), "images": np.array(list(images))}
    total = len(images) * len(TASKS) * len(names)
    done = 0
    for k in images:
        x = known.images[k] / 255.0
        arrays |= {f"{k}.x": x[0], f"{k}.crop": np.array(busiest(x[0], 24 if quick else CROP))}
        for task, level in TASKS.items():
            z, mask = observe(x, k, task, level)
            results = {"seen": z[0]}
            for name in names:
                if mask is None:
                    results[label_of(name)] = denoise(z[0], sigma=level, prior=name)
                else:
                    results[label_of(name)] = inpaint(z[0], mask[0], prior=name)
                done += 1
                progress(done, total)
            if bm3d is not None and task == DENOISE:
                results[BM3D] = bm3d(z[0], level)
            for label, image in results.items():
                arrays[f"{k}.{task}.{label}"] = image.astype(np.float32)
                arrays[f"{k}.{task}.{label}.psnr"] = psnr(image, x[0], data_range=1.0).numpy()
    saved = plots.save_data(out, NAME, arrays)
    return [saved, *draw(plots.load_data(saved), out)]


def find_bm3d() -> Denoiser | None:
    """BM3D as a function of a noisy image and σ; None where the package bm3d is not installed."""
    try:
        package = importlib.import_module("bm3d")
    except ImportError:
        return None
    return lambda z, sigma: np.asarray(package.bm3d(z, sigma), dtype=np.float64).reshape(z.shape)


def busiest(x: np.ndarray, size: int) -> tuple[int, int, int]:
    """(top, left, size) of the square of greatest variance, on a grid of 8 pixels."""
    size = min(size, *x.shape)
    places = [
        (top, left)
        for top in range(0, x.shape[0] - size + 1, 8)
        for left in range(0, x.shape[1] - size + 1, 8)
    ]
    top, left = max(places, key=lambda p: x[p[0] : p[0] + size, p[1] : p[1] + size].var())
    return top, left, size


# ---------------------------------------------------------------- the picture


def draw(data: dict[str, np.ndarray], out: Path) -> list[Path]:
    """Two rows for every image, one for each task."""
    from matplotlib.patches import Rectangle

    labels = [str(label) for label in data["labels"]]
    shown = ["seen", *labels]
    numbers = data["images"].tolist()
    with plots.figure(1.75 * (len(shown) + 2), 3.7 * len(numbers)) as fig:
        rows = fig.subplots(2 * len(numbers), len(shown) + 2, squeeze=False)
        for ax in rows.flat:
            ax.set_axis_off()
        for i, k in enumerate(numbers):
            x = data[f"{k}.x"]
            top, left, size = data[f"{k}.crop"].tolist()
            part = np.s_[top : top + size, left : left + size]
            for task, row in zip(TASKS, rows[2 * i : 2 * i + 2], strict=True):
                _show(row[0], x, f"image {k}")
                row[0].add_patch(
                    Rectangle((left, top), size, size, fill=False, color=plots.VERMILLION)
                )
                for ax, label in zip(row[1:-1], shown, strict=True):
                    key = f"{k}.{task}.{label}"
                    if key in data:
                        words = {"seen": "noisy" if task == DENOISE else "80 % missing"}
                        name = words.get(label, title(label))
                        _show(ax, data[key][part], f"{name}, {float(data[key + '.psnr']):.2f} dB")
                _show(row[-1], x[part], "original")
        return plots.save_figure(fig, out, NAME)


def _show(ax: plots.Axes, image: np.ndarray, name: str) -> None:
    ax.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    ax.set_title(name, fontsize=9)
