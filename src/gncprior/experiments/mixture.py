"""Figure `mixture`: graduated non-convexity on the 1-D example of section 2.

Three panels. Energies F(·, t) for many t. The share of equally spaced starts in [−3, 3] from which
Algorithm 1 attains the global minimum of F(·, t_min), over the first smoothing t_0 and the number of
steps I. The smallest second derivative of F(·, t_0), which tells where F is convex.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gncprior import mixtures, plots, schedules

if TYPE_CHECKING:
    from gncprior.plots import Axes, Figure

NAME = "mixture"
X_MAX = 3.0  # the domain is [−X_MAX, X_MAX]
STARTS = 1000


def run(out: Path, quick: bool = False) -> list[Path]:
    """Compute, save and draw the figure into the folder `out`; `quick` takes a coarser grid."""
    data = plots.save_data(out, NAME, compute(quick))
    return [data, *draw(plots.load_data(data), out)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch to one thread inside a block or function.

    The flow takes thousands of steps on small arrays: a second thread gains little and, where the
    cores are busy, makes every step wait until both threads had their turn.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def compute(quick: bool = False) -> dict[str, np.ndarray]:
    """All numbers of the figure, in float64."""
    n_t, max_steps, n_steps = (24, 300, 24) if quick else (64, 2000, 64)
    mixture = mixtures.example_1d()
    x = torch.linspace(-X_MAX, X_MAX, 1201, dtype=torch.float64)
    fine = torch.linspace(-X_MAX, X_MAX, 6001, dtype=torch.float64).unsqueeze(-1)
    t_shown = _log_spaced(schedules.T_MIN, schedules.T_MAX, 17)
    t_0 = _log_spaced(schedules.T_MIN, schedules.T_MAX, n_t)
    t_fine = _log_spaced(schedules.T_MIN, schedules.T_MAX, 4 * n_t)
    steps = _log_spaced(1, max_steps, n_steps).round().long().unique()

    x_star, energy_star = mixtures.global_minimum_1d(mixture, schedules.T_MIN)
    basin = mixtures.basin_1d(mixture, x_star, schedules.T_MIN)
    start = torch.linspace(-X_MAX, X_MAX, STARTS, dtype=torch.float64)
    arrays = {
        "x": x,
        "t": t_shown,
        "energy": mixture.energy(x.unsqueeze(-1), t_shown.unsqueeze(-1)),
        "t_0": t_0,
        "steps": steps,
        "rate": mixtures.attainment_rate_1d(mixture, start, t_0.unsqueeze(-1), steps, basin),
        "t_curvature": t_fine,
        "curvature": mixtures.smallest_curvature(mixture, fine, t_fine),
        "minimum": torch.tensor([x_star, energy_star]),
        "basin": torch.tensor(basin),
        "t_convex": torch.tensor(mixtures.convexity_threshold(mixture, fine)),
        "t_unimodal": torch.tensor(mixtures.unimodality_threshold_1d(mixture)),
        "starts": torch.tensor(STARTS),
    }
    return {key: value.numpy() for key, value in arrays.items()}


def _log_spaced(first: float, last: float, count: int) -> torch.Tensor:
    ends = schedules.t_hat_from_t(first), schedules.t_hat_from_t(last)
    return schedules.t_from_t_hat(schedules.linear(*ends, count))


def draw(data: dict[str, np.ndarray], out: Path) -> list[Path]:
    """Draw the three panels from saved data."""
    with plots.figure(10.5, 4.2) as fig:
        left, centre, right = fig.subplots(1, 3, width_ratios=(1.1, 1.1, 0.8))
        right.sharey(centre)
        _energies(fig, left, data)
        _rates(fig, centre, data)
        _curvature(right, data)
        return plots.save_figure(fig, out, NAME)


def _energies(fig: Figure, ax: Axes, data: dict[str, np.ndarray]) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm

    t = data["t"]
    # The brightest tenth of the map is too faint for lines on white.
    colors = ListedColormap(colormaps[plots.COLORMAP](np.linspace(0, 0.9, 256)))
    color = ScalarMappable(LogNorm(t[0], t[-1]), colors)
    for t_i, energy in reversed(list(zip(t, data["energy"], strict=True))):
        ax.plot(data["x"], energy, color=color.to_rgba(t_i), linewidth=1.2)
    x_star, energy_star = data["minimum"]
    ax.plot(x_star, energy_star, "o", color=plots.VERMILLION, markersize=6, zorder=3)
    ax.annotate(
        f"$x^*={x_star:.3f}$",
        (x_star, energy_star),
        xytext=(8, -4),
        textcoords="offset points",
        color=plots.VERMILLION,
    )
    ax.set(
        xlim=(-X_MAX, X_MAX),
        ylim=(energy_star - 0.6, 9),
        xlabel="position $x$ (data units)",
        ylabel="energy $F(x,t)$ (nats)",
    )
    fig.colorbar(
        color, ax=ax, location="top", aspect=30, label="smoothing variance $t$ (data units²)"
    )


def _rates(fig: Figure, ax: Axes, data: dict[str, np.ndarray]) -> None:
    steps, t_0, rate = data["steps"], data["t_0"], data["rate"]
    image = ax.pcolormesh(
        steps, t_0, rate, shading="nearest", cmap=plots.COLORMAP, vmin=0, vmax=1, rasterized=True
    )
    levels = [0.2, 0.4, 0.6, 0.8, 0.999]
    shades = ["white", "white", "black", "black", plots.VERMILLION]
    widths = [0.9, 0.9, 0.9, 0.9, 1.6]
    ax.contour(steps, t_0, rate, levels, colors=shades, linewidths=widths)
    ax.text(steps[-1] / 1.3, 0.4, "all starts", color=plots.VERMILLION, ha="right", weight="bold")
    ax.set(
        xscale="log",
        yscale="log",
        xlim=(steps[0], steps[-1]),
        ylim=(t_0[0], t_0[-1]),
        xlabel="number of steps $I$",
        ylabel="first smoothing variance $t_0$ (data units²)",
    )
    bar = fig.colorbar(
        image,
        ax=ax,
        location="top",
        aspect=30,
        label=f"share of {int(data['starts'])} starts that attain $x^*$",
    )
    for level, shade, width in zip(levels, shades, widths, strict=True):
        bar.ax.axvline(level, color=shade, linewidth=width)


def _curvature(ax: Axes, data: dict[str, np.ndarray]) -> None:
    t, t_convex, t_unimodal = (
        data["t_curvature"],
        float(data["t_convex"]),
        float(data["t_unimodal"]),
    )
    ax.axhspan(t[0], t_convex, color=plots.VERMILLION, alpha=0.12, linewidth=0)
    ax.axhspan(t_convex, t[-1], color=plots.GREEN, alpha=0.18, linewidth=0)
    ax.axvline(0, color=plots.BLACK, linewidth=0.8, linestyle=":")
    ax.axhline(t_unimodal, color=plots.BLUE, linewidth=1, linestyle="--")
    ax.plot(data["curvature"], t, color=plots.BLACK)

    def label(x: float, t: float, text: str, **style: Any) -> None:
        ax.text(x, t, text, transform=ax.get_yaxis_transform(), fontsize=9, **style)

    label(0.04, t_convex * 1.2, f"convex\n$t_0\\geq{t_convex:.4f}$", color="#00614A")
    label(0.70, t[0] * 1.3, "non-convex", color="#8F3F00", ha="right")
    one = f"one minimum\n$t_0\\geq{t_unimodal:.4f}$"
    label(0.70, t_unimodal * 0.75, one, color=plots.BLUE, ha="right", va="top")
    ax.set_xscale("symlog", linthresh=1, linscale=0.5)
    ax.set_xticks([-100, -10, -1, 0, 1], labels=["−100", "−10", "−1", "0", "1"])
    ax.minorticks_off()
    ax.set(
        xlim=(-300, 3),
        ylim=(t[0], t[-1]),
        xlabel="smallest $\\partial^2F/\\partial x^2$ (nats / data unit²)",
    )
    ax.tick_params(labelleft=False)
