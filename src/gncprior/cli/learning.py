"""`gncprior train`, `gncprior calibrate` and `gncprior inspect`: make a prior, mend it, look at it."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from gncprior.cli.evaluation import Threads, progress_bar, use_threads
from gncprior.errors import GncpriorError
from gncprior.recipes import LEARNING, MODEL, RUN, Recipe

_GROUPS = {name: Group(name, sort_key=20 + k) for k, name in enumerate((MODEL, LEARNING, RUN))}

if TYPE_CHECKING:
    from typing import Any as Flags
else:
    # One flag for every field of a recipe; None where it is not given.
    Flags = make_dataclass(
        "Flags",
        [
            (
                f.name,
                Annotated[
                    type(f.default) | None,
                    Parameter(help=f.metadata["help"], group=_GROUPS[f.metadata["group"]]),
                ],
                None,
            )
            for f in fields(Recipe)
        ],
        frozen=True,
        namespace={"__module__": __name__},
    )


def train(
    *,
    data: Annotated[
        Path | None,
        Parameter(help="Folder of images, or of BSDS500; else $GNCPRIOR_DATA, else a download."),
    ] = None,
    out: Annotated[Path, Parameter(help="Folder of the run; made if missing.")] = Path("out/train"),
    recipe: Annotated[
        str | None,
        Parameter(help="fast, deep, paper, or a TOML file; flags go on top. [default: fast]"),
    ] = None,
    resume: Annotated[
        bool,
        Parameter(
            help="Go on with the run in --out, to the same result.",
            negative="",
            show_default=False,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        Parameter(
            help="Show all choices, the size and the time; then stop.",
            negative="",
            show_default=False,
        ),
    ] = False,
    device: Annotated[str, Parameter(help="cpu or cuda.")] = "cpu",
    flags: Annotated[Flags | None, Parameter(name="*")] = None,
) -> None:
    """Train a prior R_L(x, t) by joint score matching, on BSDS500 or on a folder of images.

    Writes OUT/prior.safetensors, with the log and checkpoints beside it. An interrupted run (Ctrl-C,
    SIGTERM, power) goes on with --resume. Several processes share a batch under
    `torchrun --nproc-per-node 2 -m gncprior train ...`.

    **Example:** `gncprior train --layers 1 --data pictures --out out/r1`
    """
    from gncprior import training
    from gncprior.datasets import open_dataset
    from gncprior.runs import RunFolder

    chosen = _recipe(recipe, flags, RunFolder(out).read_recipe() if resume else None)
    first = os.environ.get("RANK", "0") == "0"
    if dry_run:
        seconds = training.step_seconds(chosen, device)
        if first:
            parameters = sum(p.numel() for p in training.State(chosen).params)
            print(chosen.to_toml())
            print(f"{parameters} parameters; {1e3 * seconds:.0f} ms a step on noise, so about "
                  f"{_duration(seconds * chosen.steps)} for {chosen.steps} steps.")  # fmt: skip
        return
    images = open_dataset(data, chosen.channels)
    if first:
        print(f"Training on {len(images[0])} images ({images[0].title}), "
              f"validating on {len(images[1])} ({images[1].title}).", flush=True)  # fmt: skip
    with _progress(chosen.steps, first) as watch:
        outcome = training.train(chosen, *images, out, resume=resume, device=device, watch=watch)
    if not first:
        return
    if outcome.stopped_by is not None:
        print(f"Stopped at step {outcome.step}; go on with --resume --out {out}.")
        raise SystemExit(128 + outcome.stopped_by)
    print(f"  wrote {outcome.prior_file}")


def calibrate(
    *,
    prior: Annotated[str, Parameter(help="Name of a shipped prior, or a .safetensors file.")],
    data: Annotated[
        Path | None,
        Parameter(help="Folder of images, or of BSDS500; else $GNCPRIOR_DATA, else a download."),
    ] = None,
    balance: Annotated[
        float,
        Parameter(
            help="Weight of slopes in t that differ between pictures: the more, the better the noise "
            "level is read off the energy, and the worse it denoises; 30 to 100 for R_3, 0 for none."
        ),
    ] = 0.0,
    threads: Threads = None,
    out: Annotated[Path, Parameter(help="File for the prior, .safetensors.")],
) -> None:
    """Calibrate a prior in t on other images, or balance what it says of the noise in different pictures.

    Its features stay as they are: parabolas are added to the last potentials (--balance), and what is constant
    in them is fitted such that the energy is stationary in t at the right noise level on average.

    **Example:** `gncprior calibrate --prior r3 --data pictures --balance 50 --out mine.safetensors`
    """
    from gncprior import training
    from gncprior.checkpoints import load_prior, save_prior
    from gncprior.datasets import open_dataset
    from gncprior.gauges import one_step_psnr

    if not 0 <= balance < math.inf:
        raise GncpriorError(f"--balance must be 0 or more and finite, not {balance}.")
    use_threads(threads)
    model = load_prior(prior)
    images, validation = open_dataset(data, model.architecture.channels)
    convex = bool(model.info.get("recipe", {}).get("convex", False))
    count = min(training.BALANCE_IMAGES, len(images)) if balance else 0
    with progress_bar(count, "images") as advance:
        facts = training.calibrate_all(model, images, convex, balance, advance)
    scores = one_step_psnr(model, validation.cropped(training.LARGEST))
    title = "one-step PSNR, " + validation.title
    save_prior(out, model, {**model.info, "calibration": facts, "scores": {title: scores}})
    for name, value in {**facts, **scores}.items():
        print(f"  {name:24} {value:.4g}" if name in facts else f"  {name:24} {value:.3f} dB")
    print(f"  wrote {out}")


def inspect(
    prior: Annotated[str, Parameter(help="Name of a shipped prior, or a .safetensors file.")],
    *,
    out: Annotated[
        Path | None, Parameter(help="The picture, a .png file. [default: out/inspect/NAME.png]")
    ] = None,
) -> None:
    """Show a prior: its architecture, recipe and scores, and a picture of its filters and potentials.

    In the picture each potential is drawn for nine values of log t, over the features that it meets
    at that t: from their .01 to their .99 quantile.

    **Example:** `gncprior inspect r2 --out r2.png`
    """
    from gncprior.checkpoints import load_prior
    from gncprior.cli.shared import report
    from gncprior.inspection import describe, draw

    loaded = load_prior(prior)
    for heading, facts in describe(loaded).items():
        print(heading)
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            print(f"  {name:{width}}  {value}")
    name = Path(prior).stem
    report(draw(loaded, out or Path("out/inspect") / f"{name}.png", title=name))


def _recipe(name: str | None, flags: Any, stored: Recipe | None) -> Recipe:
    """The recipe with flags on top; when a run is resumed, the one it was started with."""
    from gncprior.recipes import read_recipe

    given = {} if flags is None else {k: v for k, v in vars(flags).items() if v is not None}
    base = stored if name is None and stored is not None else read_recipe(name or "fast")
    return base.changed(given, "The command")


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"


@contextmanager
def _progress(steps: int, first: bool) -> Iterator[Any]:
    """A watcher of events: a bar on a terminal, else one line per validation."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(quiet=not first, markup=False, highlight=False, soft_wrap=True)
    bar = Progress(
        BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[words]}"), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip
    task = bar.add_task("train", total=steps, words="")

    def watch(event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("start", "step"):
            bar.update(task, completed=event["step"])
        elif kind == "progress" and "loss" in event:
            words = f"loss {event['loss']:.4f}  {event['patches_per_second']:.0f} patches/s"
            bar.update(task, words=words)
        elif kind == "validation":
            scores = "  ".join(f"{v:.3f}" for k, v in event.items() if k.startswith("psnr"))
            console.print(f"step {event['step']}: PSNR at σ = 5, 15, 25, 50/255: {scores} dB")
        elif kind == "skipped":
            console.print(f"step {event['step']}: gradient not finite, skipped")
        elif kind == "damaged":
            console.print(event["why"])

    with bar:
        yield watch
