"""`gncprior figure NAME`: the figures of the paper, one command each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from gncprior.cli.evaluation import Data, Threads, use_threads
from gncprior.cli.shared import FIGURES, Out, Quick, report

figure = App(
    name="figure",
    help="Draw a figure of the paper, with its data beside it.",
    group=FIGURES,
)

FOLDER = Path("out/figures")
Priors = Annotated[
    str, Parameter(help="Priors, by name or file, with commas between. [default: all shipped]")
]
Limit = Annotated[int | None, Parameter(help="Only the first images.")]


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time left on stderr, told (done, total); nothing where that is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _names(priors: str) -> list[str]:
    return [name.strip() for name in priors.split(",") if name.strip()]


@figure.command
def mixture(*, out: Out = FOLDER, quick: Quick = False) -> None:
    """Energies, attainment rates and convexity of a smoothed 1-D Gaussian mixture.

    Left to right: the energy F(x, t) over x in [-3, 3] for smoothing variances t in [1e-4, 1]; the
    share of 1000 starts that reach the global minimum, over the first smoothing t_0 and the number
    of steps I; the smallest second derivative of F, with its convex and non-convex ranges of t.

    **Example:** `gncprior figure mixture --out figures`
    """
    from gncprior.experiments.mixture import run

    report(run(out, quick=quick))


@figure.command
def parameters(
    *,
    out: Out = FOLDER,
    quick: Quick = False,
    priors: Priors = "",
    data: Data = None,
    limit: Limit = None,
    threads: Threads = None,
) -> None:
    """Filters and functions of the priors, over the range of features that they meet.

    The first ten filters of every layer, and the function φ of each for nine smoothing variances t, cold
    to warm. Below, how far φ is from a parabola (last layer) or a line (inner layers), over t.

    **Example:** `gncprior figure parameters --priors r1,r3 --data pictures`
    """
    from gncprior.experiments.parameters import run

    use_threads(threads)
    with _progress("parameters") as progress:
        files = run(
            out, quick=quick, priors=_names(priors), data=data, limit=limit, progress=progress
        )
    report(files)
