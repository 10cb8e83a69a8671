"""How a benchmark measures: ratios of things that run in turn in one process, medians over repeats.

A program here calls :func:`main` with a function that yields :class:`Row`; the rows are printed as a
table and written to out/bench/<name>.json.  Only ratios are meant to be compared between machines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gncprior.native import kernels

FOLDER = Path(__file__).parents[1] / "out" / "bench"
QUIET = 0.5  # load average above which other programs disturb
SAMPLE = 0.05  # seconds that a sample lasts at least

Job = Callable[[], object]


@dataclass
class Row:
    """One result: a number with its quartiles, and the target it is held against, if any."""

    what: str
    value: float
    low: float
    high: float
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return f"≥ {self.at_least:g}" if self.at_least is not None else ""

    @property
    def met(self) -> str:
        if not self.target:
            return ""
        good = (
            self.value <= self.at_most
            if self.at_most is not None
            else self.value >= (self.at_least or 0)
        )
        return "met" if good else "MISSED"


@dataclass
class Setting:
    """What the command line asks for: quick runs use small arrays and few repeats."""

    quick: bool
    repeats: int
    threads: int


def seconds(job: Job, times: int = 1) -> float:
    """Of one call, the mean of ``times``."""
    start = time.perf_counter()
    for _ in range(times):
        job()
    return (time.perf_counter() - start) / times


def in_turn(jobs: list[Job], repeats: int) -> list[list[float]]:
    """Seconds of every job in every repeat: A B C A B C …, so that a slow moment hits all alike."""
    times = []
    for job in jobs:
        job()  # memory and caches
        times.append(max(1, round(SAMPLE / seconds(job))))
    rounds = [[seconds(job, n) for job, n in zip(jobs, times, strict=True)] for _ in range(repeats)]
    return [list(column) for column in zip(*rounds, strict=True)]


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def ratio(what: str, job: Job, other: Job, setting: Setting, factor: float = 1.0, **target) -> Row:
    """factor · time of job / time of other, with the times of both as a note."""
    mine, theirs = in_turn([job, other], setting.repeats)
    numbers = spread([factor * a / b for a, b in zip(mine, theirs, strict=True)])
    note = f"{milliseconds(mine)} against {milliseconds(theirs)}"
    return Row(what, *numbers, note=note, **target)


def milliseconds(samples: list[float]) -> str:
    return f"{1e3 * statistics.median(samples):.3g} ms"


def main(name: str, measure: Callable[[Setting], Iterator[Row]]) -> None:
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small arrays, three repeats: does it run?"
    )
    parser.add_argument(
        "--repeats", type=int, default=0, help="samples of every number (default 15)"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of kernels and torch")
    options = parser.parse_args()
    repeats = options.repeats or (3 if options.quick else 15)
    setting = Setting(options.quick, repeats, options.threads)
    torch.set_num_threads(setting.threads)
    load = os.getloadavg()[0]
    print(
        f"{kernels.variant()} kernels, {setting.threads} threads, torch {torch.__version__}, load {load:.2f}"
    )
    if load > QUIET:
        print(f"Warning: the machine is busy (load above {QUIET}); these numbers mean little.")
    if setting.quick:
        print("Warning: a quick run uses small arrays; it says nothing about the targets.")
    print(f"{'what':<58} {'median':>8} {'quartiles':>17} {'target':>8}")
    rows = []
    for row in measure(setting):
        if setting.quick:
            row.at_most = row.at_least = None
        rows.append(asdict(row) | {"met": row.met})
        quartiles = f"{row.low:.3g} – {row.high:.3g}"
        print(
            f"{row.what:<58} {row.value:>8.3g} {quartiles:>17} {row.target:>8} {row.met:<6} {row.note}",
            flush=True,
        )
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "kernels": kernels.variant(),
        "torch": torch.__version__,
        "load": load,
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / f"{name}.json"
    report = {"machine": machine, "setting": asdict(setting), "rows": rows}
    file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"Written to {file.relative_to(FOLDER.parents[1])}.")
