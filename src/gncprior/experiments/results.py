"""The page of results: tables from what `gncprior evaluate --json` wrote, beside the peers.

A page has marked places,

    <!-- begin NAME -->
    …
    <!-- end NAME -->

for each of the names below, and only what stands between the marks is written again.  `commands` lists
what has to be run for it.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gncprior import plots
from gncprior.checkpoints import shipped, write_file
from gncprior.datasets import Dataset
from gncprior.errors import GncpriorError
from gncprior.evaluation import evaluate, report
from gncprior.experiments import attainment, peers
from gncprior.experiments.common import MISSING, SIGMA, open_priors
from gncprior.experiments.gallery import BM3D, find_bm3d
from gncprior.unrolled import DENOISE, INPAINT, schedules_path

LEVELS = {5: "5", 15: "15", 25: "25", 25.5: "25.5 (σ = 0.1)", 50: "50"}  # of 255
SIGMAS = "5/255,15/255,25/255,0.1,50/255"
METHODS = {
    "tweedie": "one step",
    "scheduled": "predefined",
    "joint": "joint",
    "learned": "learned",
    BM3D: BM3D,
}
# Steps and t_0 of the schemes that are not learned, chosen with r1 at σ = 0.1 on the first eight validation
# images (`gncprior evaluate --set val --limit 8`), and for inpainting on two or three of them.
CHOICES = {
    (DENOISE, "scheduled"): "--steps 5",
    (DENOISE, "joint"): "--steps 6 --t0 0.3v",
    (INPAINT, "scheduled"): "--steps 60",
    (INPAINT, "joint"): "--steps 240",
}
DEEP_CHOICES = CHOICES | {(INPAINT, "joint"): "--steps 30"}  # more would take too long
COLOUR_LEVEL = 25  # of 255
LEARNED = (10, 30)  # steps
Reports = list[dict[str, Any]]

CAPTIONS = {
    "parameters": "The first ten filters K and functions φ of every layer; each φ over the .01 to .99 "
    "quantile range of its features, cold to warm with t̂, every curve from edge to edge. Below, the share "
    "of the variance of φ that the best parabola (last layer) or line (inner layers) leaves over, and the "
    "range of the features, medians over the filters.",
    "attainment-r1": "Share of images that attain their lowest energy, and mean PSNR, over the first "
    "smoothing t_0 and the number of steps I. Attained: of the way from the energy of x_0 down to the lowest "
    "found for the image in any cell, at most 2 % is missing; the energy is R + D at t_min.",
    "attainment-r2": "The same for R_2 on four images, over every other t_0.",
    "attainment-r3": "The same for R_3.",
    "schedules": "Energy R + D at t_min, and PSNR, after every step, means over the images; dots mark the "
    "highest PSNR.",
    "gallery": "Noisy at σ = 0.1, and with 80 % of the pixels missing; restored; original. PSNR is of the "
    "whole image.",
    "sampling": "A sample of every prior by annealed Langevin dynamics on its way from t_max to t_min, four "
    "samples, and the density of the difference of neighbours in samples and in images.",
    "mixture": "The 1-D mixture of the paper's section 2: energies, attainment rate, smallest second "
    "derivative.",
}


# ---------------------------------------------------------------- what to run


def commands(priors: Sequence[str], folder: str = "out/scores") -> list[str]:
    """The commands that measure everything on the page, for the named priors or those shipped.

    A step of a deep prior is dear.  With more than one layer, the longest schemes of denoising are measured on
    the first quarter of the images, and inpainting and the noise level on the first nine.
    """
    lines = []

    def add(words: str, file: str) -> None:
        lines.append(" ".join(f"gncprior evaluate {words} --json {folder}/{file}.json".split()))

    def learned(name: str, task: str) -> list[int]:
        return [steps for steps in LEARNED if schedules_path(name, task, steps).is_file()]

    for name, prior in open_priors(priors).items():
        deep, file = prior.architecture.layers > 1, Path(name).stem
        some, quarter = (" --limit 9", " --limit 17") if deep else ("", "")
        add(f"--sigma {SIGMAS} --prior {name} --method tweedie", f"{file}-denoise-tweedie")
        for (task, method), choice in (DEEP_CHOICES if deep else CHOICES).items():
            levels = f"--sigma {SIGMAS}{quarter if method == 'joint' else ''}"
            if task == INPAINT:
                levels = f"--missing {MISSING:g}{some}"
            words = f"--task {task} {levels} --prior {name} --method {method}"
            add(f"{words} {choice}", f"{file}-{task}-{method}")
        for steps in learned(name, DENOISE):
            levels = SIGMAS if steps <= LEARNED[0] else f"{SIGMAS}{quarter}"
            words = f"--sigma {levels} --prior {name} --steps {steps}"
            add(words, f"{file}-denoise-learned-{steps}")
        for steps in learned(name, INPAINT):
            words = f"--task inpaint --missing {MISSING:g}{some} --prior {name} --steps {steps}"
            add(words, f"{file}-inpaint-learned-{steps}")
        sigmas = ",".join(f"{level:g}" for level in peers.NOISE_LEVELS)
        add(f"--task noise --sigma {sigmas}{some} --prior {name}", f"{file}-noise")
    if not priors:
        for task, levels in ((DENOISE, f"--sigma {SIGMAS}"), (INPAINT, f"--missing {MISSING:g}")):
            for name in (name for name in shipped() if re.fullmatch(rf"r\d+-{task}", name)):
                for steps in learned(name, task):
                    words = f"--task {task} {levels} --prior {name} --steps {steps}"
                    add(words, f"{name}-{task}-learned-{steps}")
        colour = [name for name in shipped() if re.fullmatch(r"r\d+-rgb", name)]
        for name in [*(name.removesuffix("-rgb") for name in colour[:1]), *colour]:
            for steps in learned(name, DENOISE)[:1]:
                words = f"--colour --sigma {COLOUR_LEVEL}/255 --prior {name} --steps {steps}"
                add(words, f"{name}-colour-learned-{steps}")
    return [*lines, f"gncprior figure bm3d --json {folder}/bm3d.json"]


def measure_bm3d(
    images: Dataset, *, limit: int | None = None, done: Callable[[Any], None] | None = None
) -> Reports:
    """BM3D at σ = 0.1 by the same protocol and on the same clock, as `gncprior evaluate` reports."""
    denoise = find_bm3d()
    if denoise is None:
        raise GncpriorError(
            "BM3D is not installed: `pip install bm3d` brings it, under a licence for research only."
        )
    import torch

    scores = evaluate(
        images,
        DENOISE,
        SIGMA,
        lambda z, _: torch.from_numpy(denoise(z[0, 0].double().numpy(), SIGMA))[None, None],
        limit=limit,
        done=done,
    )
    settings = {
        "level": SIGMA,
        "task": DENOISE,
        "prior": "",
        "method": BM3D,
        "steps": 0,
        "t0": None,
    }
    settings |= {"images": images.title, "count": len(scores), "colour": False, "blind": False}
    return [report(scores, settings)]


def read(folder: Path) -> Reports:
    """All reports in the JSON files of a folder."""
    if not folder.is_dir():
        raise GncpriorError(
            f"There is no folder {folder} with scores: see `gncprior figure results --list`."
        )
    reports: Reports = []
    for file in sorted(folder.glob("*.json")):
        try:
            found = json.loads(file.read_text("utf-8"))
            reports += [{"settings": r["settings"], "mean": r["mean"]} for r in found]
        except (ValueError, TypeError, KeyError) as error:
            raise GncpriorError(f"{file} was not written by `gncprior evaluate --json`.") from error
    return reports


# ---------------------------------------------------------------- tables


def tables(reports: Reports, figures: Path, page: Path) -> dict[str, str]:
    """Name of a marked place → what stands there."""
    here = commit(page.parent)
    return {
        "source": f"Tables written at commit `{here}`."
        if here
        else "Tables written outside of git.",
        "denoising": denoising(reports),
        "denoising peers": denoising_peers(),
        "colour": colour(reports),
        "inpainting": inpainting(reports),
        "noise level": noise_level(reports),
        "figures": gallery_of(page),
        "findings": findings(figures),
    }


def _markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    head = list(head)
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _rows(
    reports: Reports, task: str, colour: bool = False
) -> dict[tuple[Any, ...], dict[float, dict[str, Any]]]:
    """Prior, method, steps, t_0, images → level → report, of told σ, and of grey images or of colour."""
    rows: dict[tuple[Any, ...], dict[float, dict[str, Any]]] = {}
    order = list(METHODS)
    for r in reports:
        s = r["settings"]
        if s["task"] != task or bool(s.get("colour")) != colour or s.get("blind"):
            continue
        key = (s["prior"], order.index(s["method"]), s["steps"], s["t0"], s["images"], s["count"])
        rows.setdefault(key, {})[s["level"]] = r
    return dict(sorted(rows.items(), key=lambda item: [str(part) for part in item[0]]))


def _words(key: tuple[Any, ...]) -> list[str]:
    """The first cells of a row: prior and method, with the images where they are not all of BSDS68."""
    prior, method, steps, t_0, images, count = key
    name = list(METHODS)[method]
    text = METHODS[name]
    if steps > 1:
        text += f", I = {steps}"
    if t_0 is not None:
        text += f", t_0 = {t_0 if isinstance(t_0, str) else format(t_0, 'g')}"
    if (images, count) != ("BSDS68", 68):
        text += f" ({count} images of {images})"
    return [f"`{prior}`" if prior else "–", text]


def _bm3d_seconds(reports: Reports) -> float | None:
    found = [r["mean"]["seconds"] for r in reports if r["settings"].get("method") == BM3D]
    return found[0] if found else None


def _ratio(seconds: float, bm3d: float | None) -> str:
    return "–" if bm3d is None else f"{seconds / bm3d:.3f}"


def denoising(reports: Reports) -> str:
    """PSNR / SSIM at every σ, and the time of an image at σ = 0.1 as a share of BM3D's."""
    rows, bm3d = [], _bm3d_seconds(reports)
    for key, levels in _rows(reports, DENOISE).items():
        cells, seconds = [], None
        for level in LEVELS:
            found = [r["mean"] for x, r in levels.items() if abs(x - level / 255) < 1e-6]
            cells.append(f"{found[0]['psnr']:.2f} / {found[0]['ssim']:.3f}" if found else "–")
            if found and level == 25.5:
                seconds = found[0]["seconds"]
        rows.append([*_words(key), *cells, "–" if seconds is None else _ratio(seconds, bm3d)])
    return _markdown(["prior", "scheme", *LEVELS.values(), "time / BM3D"], rows)


def colour(reports: Reports) -> str:
    """PSNR and SSIM of colour images, by priors for colour and channel by channel."""
    rows = []
    for key, levels in _rows(reports, DENOISE, colour=True).items():
        for level, r in levels.items():
            if abs(level - COLOUR_LEVEL / 255) < 1e-6:
                mean, (name, scheme) = r["mean"], _words(key)
                kind = "together" if key[0].endswith("-rgb") else "one by one"
                scores = (f"{mean['psnr']:.2f}", f"{mean['ssim']:.3f}")
                rows.append([name, scheme, kind, *scores, f"{mean['seconds']:.2f}"])
    return _markdown(["prior", "scheme", "channels", "PSNR", "SSIM", "s / image"], rows)


def denoising_peers() -> str:
    """Published and measured PSNR of others."""
    head = ["method", "15", "25", "50", "25.5, measured", "s", "parameters", "kind"]
    rows = [
        [p.name, *map(_number, p.published), _number(p.measured), _seconds(p.seconds), p.parameters,
         p.kind]
        for p in peers.DENOISERS
    ]  # fmt: skip
    return _markdown(head, rows)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def inpainting(reports: Reports) -> str:
    """PSNR and SSIM with 80 % of the pixels missing, ours and others'."""
    rows = []
    for key, levels in _rows(reports, INPAINT).items():
        for level, r in levels.items():
            if abs(level - MISSING) < 1e-6:
                mean = r["mean"]
                cells = (f"{mean['psnr']:.2f}", f"{mean['ssim']:.3f}", f"{mean['seconds']:.2f}")
                rows.append([*_words(key), *cells])
    for name, score, seconds in peers.INPAINTERS:
        rows.append(["–", name, f"{score:.2f}", "–", f"{seconds:g}"])
    return _markdown(["prior", "scheme", "PSNR", "SSIM", "s / image"], rows)


def noise_level(reports: Reports) -> str:
    """Mean |σ̂−σ|/σ in %."""
    found: dict[tuple[str, int], dict[float, float]] = {}
    for r in reports:
        s = r["settings"]
        if s["task"] == "noise" and not s.get("colour"):
            key = s["prior"], s["count"]
            found.setdefault(key, {})[s["level"]] = 100 * r["mean"]["error"]
    rows = [
        [
            f"`{prior}`" + (f" ({count} images)" if count != 68 else ""),
            *(_number(levels.get(x)) for x in peers.NOISE_LEVELS),
        ]
        for (prior, count), levels in sorted(found.items())
    ]
    rows.append(["scikit-image `estimate_sigma`", *map(_number, peers.ESTIMATE_SIGMA)])
    return _markdown(["", *(f"σ = {x:g}" for x in peers.NOISE_LEVELS)], rows)


# ---------------------------------------------------------------- figures


def gallery_of(page: Path) -> str:
    """The figures that stand beside the page in pictures/, with captions and commands."""
    parts = []
    for name, caption in CAPTIONS.items():
        if (page.parent / "pictures" / f"{name}.png").is_file():
            parts.append(f"![{name}](pictures/{name}.png)\n")
        command = name.partition("-")[0]
        parts.append(f"**{name}** (`gncprior figure {command}`). {caption}\n")
    return "\n".join(parts).rstrip()


def findings(folder: Path) -> str:
    """What the paper sees in its figures, as numbers from the data of ours."""
    lines: list[str] = []
    for name, tell in (("parameters", _of_parameters), ("schedules", _of_schedules)):
        if (folder / f"{name}.npz").is_file():
            lines += tell(plots.load_data(folder / f"{name}.npz"))
    for file in sorted(folder.glob("attainment-*.npz")):
        lines += _of_attainment(plots.load_data(file))
    return "\n".join(lines) or "No figure has been drawn yet."


def _of_parameters(data: dict[str, np.ndarray]) -> list[str]:
    lines = []
    for label in map(str, data["priors"]):
        depth = int(data[f"{label}.layers"])
        for layer in range(depth, 0, -1):
            first, last = 100 * np.median(data[f"{label}.departure.{layer}"], axis=1)[[0, -1]]
            shape = "a parabola" if layer == depth else "a line"
            lines.append(
                f"- `{label}`, φ_{layer}: {shape} leaves over {first:.3g} % at t_min and {last:.1g} % at "
                f"t_max (median of {data[f'{label}.departure.{layer}'].shape[1]}; "
                f"{int(data['images'])} images)."
            )
        minima = data[f"{label}.minima"].mean()
        lines.append(
            f"- `{label}`: the last potentials have {minima:.1f} minima at t_min on average."
        )
    return lines


def _of_schedules(data: dict[str, np.ndarray]) -> list[str]:
    lines = []
    for label in map(str, data["priors"]):
        for scheme in ("predefined", "joint", "learned"):
            if f"{label}.{scheme}.psnr" not in data:
                continue
            score = data[f"{label}.{scheme}.psnr"].mean(1)
            energy = data[f"{label}.{scheme}.energy"].mean(1)
            best = int(score.argmax())
            lines.append(
                f"- `{label}`, {scheme}: PSNR {score[-1]:.2f} dB and energy {energy[-1]:.3f} nats per pixel "
                f"after {len(score) - 1} steps; highest PSNR {score[best]:.2f} dB after {best} "
                f"({int(data['images'])} images, crop {int(data['crop'])})."
            )
    return lines


def _of_attainment(data: dict[str, np.ndarray]) -> list[str]:
    lines = []
    for task in attainment.TASKS:
        rates = attainment.rate(
            data[f"{task}.energy"], data[f"{task}.first"], float(data["tolerance"])
        )
        scores = data[f"{task}.psnr"].mean(-1)
        for scheme, rate, score in zip(attainment.SCHEMES, rates, scores, strict=True):
            row, column = np.unravel_index(np.nanargmax(score), score.shape)
            lines.append(
                f"- `{data['prior']}`, {task}, {scheme}: attained by up to {rate.max():.0%} of the images; "
                f"best mean PSNR {score[row, column]:.2f} dB at t_0 = {data['t_0'][row]:.2g}, "
                f"I = {data['steps'][column]}, where the rate is {rate[row, column]:.0%} ({data['what']})."
            )
    return lines


# ---------------------------------------------------------------- the page


def write(page: Path, parts: dict[str, str]) -> Path:
    """Put the parts into the marked places of a page."""
    if not page.is_file():
        raise GncpriorError(
            f"There is no page {page}: docs/results.md of the source has the marks."
        )
    text = page.read_text("utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise GncpriorError(f"{page} has no place marked {begin} … {end}.")
        text = f"{before}{begin}\n{part}\n{end}{after}"
    write_file(page, text.encode())
    return page


def commit(folder: Path) -> str:
    """The commit that a folder stands at; empty where there is none."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
