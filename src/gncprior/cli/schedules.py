"""`gncprior learn-schedule`: how much to smooth and how far to step, learned for a task."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from gncprior.cli.evaluation import Missing, Sigma, Threads, progress_bar, use_threads
from gncprior.cli.levels import parse_levels, parse_shares
from gncprior.errors import GncpriorError

if TYPE_CHECKING:
    from gncprior.datasets import Dataset
    from gncprior.finetuning import Settings
    from gncprior.prior import Prior
    from gncprior.unrolled import Schedules
    from gncprior.unrolled_learning import Progress

ALL_SIGMAS = "5/255,10/255,15/255,25/255,35/255,50/255,75/255"
ALL_SHARES = [0.5, 0.8]


def learn_schedule(
    *,
    task: Annotated[Literal["denoise", "inpaint"], Parameter(help="What to restore.")] = "denoise",
    sigma: Sigma | None = None,
    missing: Missing | None = None,
    prior: Annotated[str, Parameter(help="Name of a shipped prior, or a file.")] = "r1",
    steps: Annotated[int, Parameter(help="Number of steps I; 2 I parameters are learned.")] = 10,
    data: Annotated[
        Path | None,
        Parameter(help="Folder of images, or of BSDS500; else $GNCPRIOR_DATA, else a download."),
    ] = None,
    crops: Annotated[int, Parameter(help="Number of crops to learn from.")] = 64,
    size: Annotated[int, Parameter(help="Height and width of a crop in pixels.")] = 64,
    evaluations: Annotated[int, Parameter(help="Evaluations of the loss per level, at most.")] = 30,
    seed: Annotated[int, Parameter(help="Of crops, noise and masks.")] = 0,
    start: Annotated[
        Path | None, Parameter(help="Schedules to start from; their number of steps may differ.")
    ] = None,
    finetune: Annotated[
        Literal["schedule", "model"],
        Parameter(help="What to learn: model is the prior with its schedules, from learned ones."),
    ] = "schedule",
    iterations: Annotated[int, Parameter(help="Batches to fine-tune a model on.")] = 2000,
    batch: Annotated[int, Parameter(help="Crops in such a batch.")] = 14,
    rate: Annotated[float, Parameter(help="Factor of the learning rates of fine-tuning.")] = 1.0,
    spread: Annotated[
        bool, Parameter(help="Fine-tuning: give every step potentials of its own in t first.")
    ] = False,
    threads: Threads = None,
    out: Annotated[
        Path | None,
        Parameter(help="File for the schedules, or for a model. [default: beside the prior]"),
    ] = None,
) -> None:
    """Learn the smoothing t and the step size of every step, on pairs of clean and degraded crops.

    One schedule is learned for every noise level σ (5, 10, 15, 25, 35, 50 and 75 of 255 unless told)
    or share of missing pixels (0.5 and 0.8), and `denoise` and `evaluate` interpolate between them.
    The file is written after every level.

    With `--finetune model` all parameters of the prior are learned too, for all noise levels (or
    shares) of its schedules at once (those with this number of steps, or --start); the model is
    written to --out and its schedules beside it. The levels take turns, or those of --sigma (or
    --missing) do where given: one that is named twice counts twice. Under torchrun the processes
    share a batch.

    **Example:** `gncprior learn-schedule --prior r1 --sigma 15/255,25/255 --steps 10 --data pictures`
    """
    if task == "denoise":
        named = None if sigma is None else parse_levels(sigma)
    else:
        named = None if missing is None else parse_shares(missing)
    if finetune == "model" and out is None:
        raise GncpriorError("Say with --out where the fine-tuned model is to be written.")

    from gncprior.checkpoints import load_prior
    from gncprior.datasets import open_dataset
    from gncprior.unrolled import Schedules, fingerprint, load_schedules, schedules_path
    from gncprior.unrolled_learning import learn_schedules

    use_threads(threads)
    model = load_prior(prior)
    file = schedules_path(prior, task, steps) if out is None else out
    first = None if start is None else load_schedules(start)
    name = Path(prior).stem
    training, validation = open_dataset(data, model.architecture.channels)
    if finetune == "model" and out is not None:
        from gncprior.finetuning import Settings

        if first is None:
            first = load_schedules(schedules_path(prior, task, steps), model)
        settings = Settings(
            steps=iterations, batch=batch, size=size, seed=seed, turns=tuple(named or ()), spread=spread,
            lr=rate * Settings.lr, lr_schedules=rate * Settings.lr_schedules,
        )  # fmt: skip
        _fine_tune(model, first, (training, validation), settings, name, out)
        return

    levels = named or (parse_levels(ALL_SIGMAS) if task == "denoise" else ALL_SHARES)

    def save(schedules: Schedules) -> None:
        about = {"prior": name, "prior_sha256": fingerprint(model), **schedules.info}
        Schedules(task, schedules.levels, schedules.t_hats, schedules.etas, about).save(file)

    with _watch(len(levels) * evaluations) as watch:
        schedules = learn_schedules(
            model, training, validation, task, levels, steps=steps, count=crops, size=size,
            evaluations=evaluations, seed=seed, start=first, save=save, callback=watch,
        )  # fmt: skip
    _table(schedules)
    print(f"  wrote {file}")


def _fine_tune(
    prior: "Prior",
    schedules: "Schedules",
    images: "tuple[Dataset, Dataset]",
    settings: "Settings",
    name: str,
    out: Path,
) -> None:
    from dataclasses import asdict, replace

    from gncprior.checkpoints import save_prior
    from gncprior.finetuning import fine_tune
    from gncprior.unrolled import Schedules, fingerprint, schedules_path
    from gncprior.unrolled_learning import scores_of
    from gncprior.workers import Workers

    file = schedules_path(out, schedules.task, schedules.steps)
    training, validation = images
    before = scores_of(prior, validation, schedules, settings.size)
    after = before

    def save(model: "Prior", learned: Schedules) -> None:
        nonlocal after
        after = scores_of(model, validation, learned, settings.size)
        scores = {
            level: {"validation": score, "validation before": before[level]}
            for level, score in after.items()
        }
        about = {"fine-tuned from": name, "settings": asdict(settings), "scores": scores}
        save_prior(out, model, about)
        about |= {"prior": out.stem, "prior_sha256": fingerprint(model)}
        replace(learned, info=about).save(file)

    with Workers("cpu") as workers:
        first = workers.rank == 0
        with progress_bar(settings.batches, "batches") if first else nullcontext() as advance:
            fine_tune(
                prior, schedules, training, settings, workers=workers, save=save,
                callback=None if advance is None else lambda _: advance(),
            )  # fmt: skip
    if not first:
        return
    print(f"{'level':>10} {'PSNR':>10} {'at start':>10}")
    for level, score in after.items():
        print(f"{level:>10} {score:10.3f} {before[level]:10.3f}")
    print(f"  wrote {out}\n  wrote {file}")


@contextmanager
def _watch(total: int) -> Iterator[Callable[[float, "Progress"], None]]:
    with progress_bar(total, "evaluations") as advance:
        yield lambda _level, _progress: advance()


def _table(schedules: "Schedules") -> None:
    print(f"PSNR of all crops together, {schedules.task}, {schedules.steps} steps")
    print(f"{'level':>10} {'training':>10} {'validation':>10} {'at start':>10}")
    for level, score in schedules.info["scores"].items():
        print(f"{level:>10} {score['training']:10.3f} {score['validation']:10.3f} "
              f"{score['validation before']:10.3f}")  # fmt: skip
