"""Figure `parameters`: the filters and the functions φ of the priors (paper, figure 2).

For every layer the first ten filters as grey images, and below each its φ(·, t̂) over the .01 to .99
quantile range of the features that it meets in images with noise of variance t; cold colours are
small t̂, warm ones large.  Ranges grow tenfold with t, so every curve is drawn over its own, from
edge to edge of its cell, and from its smallest to its largest value.

What the paper sees in the pictures is also measured.  The share of the variance of φ over its range
that the best parabola leaves over (last layer), or the best line (inner layers):

    departure = min_q Σ (φ(x_k) − q(x_k))² / Σ (φ(x_k) − mean φ)²,    q of degree 2, or 1,

at equally spaced x_k; and the number of minima of every last potential at t̂_min.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from gncprior.filters import convolve
from gncprior.prior import Prior
from gncprior.splines import evaluate

if TYPE_CHECKING:
    from gncprior.plots import Axes, Figure

NAME = "parameters"
CURVES = 9  # values of t̂
POINTS = 129  # of a curve
QUANTILES = (0.01, 0.99)
SHOWN = 10  # filters of a layer
CROP = 96


def run(
    out: Path,
    quick: bool = False,
    *,
    priors: Sequence[str] = (),
    data: Path | None = None,
    limit: int | None = None,
    progress: Progress = quiet,
) -> list[Path]:
    """Measure, save and draw; the middle, 96 × 96 pixels, of every image is used."""
    images = pictures(data, limit, quick).at_least(8)
    side = min(min(CROP, *image.shape[1:]) for image in images.images)
    x = torch.cat([images.cropped(side).tensor(k) for k in range(len(images))])
    models = open_priors(priors)
    arrays: dict[str, np.ndarray] = {
        "priors": np.array([label_of(name) for name in models]),
        "images": np.array(len(x)),
    }
    for number, (name, prior) in enumerate(models.items()):

        def watch(done: int, total: int, number: int = number) -> None:
            progress(number * total + done, len(models) * total)

        facts = measure(prior, x, progress=watch)
        arrays |= {f"{label_of(name)}.{key}": value for key, value in facts.items()}
    saved = plots.save_data(out, NAME, arrays)
    return [saved, *draw(plots.load_data(saved), out)]


# ---------------------------------------------------------------- numbers


@torch.no_grad()
def measure(prior: Prior, x: Tensor, *, progress: Progress = quiet) -> dict[str, np.ndarray]:
    """The numbers of the figure for a prior of L layers with F filters each.

    t_hat (T,); for l = 1 … L filters.l, features.l and values.l (T, F, P), departure.l (T, F); and
    minima (F,), of the last potentials at t̂_min.
    """
    low, high = prior.t_hat_range
    t_hats = torch.linspace(low, high, CURVES, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(x.shape, generator=generator)
    curves: list[list[tuple[np.ndarray, np.ndarray]]] = []
    for number, t_hat in enumerate(t_hats.tolist()):
        curves.append(_curves(prior, x + np.exp(t_hat / 2) * noise, t_hat))
        progress(number + 1, CURVES)
    layers = prior.architecture.layers
    facts = {"t_hat": t_hats.numpy(), "layers": np.array(layers)}
    for layer in range(layers):
        features, values = (np.stack([c[layer][i] for c in curves]) for i in (0, 1))
        last = layer == layers - 1
        facts |= {
            f"filters.{layer + 1}": prior.kernels()[layer].numpy(),
            f"features.{layer + 1}": features,
            f"values.{layer + 1}": values,
            f"departure.{layer + 1}": departure(features, values, degree=2 if last else 1),
        }
    return facts | {"minima": count_minima(values[0])}


def _curves(prior: Prior, h: Tensor, t_hat: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per layer the features (F, P) from quantile to quantile, and φ of them."""
    curves = []
    layers = prior.collapse(prior.times(t_hat, len(h)))
    for k, phi in zip(prior.kernels(), layers, strict=True):
        u = convolve(h, k)
        ends = np.quantile(u.transpose(0, 1).flatten(1).numpy(), QUANTILES, axis=1)  # (2, F)
        features = np.linspace(ends[0], ends[1], POINTS, axis=1).astype(np.float32)
        table, inverse = phi.tables[0], phi.inverse_gamma
        points = torch.from_numpy(features)[None, :, None].contiguous()
        values = evaluate(points, table[:1], inverse[:1])
        curves.append((features, values[0, :, 0].numpy()))
        h = evaluate(u, table, inverse)
    return curves


def departure(x: np.ndarray, y: np.ndarray, degree: int) -> np.ndarray:
    """The share of the variance of y (…, P) that the best polynomial in x leaves over."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    reach = np.abs(x).max(-1, keepdims=True)
    basis = (x / np.where(reach > 0, reach, 1))[..., None] ** np.arange(degree + 1)
    q, _ = np.linalg.qr(basis)
    rest = y - (q @ (q.swapaxes(-1, -2) @ y[..., None]))[..., 0]
    variance = np.square(y - y.mean(-1, keepdims=True)).sum(-1)
    return np.square(rest).sum(-1) / np.where(variance > 0, variance, 1)


def count_minima(y: np.ndarray) -> np.ndarray:
    """How many points of every curve (…, P) lie below both of their neighbours."""
    inner = y[..., 1:-1]
    return ((inner < y[..., :-2]) & (inner < y[..., 2:])).sum(-1)


# ---------------------------------------------------------------- the picture


def draw(data: dict[str, np.ndarray], out: Path) -> list[Path]:
    """A box for every prior, layers from top to bottom, and the measured departures below."""
    labels = [str(label) for label in data["priors"]]
    layers = [int(data[f"{label}.layers"]) for label in labels]
    heights = [1.85 * n + 0.3 for n in layers] + [2.7]
    with plots.figure(10.5, sum(heights)) as fig:
        boxes: Any = fig.subfigures(len(heights), 1, height_ratios=heights)
        for label, depth, box in zip(labels, layers, boxes[:-1], strict=True):
            box.suptitle(f"{title(label)}: first {SHOWN} filters and functions of every layer")
            _draw_prior(box, data, label, depth)
        _draw_departures(boxes[-1], data, labels)
        return plots.save_figure(fig, out, NAME)


def _cold_to_warm() -> Any:
    """Blue to vermillion by way of grey: no shade of it is faint on white."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("cold", [plots.BLUE, "#8E8489", plots.VERMILLION])


def _draw_prior(box: Figure, data: dict[str, np.ndarray], label: str, depth: int) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    t_hat = data[f"{label}.t_hat"]
    color = ScalarMappable(Normalize(t_hat[0], t_hat[-1]), _cold_to_warm())
    cells = box.subplots(2 * depth, SHOWN, squeeze=False, height_ratios=[1, 0.75] * depth)
    for layer in range(depth):
        filters = data[f"{label}.filters.{layer + 1}"]
        features, values = (data[f"{label}.{key}.{layer + 1}"] for key in ("features", "values"))
        name = rf"$\phi_{{{layer + 1}}}$"
        cells[2 * layer, 0].set_ylabel(f"$K_{{{layer + 1}}}$", rotation=0, labelpad=10)
        cells[2 * layer + 1, 0].set_ylabel(name, rotation=0, labelpad=10)
        for j in range(SHOWN):
            top, below = cells[2 * layer, j], cells[2 * layer + 1, j]
            for ax in (top, below):
                ax.set_xticks([])
                ax.set_yticks([])
                ax.spines[:].set_visible(True)
                ax.spines[:].set(linewidth=0.4, color="0.7")
            if j >= len(filters):
                continue
            _draw_filter(top, filters[j])
            for t, x, y in reversed(list(zip(t_hat, features[:, j], values[:, j], strict=True))):
                below.plot(_to_unit(x), _to_unit(y), color=color.to_rgba(t), linewidth=0.9)
            below.set(xlim=(-0.05, 1.05), ylim=(-0.08, 1.08))
    bar = box.colorbar(color, ax=cells[:, -1], fraction=0.12, pad=0.1, aspect=12 * depth)
    bar.set_label(r"$\hat t=\log t$")


def _draw_filter(ax: Axes, kernel: np.ndarray) -> None:
    """(1, H, W) as it is, (N, H, W) as a mosaic of N; grey is zero.

    In a mosaic the largest fiftieth of the values is saturated: a filter that hands its own feature
    on would else hide what it takes from the others.
    """
    count, height, width = kernel.shape
    columns = int(np.ceil(np.sqrt(count)))
    rows = -(-count // columns)
    mosaic = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1), np.nan)
    for k, part in enumerate(kernel):
        top, left = k // columns * (height + 1), k % columns * (width + 1)
        mosaic[top : top + height, left : left + width] = part
    limit = float(np.quantile(np.abs(kernel), 1.0 if count == 1 else 0.98)) or 1.0
    ax.imshow(mosaic, cmap="gray", vmin=-limit, vmax=limit, interpolation="nearest", aspect="auto")


def _to_unit(v: np.ndarray) -> np.ndarray:
    low, high = float(v.min()), float(v.max())
    return (v - low) / ((high - low) or 1.0)


def _draw_departures(box: Figure, data: dict[str, np.ndarray], labels: list[str]) -> None:
    left, centre, right = box.subplots(1, 3)
    for label, color in zip(labels, COLORS, strict=False):
        t, depth = np.exp(data[f"{label}.t_hat"]), int(data[f"{label}.layers"])
        for layer in range(1, depth + 1):
            share = 100 * np.median(data[f"{label}.departure.{layer}"], axis=1)
            features = data[f"{label}.features.{layer}"]
            width = np.median(features[..., -1] - features[..., 0], axis=1)
            style = {"color": color, "linestyle": ("-", "--", ":")[(depth - layer) % 3]}
            name = rf"{title(label)}, $\phi_{layer}$"
            (left if layer == depth else centre).loglog(t, share, label=name, **style)
            right.loglog(t, width, label=name, **style)
    left.set(ylabel="% left over by a parabola", title="last potentials, median")
    centre.set(ylabel="% left over by a line", title="inner functions, median")
    right.set(ylabel=".01 to .99 quantile", title="range of the features, median")
    for ax in (left, centre, right):
        ax.set_xlabel("smoothing variance $t$")
        if ax.lines:
            ax.legend(frameon=False)
        else:
            ax.text(0.5, 0.5, "one layer: none", ha="center", transform=ax.transAxes)
    right.set_ylim(top=right.get_ylim()[1] * 10)  # room for the legend above the curves
