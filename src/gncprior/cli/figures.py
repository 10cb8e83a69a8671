"""`gncprior figure NAME`: the figures of the paper, one command each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from gncprior.cli.evaluation import Data, Threads, progress_bar, use_threads
from gncprior.cli.shared import FIGURES, Out, Quick, report
from gncprior.errors import GncpriorError

figure = App(
    name="figure",
    help="Draw a figure of the paper, with its data beside it.",
    group=FIGURES,
)

FOLDER = Path("out/figures")
Priors = Annotated[
    str,
    Parameter(
        help="Priors, by name or file, with commas between. [default: all shipped]",
        show_default=False,
    ),
]
Limit = Annotated[int | None, Parameter(help="Only the first images.")]
Crop = Annotated[
    int, Parameter(help="Side in pixels of the middle of an image used; 0 is all of it.")
]


@Parameter(name="*")
@dataclass(frozen=True)
class What:
    """The options that figures of the shipped priors have in common."""

    out: Out = FOLDER
    quick: Quick = False
    priors: Priors = ""
    data: Data = None
    threads: Threads = None


ALL = What()


def _draw(name: str, run: Callable[..., list[Path]], what: What, **choices: Any) -> None:
    """Run an experiment with a bar, and say what it wrote."""
    use_threads(what.threads)
    with _progress(name) as progress:
        files = run(
            what.out,
            quick=what.quick,
            priors=_names(what.priors),
            data=what.data,
            progress=progress,
            **choices,
        )
    report(files)


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


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise GncpriorError(f"Positions are numbers with commas between, not {text!r}.") from None


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
    what: What = ALL,
    limit: Limit = None,
) -> None:
    """Filters and functions of the priors, over the range of features that they meet.

    The first ten filters of every layer, and the function φ of each for nine smoothing variances t, cold
    to warm. Below, how far φ is from a parabola (last layer) or a line (inner layers), over t.

    **Example:** `gncprior figure parameters --priors r1,r3 --data pictures`
    """
    from gncprior.experiments.parameters import run

    _draw("parameters", run, what, limit=limit)


@figure.command
def schedules(
    *,
    what: What = ALL,
    limit: Limit = None,
    crop: Crop = 128,
) -> None:
    """Energy and PSNR after every step of predefined, joint and learned smoothing.

    Denoising at σ = 0.1 in 30 steps, means over BSDS68. The energy is R + D at the smallest t, in nats per
    pixel. A prior without learned schedule has two curves.

    **Example:** `gncprior figure schedules --priors r1,r3 --limit 8 --data pictures`
    """
    from gncprior.experiments.schedules import run

    _draw("schedules", run, what, limit=limit, crop=crop)


@figure.command
def convexity(
    *,
    what: What = ALL,
    limit: Limit = None,
) -> None:
    """How convex the priors are: the smallest eigenvalue of their Hessian over the smoothing.

    Of the middle, 64 × 64 pixels, of each image (four by default) with noise of variance t; the
    constant image, which no filter sees, is left out. Convex where it is not below zero.

    **Example:** `gncprior figure convexity --priors r1,r3 --data pictures`
    """
    from gncprior.experiments.convexity import run

    _draw("convexity", run, what, limit=limit)


@figure.command
def attainment(
    *,
    what: What = ALL,
    limit: Limit = None,
    crop: Crop = 64,
) -> None:
    """Who reaches the lowest energy, and with what PSNR, over the first smoothing t_0 and the steps I.

    Predefined beside joint smoothing, denoising at σ = 0.1 and 80 % of the pixels missing. An image has
    attained its lowest energy where at most 2 % of the way down to it is missing. One figure for every
    prior; those of more than one layer get every seventeenth image and every other t_0.

    **Example:** `gncprior figure attainment --priors r1 --data pictures`
    """
    from gncprior.experiments.attainment import run

    _draw("attainment", run, what, limit=limit, crop=crop)


@figure.command
def gallery(
    *,
    what: What = ALL,
    images: Annotated[
        str, Parameter(help="Positions of images in the order of file names, from 0.")
    ] = "2,21,47",
) -> None:
    """Before and after, enlarged: noise of σ = 0.1, and 80 % of the pixels missing.

    Beside BM3D where the package bm3d is installed. PSNR is that of the whole image.

    **Example:** `gncprior figure gallery --priors r1 --images 0,1,2 --data pictures`
    """
    positions = _numbers(images)
    from gncprior.experiments.gallery import run

    _draw("gallery", run, what, images=positions)


@figure.command
def sampling(
    *,
    what: What = ALL,
    limit: Limit = None,
) -> None:
    """Pictures drawn from the priors by annealed Langevin dynamics, to see what they have learned.

    One sample on its way from the largest t to the smallest, four samples, and how their neighbouring
    pixels differ, beside those of images.

    **Example:** `gncprior figure sampling --priors r1,r3 --data pictures`
    """
    from gncprior.experiments.sampling import run

    _draw("sampling", run, what, limit=limit)


@figure.command
def bm3d(
    *,
    json: Annotated[Path, Parameter(help="File for the numbers.")] = Path("out/scores/bm3d.json"),
    data: Data = None,
    limit: Limit = None,
) -> None:
    """PSNR and time of BM3D at σ = 0.1, where the package bm3d is installed, for the results page.

    **Example:** `gncprior figure bm3d --limit 8 --json out/scores/bm3d.json`
    """
    import json as json_format

    from gncprior.checkpoints import write_file
    from gncprior.evaluation import open_images
    from gncprior.experiments.results import measure_bm3d

    images = open_images(data)
    count = len(images) if limit is None else min(limit, len(images))
    with progress_bar(count, "images") as advance:
        reports = measure_bm3d(images, limit=limit, done=lambda _: advance())
    write_file(json, json_format.dumps(reports, indent=1).encode())
    report([json])


@figure.command
def results(
    *,
    scores: Annotated[
        Path, Parameter(help="Folder of JSON files by `gncprior evaluate --json`.")
    ] = Path("out/scores"),
    figures: Annotated[Path, Parameter(help="Folder of the figures and their data.")] = FOLDER,
    page: Annotated[Path, Parameter(help="Page with the marked places.")] = Path("docs/results.md"),
    show: Annotated[
        bool, Parameter(name="--list", help="Only print the commands to run first.", negative="")
    ] = False,
    priors: Priors = "",
) -> None:
    """Write the tables of the results page from measured scores, beside those of other methods.

    `gncprior figure results --list | sh` measures all that is on the page, which takes hours.

    **Example:** `gncprior figure results --scores out/scores --page docs/results.md`
    """
    from gncprior.experiments import results as experiment

    if show:
        print("\n".join(experiment.commands(_names(priors), str(scores))))
        return
    parts = experiment.tables(experiment.read(scores), figures, page)
    report([experiment.write(page, parts)])
