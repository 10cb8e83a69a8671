"""`gncprior evaluate`: PSNR and SSIM on a set of images, by the protocol of `gncprior.evaluation`."""

import json as json_format
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from gncprior.cli.levels import parse_levels, parse_shares, parse_start
from gncprior.errors import GncpriorError

if TYPE_CHECKING:
    from gncprior.evaluation import Restore
    from gncprior.unrolled import Schedules

Sigma = Annotated[
    str, Parameter(help="Noise level σ in [0, 1]: 0.1, 25/255, or several with commas between.")
]
Missing = Annotated[str, Parameter(help="Share of missing pixels in (0, 1), or several.")]
Data = Annotated[
    Path | None,
    Parameter(help="Folder with BSDS68 or BSDS500, or of any images; else $GNCPRIOR_DATA."),
]
Views = Annotated[
    Literal[1, 2, 4, 8],
    Parameter(
        help="Mean over the picture as it is and turned: slightly better, as many times as slow."
    ),
]
_HEADS = {
    "psnr": "PSNR", "psnr_clipped": "clipped", "ssim": "SSIM", "seconds": "s/image",
    "sigma": "estimate", "error": "error",
}  # fmt: skip
_DIGITS = {"ssim": 4, "sigma": 4, "error": 4}
Threads = Annotated[int | None, Parameter(help="Threads to use. [default: all]")]


def evaluate(
    *,
    task: Annotated[
        Literal["denoise", "inpaint", "noise"],
        Parameter(help="What to restore; noise only estimates σ."),
    ] = "denoise",
    sigma: Sigma = "0.1",
    missing: Missing = "0.8",
    prior: Annotated[str, Parameter(help="Name of a shipped prior, or a file.")] = "r1",
    method: Annotated[
        Literal["learned", "scheduled", "joint", "tweedie"],
        Parameter(help="How the smoothing t is chosen; tweedie is one step."),
    ] = "learned",
    steps: Annotated[int, Parameter(help="Number of steps I.")] = 10,
    t0: Annotated[
        str | None,
        Parameter(
            help="First smoothing variance of scheduled and joint: 0.003, or 0.3v for 0.3 σ². "
            "[default: σ², or the largest]"
        ),
    ] = None,
    schedule: Annotated[
        Path | None, Parameter(help="File of learned schedules. [default: beside the prior]")
    ] = None,
    blind: Annotated[
        bool, Parameter(help="Estimate σ of every image instead of telling it.", negative="")
    ] = False,
    colour: Annotated[
        bool,
        Parameter(help="Images in colour; a prior for grey takes channel by channel.", negative=""),
    ] = False,
    half: Annotated[
        bool,
        Parameter(help="Inner filters multiply in bfloat16, where the processor can.", negative=""),
    ] = False,
    views: Views = 1,
    data: Data = None,
    image_set: Annotated[
        Literal["test", "val"],
        Parameter(name="--set", help="BSDS68, or the 32 images of BSDS500 kept for choosing."),
    ] = "test",
    limit: Annotated[int | None, Parameter(help="Only the first images.")] = None,
    threads: Threads = None,
    json: Annotated[Path | None, Parameter(help="Also write all numbers to this file.")] = None,
) -> None:
    """Measure PSNR, SSIM and time of a method on a set of images, or errors of the noise level.

    Noise and masks depend only on the position of an image in the order of file names, so every
    method sees the same ones. PSNR is in dB, over all channels, of the result as it is and clipped
    to [0, 1]; the error of an estimated noise level is |σ̂ − σ|/σ.

    **Example:** `gncprior evaluate --sigma 15/255,25/255 --prior r1 --method tweedie --data pictures`
    """
    levels = parse_shares(missing) if task == "inpaint" else parse_levels(sigma)
    start, relative = parse_start(t0)
    if relative and task != "denoise":
        raise GncpriorError("Only denoising knows a variance of noise: give --t0 without v.")
    if limit is not None and limit < 1:
        raise GncpriorError(f"At least one image must be evaluated, not {limit}.")
    if half and task == "noise":
        raise GncpriorError("The noise level is read in full precision: leave out --half.")
    if blind and task != "denoise":
        raise GncpriorError("Only denoising can be blind to σ: leave out --blind.")

    from gncprior import evaluation
    from gncprior.checkpoints import load_prior, write_file

    use_threads(threads)
    model = load_prior(prior)
    grey = model.architecture.channels == 1
    images = evaluation.open_images(data, image_set, 3 if colour or not grey else 1)
    restoring = task != "noise"
    learned = None
    if restoring and method == "learned":
        learned = _schedules(schedule, prior, task, steps, model)

    def restoration(level: float) -> "Restore":
        first = start * level**2 if relative and start is not None else start
        restore = evaluation.restoration(
            model,
            task,
            level,
            method,
            steps=steps,
            t0=first,
            learned=learned,
            half=half,
            views=views,
        )
        return evaluation.channelwise(restore) if colour and grey else restore

    count = len(images) if limit is None else min(limit, len(images))
    settings: dict[str, Any] = {"task": task, "prior": prior, "images": images.title}
    settings |= {"count": count, "colour": colour or not grey}
    if restoring:
        settings |= {"method": method, "steps": 1 if method == "tweedie" else steps}
        settings |= {"t0": f"{start:g} σ²" if relative else start, "blind": blind, "half": half}
        settings["views"] = views
    reports = []
    with progress_bar(count * len(levels), "images") as advance:
        for level in levels:
            scores: Any
            if restoring:
                restore = evaluation.blind(restoration) if blind else restoration(level)
                scores = evaluation.evaluate(
                    images, task, level, restore, limit=limit, done=lambda _: advance()
                )
            else:
                scores = evaluation.estimates(
                    images, level, prior, limit=limit, done=lambda _: advance()
                )
            reports.append(evaluation.report(scores, {"level": level, **settings}))
    _table(reports)
    if json is not None:
        write_file(json, json_format.dumps(reports, indent=1).encode())
        print(f"  wrote {json}")


def use_threads(threads: int | None) -> None:
    """Let torch and the kernels use this many threads."""
    if threads is None:
        return
    if threads < 1:
        raise GncpriorError(f"At least one thread is needed, not {threads}.")
    import torch

    torch.set_num_threads(threads)


@contextmanager
def progress_bar(total: int, what: str) -> Iterator[Callable[[], None]]:
    """A bar with the time left on stderr; nothing where that is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def _schedules(file: Path | None, prior: str, task: str, steps: int, model: Any) -> "Schedules":
    from gncprior.unrolled import load_schedules, schedules_path

    path = schedules_path(prior, task, steps) if file is None else file
    if not path.is_file():
        raise GncpriorError(
            f"There are no learned schedules in {path}: learn them with `gncprior learn-schedule`, "
            "or choose another number of steps or method."
        )
    return load_schedules(path, model)


def _table(reports: list[dict[str, Any]]) -> None:
    first = reports[0]["settings"]
    facts = [
        first["task"],
        f"{first['count']} images ({first['images']})",
        f"prior {first['prior']}",
    ]
    if "method" in first:
        facts += [first["method"], f"{first['steps']} steps"]
    facts += [word for word in ("colour", "blind", "half") if first.get(word)]
    if first.get("views", 1) > 1:
        facts.append(f"{first['views']} views")
    print(", ".join(facts))
    keys = list(reports[0]["mean"])
    level = "missing" if first["task"] == "inpaint" else "sigma"
    print(f"{level:>8}", *(f"{_HEADS[key]:>8}" for key in keys))
    for report in reports:
        means = (f"{report['mean'][key]:8.{_DIGITS.get(key, 3)}f}" for key in keys)
        print(f"{report['settings']['level']:8.4f}", *means)
