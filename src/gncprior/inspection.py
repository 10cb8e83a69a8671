"""A look at a prior: what it is, how it was made, and its filters and potentials as a picture.

Potentials are drawn over the range of features that they meet, from the .01 to the .99 quantile, one
curve for each of several t̂.  Features come from a picture of overlapping discs (a "dead leaves"
picture, which has the edges and the scales of natural ones) with noise of variance t, so that no
data set is needed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gncprior.filters import convolve
from gncprior.plots import COLORMAP, figure, save_figure
from gncprior.prior import Prior
from gncprior.splines import evaluate

if TYPE_CHECKING:
    from gncprior.plots import Axes, Figure

CURVES = 9  # values of t̂
POINTS = 65  # of a curve
QUANTILES = (0.01, 0.99)


# ---------------------------------------------------------------- words


def describe(prior: Prior) -> dict[str, dict[str, str]]:
    """Headings → names → values, as text: architecture, training, scores."""
    a, info = prior.architecture, prior.info
    sizes = [f"{a.filters} filters {a.first_size}×{a.first_size}×{a.channels}"]
    sizes += [f"{a.filters} filters {a.inner_size}×{a.inner_size}×{a.filters}"] * (a.layers - 1)
    potentials = f"{a.x_knots} knots on [−{a.x_range:g}, {a.x_range:g}] × {a.t_knots} in t̂"
    text = {
        "Architecture": {
            "layers": f"{a.layers}: {', '.join(sizes)}",
            "potentials": potentials + (", features divided by √(s²+t)" if a.scaled else ""),
            "smoothing t": f"{a.t_min:g} to {a.t_max:g} (σ = {math.sqrt(a.t_min):g} to "
            f"{math.sqrt(a.t_max):g})",
            "parameters": str(sum(p.numel() for p in prior.parameters())),
        }
    }
    recipe = info.get("recipe")
    if isinstance(recipe, dict):
        shape = set(a.__dataclass_fields__)
        text["Recipe"] = {k: _plain(v) for k, v in recipe.items() if k not in shape}
    data = info.get("data")
    if isinstance(data, dict):
        text["Data"] = {k: _plain(v) for k, v in data.items() if k != "digest"}
    for heading in ("scores", "calibration"):
        facts = info.get(heading)
        if isinstance(facts, dict):
            text[heading.capitalize()] = {k: _plain(v) for k, v in facts.items()}
    return text


def _plain(value: Any) -> str:
    if isinstance(value, dict):  # psnr_15 comes after psnr_5
        ordered = sorted(value.items(), key=lambda item: (len(item[0]), item[0]))
        return ", ".join(f"{k} {_plain(v)}" for k, v in ordered)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------- curves


def dead_leaves(size: int = 128, discs: int = 400, seed: int = 0) -> np.ndarray:
    """A picture of discs, each in front of those before it, with radii of density ~ r⁻³."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size]
    picture = np.full((size, size), 0.5)
    radii = 2 / np.sqrt(1 - rng.random(discs) * (1 - (2 / (size / 2)) ** 2))
    for radius, (cy, cx), grey in zip(
        radii, rng.uniform(0, size, (discs, 2)), rng.uniform(0.05, 0.95, discs), strict=True
    ):
        picture[(y - cy) ** 2 + (x - cx) ** 2 < radius**2] = grey
    return picture


@torch.no_grad()
def potential_curves(prior: Prior) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """t̂ (T,), and per layer features and potentials, both (T, filters, points).

    Potentials are shifted to be 0 at the feature 0; the energy's minimum does not see constants.
    """
    low, high = prior.t_hat_range
    t_hats = torch.linspace(high, low, CURVES).to(prior.filters[0])
    generator = torch.Generator().manual_seed(0)
    clean = (
        torch.from_numpy(dead_leaves()).to(t_hats).expand(1, prior.architecture.channels, -1, -1)
    )
    noise = torch.randn(CURVES, *clean.shape[1:], generator=generator).to(t_hats)
    h = clean + (t_hats / 2).exp()[:, None, None, None] * noise
    quantiles = torch.tensor(QUANTILES).to(t_hats)
    layers = []
    for k, phi in zip(prior.kernels(), prior.collapse(t_hats), strict=True):
        u = convolve(h, k)
        ends = u.flatten(2).quantile(quantiles, dim=-1)  # (2, T, filters)
        along = torch.linspace(0, 1, POINTS).to(u)
        features = ends[0, ..., None] + (ends[1] - ends[0])[..., None] * along
        zero = torch.zeros_like(features[..., :1])
        values, origin = (
            evaluate(v.contiguous(), phi.tables[0], phi.inverse_gamma) for v in (features, zero)
        )
        layers.append((features, values - origin))
        h = evaluate(u, phi.tables[0], phi.inverse_gamma)
    return t_hats, layers


# ---------------------------------------------------------------- the picture


def draw(prior: Prior, out: Path, title: str = "") -> list[Path]:
    """Write the picture of a prior to ``out`` (.png) and, as lines, to the .pdf beside it."""
    t_hats, curves = potential_curves(prior)
    rows = prior.architecture.layers
    with figure(10.0, 0.5 + 3.9 * rows) as fig:
        axes = fig.subplots(rows, 2, squeeze=False, width_ratios=[1, 1.25])
        for number, (left, right) in enumerate(axes):
            kernel = prior.kernels()[number].float().cpu().numpy()
            _draw_filters(left, kernel, number + 1)
            _draw_potentials(right, t_hats, *curves[number], number + 1)
        _colour_bar(fig, axes[:, 1], t_hats)
        if title:
            fig.suptitle(title)
        return save_figure(fig, out.parent, out.stem)


def _columns(count: int) -> int:
    return max(1, math.ceil(math.sqrt(count * 1.3)))


def _draw_filters(axes: Axes, kernel: np.ndarray, layer: int) -> None:
    """First filters one by one, each on its own scale; inner ones as the matrix that they are."""
    count, inputs, height, width = kernel.shape
    if inputs <= 3:
        columns = _columns(count)
        rows = math.ceil(count / columns)
        scale = np.abs(kernel).max((1, 2, 3), keepdims=True)
        scaled = kernel / np.where(scale > 0, scale, 1)
        shape = (rows * (height + 1) + 1, columns * (width + 1) + 1, 3)
        mosaic = np.full(shape, (0.82, 0.87, 0.93))  # neither black, grey nor white
        for k, image in enumerate(scaled):
            top, left = (k // columns) * (height + 1) + 1, (k % columns) * (width + 1) + 1
            cell = 0.5 + 0.5 * image.transpose(1, 2, 0)
            mosaic[top : top + height, left : left + width] = cell
        axes.imshow(mosaic, interpolation="nearest")
        axes.set_title(f"Filters of layer {layer}, each on its own scale")
    else:
        mosaic = kernel.transpose(0, 2, 1, 3).reshape(count * height, inputs * width)
        limit = np.quantile(np.abs(mosaic), 0.999) or 1.0
        axes.imshow(mosaic, cmap="gray", vmin=-limit, vmax=limit, interpolation="nearest")
        axes.set_title(f"Filters of layer {layer}, a row for each feature made")
    axes.set_anchor("N")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_potentials(
    axes: Axes, t_hats: Tensor, features: Tensor, values: Tensor, layer: int
) -> None:
    """One cell a potential; all its curves share the scale of the cell."""
    from matplotlib.collections import LineCollection

    count = features.shape[1]
    columns = _columns(count)
    rows = math.ceil(count / columns)
    x, y = features.double().cpu().numpy(), values.double().cpu().numpy()
    # each curve over its own range: for small t it would else be a needle in the middle
    reach = np.abs(x).max(2, keepdims=True)
    x = x / np.where(reach > 0, reach, 1)
    low, high = y.min((0, 2))[None, :, None], y.max((0, 2))[None, :, None]
    y = (y - low) / np.where(high > low, high - low, 1)
    cell = np.arange(count)
    x = (cell % columns + 0.5)[None, :, None] + 0.42 * x
    y = (rows - 1 - cell // columns + 0.1)[None, :, None] + 0.8 * y
    lines = LineCollection(
        list(np.stack([x, y], axis=-1).reshape(-1, x.shape[-1], 2)),
        array=np.repeat(t_hats.double().cpu().numpy(), count),
        cmap=COLORMAP,
        linewidths=0.9,
    )
    axes.add_collection(lines)
    axes.set_xlim(0, columns)
    axes.set_ylim(0, rows)
    axes.set_xticks(range(columns + 1), [])
    axes.set_yticks(range(rows + 1), [])
    axes.grid(linewidth=0.4)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(f"Potentials of layer {layer}, each curve over its own range")


def _colour_bar(fig: Figure, axes: Any, t_hats: Tensor) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    norm = Normalize(float(t_hats.min()), float(t_hats.max()))
    bar = fig.colorbar(ScalarMappable(norm, COLORMAP), ax=axes[0], shrink=0.8, pad=0.02)
    bar.set_label("t̂ = log t")
