r"""Figure `sampling`: pictures drawn from the priors (beyond the paper).

Annealed Langevin dynamics: at every t̂ of a schedule from t̂_max down to t̂_min some steps

    x ← x − δ ∇R(x, t̂) + √(2δ) n,    n ~ N(0, Id),  δ = rate · e^t̂,

whose law tends to the density exp(−R(·, t̂)) as δ → 0; at the end one step of Tweedie's formula takes
the last noise off.  For a Gaussian of variance v the law after every step is known: Gaussian, with
variance s ← (1 − δ/v)² s + 2δ.

Learned energies need not grow in every direction: far from images, where they were never trained, they
may fall without end.  So x is kept where images with noise of variance t are, in [−3√t, 1 + 3√t].
R does not see a constant added to a picture, so pictures are drawn with mean ½.  Beside them is the
density of the difference of neighbours, in the samples and in real images: heavy tails are edges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gncprior import plots
from gncprior.experiments.common import (
    COLORS,
    Progress,
    label_of,
    open_priors,
    pictures,
    quiet,
    title,
)
from gncprior.prior import Prior
from gncprior.schedules import linear, sigma_from_t_hat, t_from_t_hat

NAME = "sampling"
SAMPLES = 4
SIZE = 96
LEVELS, REPEATS = 100, 15
RATE = 0.1
SNAPSHOTS = 5
BINS = np.linspace(-1, 1, 102)


def run(
    out: Path,
    quick: bool = False,
    *,
    priors: Sequence[str] = (),
    data: Path | None = None,
    limit: int | None = None,
    progress: Progress = quiet,
) -> list[Path]:
    """Draw samples of every prior, save them, and draw them once more, as a picture."""
    images = pictures(data, limit, quick)
    models = open_priors(priors)
    levels, repeats, size = (30, 10, 24) if quick else (LEVELS, REPEATS, SIZE)
    arrays: dict[str, np.ndarray] = {
        "priors": np.array([label_of(name) for name in models]),
        "title": np.array(images.title),
        "bins": BINS,
        "images.density": difference_density([image / 255 for image in images.images]),
    }
    for number, (name, prior) in enumerate(models.items()):

        def watch(done: int, total: int, number: int = number) -> None:
            progress(number * total + done, len(models) * total)

        facts = sample(prior, levels, repeats, size, progress=watch)
        facts["density"] = difference_density(list(facts["samples"]))
        arrays |= {f"{label_of(name)}.{key}": value for key, value in facts.items()}
    saved = plots.save_data(out, NAME, arrays)
    return [saved, *draw(plots.load_data(saved), out)]


# ---------------------------------------------------------------- numbers


@torch.no_grad()
def langevin(
    grad: Callable[[Tensor, float], Tensor],
    x: Tensor,
    t_hats: Sequence[float],
    *,
    repeats: int,
    rate: float = RATE,
    generator: torch.Generator | None = None,
    keep: Callable[[Tensor, float], Tensor] | None = None,
    look: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Annealed Langevin steps from x, ``repeats`` at every t̂.

    ``keep(x, t̂)`` is the projection onto where x may be; ``look(i, x)`` is told after the steps of t̂_i.
    """
    for i, t_hat in enumerate(t_hats):
        delta = rate * t_from_t_hat(t_hat)
        for _ in range(repeats):
            noise = torch.randn(x.shape, dtype=x.dtype, generator=generator)
            x = x - delta * grad(x, t_hat) + (2 * delta) ** 0.5 * noise
            x = x if keep is None else keep(x, t_hat)
        if look is not None:
            look(i, x)
    return x


def sample(
    prior: Prior, levels: int, repeats: int, size: int, *, progress: Progress = quiet
) -> dict[str, np.ndarray]:
    """samples (S, size, size), and snapshots of the first on its way with their t, both with mean ½."""
    low, high = prior.t_hat_range
    t_hats = linear(high, low, levels).tolist()
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(SAMPLES, 1, size, size, generator=generator)
    shown = np.linspace(0, levels - 1, SNAPSHOTS).round().astype(int).tolist()
    snapshots: list[Tensor] = []

    def look(i: int, x: Tensor) -> None:
        if i in shown:
            snapshots.append(_centred(x[:1]))
        progress(i + 1, levels)

    start = 0.5 + t_from_t_hat(high) ** 0.5 * start
    x = langevin(
        prior.grad,
        start,
        t_hats,
        repeats=repeats,
        generator=generator,
        keep=among_images,
        look=look,
    )
    x = x - t_from_t_hat(low) * prior.grad(x, low)
    return {
        "samples": _centred(x)[:, 0].numpy(),
        "snapshots": torch.cat(snapshots)[:, 0].numpy(),
        "t": np.exp([t_hats[i] for i in shown]),
    }


def among_images(x: Tensor, t_hat: float) -> Tensor:
    """x clamped to [−3√t, 1 + 3√t]."""
    reach = 3 * sigma_from_t_hat(t_hat)
    return x.clamp(-reach, 1 + reach)


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(dim=(1, 2, 3), keepdim=True) + 0.5


def difference_density(images: Sequence[np.ndarray]) -> np.ndarray:
    """The density, over BINS, of the difference of horizontal neighbours in images (…, H, W)."""
    steps = np.concatenate([np.diff(image, axis=-1).ravel() for image in images])
    counts, _ = np.histogram(steps, BINS)
    return counts / (steps.size * np.diff(BINS))


# ---------------------------------------------------------------- the picture


def draw(data: dict[str, np.ndarray], out: Path) -> list[Path]:
    """A row for every prior: one sample on its way, the samples, and the densities of differences."""
    labels = [str(label) for label in data["priors"]]
    count = max(len(data[f"{label}.samples"]) for label in labels)
    columns = SNAPSHOTS + count
    with plots.figure(1.35 * columns + 2.8, 1.65 * len(labels) + 0.9) as fig:
        parts: Any = fig.subfigures(1, 2, width_ratios=(1.35 * columns, 2.8))
        left, right = parts
        cells = left.subplots(len(labels), columns, squeeze=False)
        for label, row in zip(labels, cells, strict=True):
            for ax in row:
                ax.set_axis_off()
            for ax, image, t in zip(
                row, data[f"{label}.snapshots"], data[f"{label}.t"], strict=False
            ):
                _show(ax, image)
                ax.set_title(f"$t={t:.2g}$", fontsize=9)
            for k, image in enumerate(data[f"{label}.samples"]):
                _show(row[SNAPSHOTS + k], image)
                row[SNAPSHOTS + k].set_title(f"{title(label)}, sample {k + 1}", fontsize=9)
        left.suptitle("One sample on its way from $t_{max}$ to $t_{min}$, and samples")
        ax = right.subplots()
        middle = (data["bins"][1:] + data["bins"][:-1]) / 2
        for name, color in zip(["images", *labels], (plots.BLACK, *COLORS), strict=False):
            density = data[f"{name}.density"]
            seen = density > 0
            shown = str(data["title"]) if name == "images" else title(name)
            ax.semilogy(middle[seen], density[seen], color=color, label=shown)
        ax.set(xlabel="difference of neighbours", ylabel="density")
        ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        return plots.save_figure(fig, out, NAME)


def _show(ax: plots.Axes, image: np.ndarray) -> None:
    ax.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
