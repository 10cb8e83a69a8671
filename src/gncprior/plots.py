"""The look of all figures and how they are saved.

Figures are drawn from data that was saved before, so that a figure can be redrawn, or checked,
without computing anything again. Colours are those of Okabe and Ito and the map "cividis", which
read the same with and without full colour vision.

Nothing here keeps state: figures are made without pyplot, and files appear under their name only
when they are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

import numpy as np

from gncprior.errors import GncpriorError

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

    Axes: TypeAlias = matplotlib.axes.Axes
    Figure: TypeAlias = matplotlib.figure.Figure

BLUE, ORANGE, GREEN, VERMILLION, BLACK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#000000"
COLORMAP = "cividis"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.6,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # outlines as TrueType: text in the PDF can be searched and edited
}


@contextmanager
def figure(width: float, height: float) -> Iterator[Figure]:
    """An empty figure of width × height inches; draw and save it inside the `with` block."""
    try:
        import matplotlib.figure
    except ImportError:
        raise GncpriorError(
            "figures need matplotlib: install it with `pip install 'gncprior[plot]'`"
        ) from None
    with matplotlib.rc_context(STYLE):
        yield matplotlib.figure.Figure(figsize=(width, height), layout="constrained")


def save_figure(fig: Figure, out: Path, name: str) -> list[Path]:
    """Write NAME.png and NAME.pdf into the folder `out`: from the same data, the same bytes."""
    # The layout is that of a solver of constraints, whose last digits depend on addresses in
    # memory: it is run once and rounded. The date is left out for the same reason.
    fig.draw_without_rendering()
    fig.set_layout_engine("none")
    for part in fig.subfigs:
        part.bbox_relative.set_points(np.round(part.bbox_relative.get_points(), 6) + 0.0)
    for axes in fig.axes:
        axes.set_position(np.round(axes.get_position(original=True).bounds, 6).tolist())
    png = _write(out / f"{name}.png", lambda file: fig.savefig(file, format="png"))
    pdf = _write(
        out / f"{name}.pdf",
        lambda file: fig.savefig(file, format="pdf", metadata={"CreationDate": None}),
    )
    return [png, pdf]


def save_data(out: Path, name: str, arrays: dict[str, np.ndarray]) -> Path:
    """Write the arrays behind a figure to NAME.npz in the folder `out`."""
    return _write(
        out / f"{name}.npz",
        lambda file: np.savez_compressed(file, **cast("dict[str, Any]", arrays)),
    )


def load_data(path: Path) -> dict[str, np.ndarray]:
    """Read what `save_data` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def draw_trace(out: Path, name: str, parts: Sequence[tuple[list[float], list[float]]]) -> Path:
    """The smoothing t and the energy R + D over the steps, a line for every part of a picture."""
    with figure(6.0, 2.6) as fig:
        left, right = fig.subplots(1, 2)
        for t_hats, energies in parts:
            left.semilogy(np.exp(t_hats), color=BLUE, alpha=0.6, marker=".")
            right.plot(energies, color=VERMILLION, alpha=0.6, marker=".")
        left.set(xlabel="step", ylabel="smoothing variance t")
        right.set(xlabel="step", ylabel="energy R + D")
        return _write(out / f"{name}.png", lambda file: fig.savefig(file, format="png"))


def _write(path: Path, write: Callable[[BinaryIO], object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    try:
        with partial.open("wb") as file:
            write(file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path
