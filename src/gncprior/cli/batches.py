"""Which pictures a command is about, and working through them: files, folders, patterns, pipes.

A folder is searched to its depths and the tree of results mirrors it; what is there already is
skipped.  One bad file does not end a batch: all of them are listed at the end.
"""

import glob
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gncprior.errors import GncpriorError

if TYPE_CHECKING:
    from gncprior.picture_files import Picture

PIPE = "-"
MOST_BYTES = 2**31  # that are taken from a pipe
Advance = Callable[[float], None]


class SomeFailedError(GncpriorError):
    """Some pictures of a batch; the others are done."""


@dataclass(frozen=True)
class Job:
    """One picture: where it comes from, where its result goes, and its name in a batch."""

    source: str
    target: str = PIPE
    name: str = ""


def find(source: str) -> tuple[Path, list[Path]]:
    """The files that IN stands for, and the folder that their names are relative to."""
    from gncprior.picture_files import FORMATS

    path = Path(source)
    if path.is_dir():
        base, found = path, path.rglob("*")
    elif not path.exists() and glob.has_magic(source):
        fixed = [p for p in path.parts if not glob.has_magic(p)]
        base = Path(*path.parts[: next(k for k, p in enumerate(path.parts) if p not in fixed)])
        found = (Path(name) for name in glob.iglob(source, recursive=True))  # noqa: PTH207
    else:
        return path.parent, [path]
    files = sorted(
        file
        for file in found
        if file.suffix.lower() in FORMATS and not file.name.startswith(".") and file.is_file()
    )
    if not files:
        raise GncpriorError(f"There are no pictures in {source}.")
    return base, files


def is_one(source: str) -> bool:
    """Whether IN is one picture and no batch."""
    return source == PIPE or not (Path(source).is_dir() or glob.has_magic(source))


def plan(source: str, target: str, *, overwrite: bool) -> tuple[list[Job], int]:
    """The pictures to restore, and how many are done already."""
    if source == PIPE:
        job = Job(PIPE, target)
        if target != PIPE:
            _check_target(Path(target), overwrite)
        return [job], 0
    base, files = find(source)
    single = len(files) == 1 and files[0] == Path(source)
    out = Path(target)
    if single and target != PIPE:
        if out.is_dir() or target.endswith("/"):
            out = out / files[0].name
        _check_target(out, overwrite)
        return [Job(source, str(out), files[0].name)], 0
    if target == PIPE:
        if single:
            return [Job(source, PIPE, files[0].name)], 0
        raise GncpriorError("Many pictures do not fit into one pipe: name a folder for them.")
    if out.is_file():
        raise GncpriorError(f"{out} is a file: name a folder for the results of {source}.")
    inside = out.resolve()
    files = [file for file in files if not file.resolve().is_relative_to(inside)]
    if not files:
        raise GncpriorError(f"All pictures of {source} are in {out}: name another folder.")
    jobs = [Job(str(f), str(out / f.relative_to(base)), str(f.relative_to(base))) for f in files]
    waiting = [job for job in jobs if overwrite or not Path(job.target).exists()]
    return waiting, len(jobs) - len(waiting)


def _check_target(path: Path, overwrite: bool) -> None:
    from gncprior.picture_files import format_of

    format_of(path)
    if path.exists() and not overwrite:
        raise GncpriorError(f"{path} exists: choose another name, or --overwrite it.")


def read(source: str) -> "Picture":
    """The picture of a job."""
    from gncprior.picture_files import read_picture

    if source != PIPE:
        return read_picture(source)
    data = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise GncpriorError("The input is longer than 2 GB: save it to a file.")
    return read_picture(data)


def write(target: str, picture: "Picture") -> tuple[str, ...]:
    """Its result; into a pipe in the format that it came in."""
    import io

    from gncprior.picture_files import encode, write_picture

    if target != PIPE:
        return write_picture(target, picture)
    file = io.BytesIO()
    notices = encode(file, picture, picture.kind)
    sys.stdout.buffer.write(file.getbuffer())
    sys.stdout.buffer.flush()
    return notices


def work(
    jobs: Sequence[Job],
    each: Callable[[Job, Advance], dict[str, Any]],
    workers: int = 1,
    *,
    alone: bool,
) -> list[dict[str, Any]]:
    """What ``each`` says of every job; unless it is alone, a failure is a record with the word "error"."""
    if workers < 1:
        raise GncpriorError(f"At least one job must run at a time, not {workers}.")

    def attempt(job: Job) -> dict[str, Any]:
        done = 0.0

        def advance(amount: float) -> None:
            nonlocal done
            done += amount
            bar(amount)

        try:
            return each(job, advance)
        except (GncpriorError, MemoryError, OSError) as error:
            text = str(error) or "There is not enough memory."
            if job.source != PIPE and job.source not in text:
                text = f"{job.source}: {text}"
            if alone:
                raise GncpriorError(text) from error
            return {"input": job.source, "error": text}
        finally:
            bar(1 - done)

    with _bar(len(jobs)) as bar:
        if workers == 1 or len(jobs) == 1:
            return [attempt(job) for job in jobs]
        from concurrent.futures import ThreadPoolExecutor

        import torch

        torch.set_num_threads(max(torch.get_num_threads() // workers, 1))
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(attempt, jobs))


@contextmanager
def _bar(total: int) -> Iterator[Advance]:
    """Progress with the time left on stderr; nothing where that is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda amount: progress.advance(task, amount)


def tell(text: str) -> None:
    """A line for people, beside whatever goes into pipes."""
    print(f"gncprior: {text}", file=sys.stderr)


def end(records: list[dict[str, Any]]) -> None:
    """List what failed."""
    failed = [record["error"] for record in records if "error" in record]
    for text in failed:
        tell(text)
    if failed:
        raise SomeFailedError(
            f"{len(failed)} of {len(records)} pictures could not be read or restored."
        )
