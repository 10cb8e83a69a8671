"""`gncprior denoise`, `inpaint` and `estimate`: pictures in, better pictures out."""

import json as json_format
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from gncprior.cli import batches
from gncprior.cli.batches import PIPE, Advance, Job
from gncprior.cli.levels import parse_level
from gncprior.errors import GncpriorError

if TYPE_CHECKING:
    import numpy as np

    from gncprior.picture_files import Picture
    from gncprior.solvers import History

In = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="A picture, a folder (searched to its depths), a 'pattern', or - for a pipe.",
    ),
]
To = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True, help="A file whose ending says the format, a folder, or -."
    ),
]
Range = Annotated[
    float | None,
    Parameter(help="What stands for white in float pictures. [default: 1]"),
]
Json = Annotated[bool, Parameter(help="Print what was done as JSON.", negative="")]


@Parameter(name="*")
@dataclass(frozen=True)
class How:
    """The options that all restoring has in common."""

    quality: Annotated[
        Literal["fast", "best"], Parameter(help="The shortest way, or the best that is shipped.")
    ] = "best"
    prior: Annotated[
        str, Parameter(help="Name of a shipped prior, or a file; auto goes by quality and colour.")
    ] = "auto"
    method: Annotated[
        Literal["auto", "learned", "scheduled", "tweedie"],
        Parameter(
            help="How the smoothing t is chosen; tweedie is one step. auto: learned if shipped."
        ),
    ] = "auto"
    half: Annotated[
        bool,
        Parameter(
            help="Deep priors multiply in bfloat16 where the processor can: faster, and off by far "
            "less than a grey level.",
            negative="",
        ),
    ] = False
    views: Annotated[
        Literal[1, 2, 4, 8],
        Parameter(
            help="Mean over the picture as it is and turned: slightly better, as many times as slow."
        ),
    ] = 1
    data_range: Range = None
    overwrite: Annotated[bool, Parameter(help="Replace files that exist.", negative="")] = False
    compare: Annotated[
        bool, Parameter(help="Also write NAME-compare.png, before and after.", negative="")
    ] = False
    trace: Annotated[
        bool,
        Parameter(help="Also write NAME-trace.csv and .png, t̂ and energy per step.", negative=""),
    ] = False
    jobs: Annotated[
        int, Parameter(help="Pictures of a folder that are restored at the same time.")
    ] = 1
    json: Json = False

    @property
    def keywords(self) -> dict[str, Any]:
        """Those of them that the functions take."""
        names = ("quality", "prior", "method", "half", "views", "data_range")
        return {name: getattr(self, name) for name in names}


PLAIN = How()


def denoise(
    source: In,
    target: To,
    /,
    *,
    sigma: Annotated[
        str, Parameter(help="Noise level σ on the scale [0, 1]: 0.1, 25/255; auto estimates it.")
    ] = "auto",
    how: How = PLAIN,
) -> None:
    """Remove noise from a picture, or from all pictures of a folder.

    Depth, resolution, colour profile and EXIF are kept where the format allows it; alpha channels
    stay as they are. In a folder, pictures that are done already are skipped.

    **Example:** `gncprior denoise noisy.png clean.png --sigma 25/255`
    """
    level = None if sigma == "auto" else parse_level(sigma)

    def restore(page: "np.ndarray", record: dict[str, Any], **more: Any) -> "np.ndarray":
        from gncprior.restore import denoise as run
        from gncprior.restore import noise_levels

        axis = _channel_axis(page)
        one = level
        if one is None:
            one, error = noise_levels(page, channel_axis=axis, data_range=how.data_range)
            record.setdefault("estimated_error", []).append(error)
        record.setdefault("sigma", []).append(one)
        return run(page, one, channel_axis=axis, **how.keywords, **more)

    _batch(source, target, restore, how)


def inpaint(
    source: In,
    target: To,
    /,
    *,
    mask: Annotated[
        Path, Parameter(help="Picture that is white where pixels are unknown; or a folder of them.")
    ],
    how: How = PLAIN,
) -> None:
    """Fill in the unknown pixels of a picture; all others stay exactly as they are.

    A folder of masks has one for every picture, with the same name.

    **Example:** `gncprior inpaint scratched.png whole.png --mask scratches.png`
    """

    def restore(page: "np.ndarray", record: dict[str, Any], **more: Any) -> "np.ndarray":
        from gncprior.restore import inpaint as run

        unknown = _mask(mask / record["name"] if mask.is_dir() else mask)
        record["unknown"] = float(unknown.mean())
        return run(page, unknown, channel_axis=_channel_axis(page), **how.keywords, **more)

    _batch(source, target, restore, how)


def estimate(source: In, /, *, data_range: Range = None, json: Json = False) -> None:
    """Estimate the standard deviation of the noise in a picture, or in all of a folder.

    It is on the scale [0, 1], with its error and, in brackets, in grey levels of 255.

    **Example:** `gncprior estimate noisy.png`
    """

    def each(job: Job, _: Advance) -> dict[str, Any]:
        from gncprior.restore import noise_levels

        picture = batches.read(job.source)
        record: dict[str, Any] = {"input": job.source, "sigma": [], "error_bar": []}
        for page in picture.pages:
            found = noise_levels(page, channel_axis=_channel_axis(page), data_range=data_range)
            record["sigma"].append(found[0])
            record["error_bar"].append(found[1])
        return record

    files = [PIPE] if source == PIPE else [str(file) for file in batches.find(source)[1]]
    records = batches.work([Job(file) for file in files], each, alone=batches.is_one(source))
    if json:
        print(json_format.dumps(records, indent=1))
    else:
        for record in records:
            for s, e in zip(record.get("sigma", []), record.get("error_bar", []), strict=True):
                print(f"{record['input']}  {s:.4f} ± {e:.4f}  ({s * 255:.1f}/255)")
    batches.end(records)


# ---------------------------------------------------------------- one picture, and all of them


def _batch(source: str, target: str, restore: Any, how: How) -> None:
    if target == PIPE and (how.json or how.compare or how.trace):
        raise GncpriorError("With the result in a pipe there is no place for more: name a file.")
    todo, done = batches.plan(source, target, overwrite=how.overwrite)
    from gncprior.picture_files import with_pages

    def each(job: Job, advance: Advance) -> dict[str, Any]:
        begin = time.perf_counter()
        picture = batches.read(job.source)
        record: dict[str, Any] = {"input": job.source, "output": job.target, "name": job.name}
        histories: list[History] | None = [] if how.trace else None
        share = 1 / len(picture.pages)
        pages = []
        for page in picture.pages:
            last = 0

            def progress(k: int, n: int) -> None:
                nonlocal last
                advance(share * (k - last) / n)
                last = k

            pages.append(restore(page, record, trace=histories, progress=progress))
        result = with_pages(picture, pages)
        notices = [*picture.notices, *_notices(job, picture, how.data_range)]
        notices += batches.write(job.target, result)
        if how.compare:
            _side_by_side(Path(job.target), picture, result, how.data_range)
        if histories is not None:
            _write_trace(Path(job.target), histories)
        record["seconds"] = time.perf_counter() - begin
        record["notices"] = notices
        return record

    records = batches.work(todo, each, how.jobs, alone=batches.is_one(source))
    for record in records:
        for notice in record.get("notices", []):
            batches.tell(f"{notice}.")
    if how.json:
        print(json_format.dumps(records, indent=1))
    elif target != PIPE:
        for record in records:
            if "output" in record:
                print(_line(record))
        if done:
            print(f"{done} done before")
    batches.end(records)


def _line(record: dict[str, Any]) -> str:
    facts = [f"{record['seconds']:.1f} s"]
    if "sigma" in record:
        how = "estimated" if "estimated_error" in record else "given"
        facts.append(f"σ = {', '.join(f'{s:.4f}' for s in record['sigma'])} {how}")
    if "unknown" in record:
        facts.append(f"{100 * record['unknown']:.1f} % unknown")
    return f"{record['output']}  ({', '.join(facts)})"


def _channel_axis(page: "np.ndarray") -> int | None:
    return -1 if page.ndim == 3 else None


def _notices(job: Job, picture: "Picture", data_range: float | None) -> list[str]:
    """Floats on another scale than they are taken for."""
    large = any(page.dtype.kind == "f" and page.max() > 10 for page in picture.pages)
    if not large or data_range is not None:
        return []
    name = "the input" if job.source == PIPE else job.source
    return [f"{name} has values far above 1: say what stands for white with --data-range"]


def _mask(path: Path) -> "np.ndarray":
    """True where a picture is brighter than half its range."""
    from gncprior.arrays import range_of
    from gncprior.picture_files import read_picture

    page = read_picture(path).pages[0]
    if page.ndim == 3:
        page = page[..., :3].max(axis=2) if page.shape[2] > 2 else page[..., 0]
    return page > range_of(page, None) / 2


def _beside(target: Path, ending: str) -> Path:
    return target.with_name(f"{target.stem}-{ending}")


def _side_by_side(
    target: Path, before: "Picture", after: "Picture", data_range: float | None
) -> None:
    from gncprior.picture_files import Picture, side_by_side, write_picture

    pages = (before.pages[0], after.pages[0])
    write_picture(_beside(target, "compare.png"), Picture((side_by_side(pages, data_range),)))


def _write_trace(target: Path, histories: "list[History]") -> None:
    from gncprior.checkpoints import write_file
    from gncprior.plots import draw_trace

    lines = ["part,step,t_hat,energy,step_size"]
    for part, history in enumerate(histories):
        energies = history.energy.sum(1).tolist()  # of all channels
        sizes = [*history.step_size[:, 0].tolist(), ""]
        for step, row in enumerate(zip(history.t_hat[:, 0].tolist(), energies, sizes, strict=True)):
            lines.append(",".join(map(str, (part, step, *row))))
    write_file(_beside(target, "trace.csv"), "\n".join([*lines, ""]).encode())
    if histories:
        draw_trace(
            target.parent,
            _beside(target, "trace").name,
            [(h.t_hat[:, 0].tolist(), h.energy.sum(1).tolist()) for h in histories],
        )
