"""Figure `attainment`: who reaches the lowest energy, and with what PSNR (paper, figure 3).

For denoising (σ = 0.1) and inpainting (80 % missing), over the first smoothing t_0 and the number of steps I,
predefined beside joint smoothing with η = 1.  Every image, z and all cells of both schemes have one
energy, E(x) = R(x, t_min) + D(z, x), and E* is the lowest that any cell reached for the image.  A cell has
attained it when at most 2 % of the way down is missing,

    E(x_I) − E* ≤ 0.02 · (E(x_0) − E*),    x_0 = z,

which does not depend on the constant that an energy is known up to.  E* need not be the global minimum,
which nobody knows.

A joint run of I steps is the beginning of a longer one, so that one run serves a row of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gncprior import plots
from gncprior.datasets import Dataset
from gncprior.experiments.common import (
    MISSING,
    SIGMA,
    Batch,
    Progress,
    batches,
    label_of,
    open_priors,
    pictures,
    quiet,
    title,
)
from gncprior.metrics import psnr
from gncprior.prior import Prior
from gncprior.schedules import linear
from gncprior.solvers import State, solve_joint, solve_scheduled
from gncprior.unrolled import DENOISE, INPAINT

if TYPE_CHECKING:
    from gncprior.plots import Axes, Figure

NAME = "attainment"
TASKS = {DENOISE: SIGMA, INPAINT: MISSING}
SCHEMES = ("predefined", "joint")
STARTS = 9  # values of t_0 from t_min to t_max
STEPS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144)
TOLERANCE = 0.02
CROP = 64
STRIDE, DEEP_STARTS = 17, 5  # deep priors are dear: every seventeenth image, every other t_0


def run(
    out: Path,
    quick: bool = False,
    *,
    priors: Sequence[str] = (),
    data: Path | None = None,
    limit: int | None = None,
    crop: int = CROP,
    progress: Progress = quiet,
) -> list[Path]:
    """Compute, save and draw attainment-PRIOR; of every image the middle, crop × crop (0: all of it).

    Priors of more than one layer get every seventeenth image and every other t_0.
    """
    files: list[Path] = []
    models = open_priors(priors)
    for number, (name, prior) in enumerate(models.items()):

        def watch(done: int, total: int, number: int = number) -> None:
            progress(number * total + done, len(models) * total)

        stride = 1 if quick or prior.architecture.layers == 1 else STRIDE
        images = pictures(data, limit, quick, stride)
        starts = 3 if quick else STARTS if stride == 1 else DEEP_STARTS
        steps = (1, 3, 9) if quick else STEPS
        facts = measure(prior, images, starts, steps, crop=crop, stride=stride, progress=watch)
        every = "" if stride == 1 else f", every {stride}th"
        part = f", middle {crop}×{crop}" if crop else ""
        what = f"{len(images)} images of {images.title}{every}{part}"
        facts |= {"prior": np.array(label_of(name)), "what": np.array(what)}
        saved = plots.save_data(out, f"{NAME}-{label_of(name)}", facts)
        files += [saved, *draw(plots.load_data(saved), out)]
    return files


# ---------------------------------------------------------------- numbers


def measure(
    prior: Prior,
    images: Dataset,
    starts: int = STARTS,
    steps: Sequence[int] = STEPS,
    *,
    crop: int = 0,
    stride: int = 1,
    progress: Progress = quiet,
) -> dict[str, np.ndarray]:
    """For each task TASK.energy, per pixel, and TASK.psnr, (schemes, t_0, I, images); TASK.first, E(x_0).

    ``stride`` tells that the images are every stride-th of the protocol.
    """
    low, high = prior.t_hat_range
    t_hats = linear(low, high, starts).tolist()
    facts = {"t_0": np.exp(t_hats), "steps": np.array(steps), "tolerance": np.array(TOLERANCE)}
    # batches small enough for the features of a deep prior to stay in memory that is near
    size = 16 if prior.architecture.layers == 1 else 4
    done, total = 0, len(TASKS) * starts * len(images)
    for task, level in TASKS.items():
        shape = (len(SCHEMES), starts, len(steps), len(images))
        energy, score, first = np.empty(shape), np.empty(shape), np.empty(len(images))
        for batch in batches(images, task, level, crop=crop, size=size, stride=stride):
            index = list(batch.index)
            look = _Look(prior, batch, level)
            first[index] = look(look.fidelity.start())[0]
            for row, t_hat in enumerate(t_hats):
                for scheme, cells in enumerate(_row(look, t_hat, steps)):
                    energy[scheme, row][:, index], score[scheme, row][:, index] = cells
                done += len(index)
                progress(done, total)
        facts |= {f"{task}.energy": energy, f"{task}.psnr": score, f"{task}.first": first}
    return facts


class _Look:
    """Energy at t_min, per pixel, and PSNR of images, each (B,)."""

    def __init__(self, prior: Prior, batch: Batch, level: float) -> None:
        self.prior, self.batch, self.fidelity = prior, batch, batch.fidelity(level)
        self.low = prior.t_hat_range[0]

    def __call__(self, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        energy = self.prior.energy(x, self.low) + self.fidelity.value(x)
        score = psnr(x, self.batch.x, data_range=1.0)
        return (energy / x[0].numel()).numpy(), score.numpy()


@torch.no_grad()
def _row(look: _Look, t_hat: float, steps: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """For all I from one t_0: (2, I, B), energy and PSNR, of the predefined and of the joint scheme."""
    prior, fidelity, x_0 = look.prior, look.fidelity, look.fidelity.start()
    predefined = [
        look(solve_scheduled(prior, fidelity, x_0, linear(t_hat, look.low, count)).x)
        for count in steps
    ]
    joint: list[tuple[np.ndarray, np.ndarray]] = []

    def watch(state: State) -> None:
        if state.iteration in steps:
            joint.append(look(state.x))

    solve_joint(prior, fidelity, x_0, t_hat, max_iter=max(steps), callback=watch)
    one, two = (np.stack(cells).swapaxes(0, 1) for cells in (predefined, joint))
    return one, two


def rate(energy: np.ndarray, first: np.ndarray, tolerance: float = TOLERANCE) -> np.ndarray:
    """The share of images that attain their lowest energy, (schemes, t_0, I).

    A cell that diverged has no energy and attains nothing.
    """
    lowest = np.nanmin(energy, axis=(0, 1, 2))
    return (energy - lowest <= tolerance * (first - lowest)).mean(-1)


# ---------------------------------------------------------------- the picture


def draw(data: dict[str, np.ndarray], out: Path) -> list[Path]:
    """Rows: tasks; columns: rate and mean PSNR of the predefined scheme, then of the joint one."""
    label = str(data["prior"])
    with plots.figure(11.5, 6.2) as fig:
        rows = fig.subplots(len(TASKS), 4, sharex=True, sharey=True)
        for (task, level), cells in zip(TASKS.items(), rows, strict=True):
            attained = rate(data[f"{task}.energy"], data[f"{task}.first"], float(data["tolerance"]))
            _draw_pair(fig, cells[:2], data, attained, rates=True)
            _draw_pair(fig, cells[2:], data, data[f"{task}.psnr"].mean(-1), rates=False)
            name = rf"denoising, $\sigma={level:g}$" if task == DENOISE else f"{level:.0%} missing"
            cells[0].set_ylabel(f"{name}\nfirst smoothing variance $t_0$")
        for ax in rows[-1]:
            ax.set_xlabel("number of steps $I$")
        fig.suptitle(
            f"{title(label)}, {data['what']}. Attained: at most {float(data['tolerance']):.0%} of the way "
            "from $E(x_0)$ down to the lowest energy is missing."
        )
        return plots.save_figure(fig, out, f"{NAME}-{label}")


def _draw_pair(
    fig: Figure, cells: Sequence[Axes], data: dict[str, np.ndarray], values: np.ndarray, rates: bool
) -> None:
    """The maps of both schemes on one scale; a ring is around the best PSNR."""
    steps, t_0 = data["steps"], data["t_0"]
    high = 1.0 if rates else float(np.nanmax(values))
    scale: dict[str, Any] = {"vmin": 0.0 if rates else high - 4, "vmax": high}
    for scheme, ax, map_ in zip(SCHEMES, cells, values, strict=True):
        image = ax.pcolormesh(
            _edges(steps), _edges(t_0), map_, cmap=plots.COLORMAP, rasterized=True, **scale
        )
        if not rates:
            row, column = np.unravel_index(np.nanargmax(map_), map_.shape)
            ax.plot(
                steps[column], t_0[row], "o", markersize=9, fillstyle="none", color=plots.VERMILLION
            )
            ax.set_title(f"{scheme}: {map_[row, column]:.2f} dB at the ring")
        else:
            if map_.min() < 0.9 < map_.max() and min(map_.shape) > 3:
                ax.contour(steps, t_0, map_, [0.9], colors=plots.VERMILLION, linewidths=1.4)
            ax.set_title(f"{scheme}")
        ax.set(xscale="log", yscale="log")
    name = "attainment rate (line: 0.9)" if rates else "mean PSNR (dB)"
    extend = "neither" if rates else "min"
    fig.colorbar(image, ax=list(cells), location="bottom", aspect=40, label=name, extend=extend)


def _edges(values: np.ndarray) -> np.ndarray:
    """The borders of cells around values, half-way between them on a logarithmic axis."""
    log = np.log(values)
    middle = (log[1:] + log[:-1]) / 2
    return np.exp([2 * log[0] - middle[0], *middle, 2 * log[-1] - middle[-1]])
