"""What a training run is made of: one frozen record, read from TOML, with flags on top.

A recipe file names the fields it sets; the rest keep the values below.  The package brings some in
``recipes/``.  This module needs the standard library only, so that the command can build its flags,
with their help, from the fields.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gncprior.errors import GncpriorError

FOLDER = Path(__file__).parent / "recipes"
MODEL, LEARNING, RUN = "The prior", "Learning", "The run"


def _option(default: Any, group: str, text: str) -> Any:
    return field(default=default, metadata={"group": group, "help": text})


@dataclass(frozen=True)
class Recipe:
    """All choices of a training run.  Fields of the group ``The run`` do not change its result."""

    layers: int = _option(1, MODEL, "Layers L of the prior, 1 or more.")
    channels: int = _option(1, MODEL, "1 for grey images, 3 for colour.")
    filters: int = _option(48, MODEL, "Filters per layer.")
    first_size: int = _option(7, MODEL, "Pixels along an edge of the first filters.")
    inner_size: int = _option(3, MODEL, "Pixels along an edge of the filters of further layers.")
    x_knots: int = _option(63, MODEL, "Knots of the potentials in the feature.")
    x_range: float = _option(3.5, MODEL, "Knots span features in [-x_range, x_range].")
    t_knots: int = _option(13, MODEL, "Knots of the potentials in log t.")
    t_min: float = _option(1e-4, MODEL, "Smallest smoothing variance t.")
    t_max: float = _option(1.0, MODEL, "Largest smoothing variance t, 0.25 or more.")
    scaled: bool = _option(False, MODEL, "The variant with features divided by √(s²+t).")

    patch: int = _option(64, LEARNING, "Pixels along an edge of a patch.")
    batch: int = _option(32, LEARNING, "Patches per step, over all processes.")
    chunk: int = _option(0, LEARNING, "Patches computed at once, to save memory; 0 for all.")
    steps: int = _option(20_000, LEARNING, "Steps of the optimizer.")
    lr_filters: float = _option(1e-3, LEARNING, "Learning rate of the filters at the start.")
    lr_splines: float = _option(1e-3, LEARNING, "Learning rate of the potentials at the start.")
    t_rates: bool = _option(
        True, LEARNING, "Rates of the last potentials fall with t, as 1/(1 + 100 t)."
    )
    smoothing: float = _option(
        0.0, LEARNING, "κ ≥ 0: steps of the potentials pass through (1 + κDᵀD)⁻¹ over the knots."
    )
    t_smoothing: float = _option(0.0, LEARNING, "The same over the knots in log t.")
    lr_end: float = _option(
        0.05, LEARNING, "Learning rates at the end, as a part of those at the start."
    )
    warmup: int = _option(0, LEARNING, "Steps over which learning rates rise from 0.")
    weight_decay: float = _option(0.0, LEARNING, "Decoupled decay of all weights.")
    average: float = _option(0.999, LEARNING, "Decay of the moving average of weights, in [0, 1).")
    t_weight: float = _option(1.0, LEARNING, "Weight of the term in t, in multiples of 1/d.")
    t_fraction: float = _option(1.0, LEARNING, "Part of the batch for the term in t, in (0, 1].")
    boundary: bool = _option(False, LEARNING, "Add the boundary term of the term in t.")
    explicit: bool = _option(
        False, LEARNING, "The term in t by regression on the noise that was added."
    )
    stratified: bool = _option(
        True, LEARNING, "One log t in each of as many equal strata as patches."
    )
    start: str = _option(
        "", LEARNING, "Prior, by name or file, of as many layers or fewer, to start from."
    )
    fold: bool = _option(
        False, LEARNING, "The layer that is new after such a start sees magnitudes: faster."
    )
    gain: float = _option(5.0, LEARNING, "Norm of the first filters at the start.")
    spread: float = _option(0.04, LEARNING, "s of the scaled variant, in units of the image.")
    convex: bool = _option(
        False,
        LEARNING,
        "Keep the energy convex at t_max: parabolas in the last layer, lines before.",
    )
    half: bool = _option(
        False, LEARNING, "Inner filters multiply in bfloat16, where the processor can: faster."
    )
    calibrate: bool = _option(True, LEARNING, "Calibrate the energy in t after the last step.")
    balance: float = _option(
        0.0,
        LEARNING,
        "Before that, weight of slopes in t that differ between pictures; 0 for none.",
    )
    seed: int = _option(0, LEARNING, "Seed of the start and of all batches, 0 or more.")

    validate_every: int = _option(1000, RUN, "Steps between validations; 0 for one at the end.")
    log_every: int = _option(50, RUN, "Steps between lines of the log.")
    save_seconds: float = _option(60.0, RUN, "Seconds between checkpoints.")
    tensorboard: bool = _option(True, RUN, "Write for TensorBoard too, if it is installed.")

    def __post_init__(self) -> None:
        for f in fields(self):
            value: Any = getattr(self, f.name)
            kind = type(f.default)
            right = type(value) is kind
            if kind is float and type(value) is int:
                object.__setattr__(self, f.name, float(value))
            elif not right or (kind is not str and not math.isfinite(value)):
                words = {
                    int: "a whole number",
                    float: "a number",
                    bool: "true or false",
                    str: "text",
                }
                raise GncpriorError(f"{f.name} must be {words[kind]}, not {value!r}.")
        positive = ("patch", "batch", "steps", "log_every", "gain")
        not_negative = ("lr_filters", "lr_splines", "lr_end", "warmup", "weight_decay", "t_weight",
                        "smoothing", "t_smoothing", "spread", "balance", "seed", "chunk", "validate_every",
                        "save_seconds")  # fmt: skip
        for name in positive + not_negative:
            value = getattr(self, name)
            if value < 0 or (name in positive and value == 0):
                bound = "positive" if name in positive else "0 or more"
                raise GncpriorError(f"{name} must be {bound}, not {value}.")
        if self.channels not in (1, 3):
            raise GncpriorError(f"channels must be 1 (grey) or 3 (colour), not {self.channels}.")
        if self.boundary and self.explicit:
            raise GncpriorError("The explicit term in t has no boundary term: give one of the two.")
        if self.fold and not self.start:
            raise GncpriorError("fold needs a prior to start from: give start as well.")
        if not (0 <= self.average < 1 and 0 < self.t_fraction <= 1):
            raise GncpriorError("average must be in [0, 1) and t_fraction in (0, 1].")

    def changed(self, values: Mapping[str, Any], source: str) -> Recipe:
        """With other values, checked; ``source`` says where they are from if one is wrong."""
        known = [f.name for f in fields(self)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else "."
                raise GncpriorError(f"{source} sets {name}, which no recipe has{hint}")
        try:
            return replace(self, **values)
        except GncpriorError as error:
            raise GncpriorError(f"{source}: {error}") from None

    def differing(self, other: Recipe) -> list[str]:
        """The names of fields that differ and change what is learned."""
        return [
            f.name
            for f in fields(self)
            if f.metadata["group"] != RUN and getattr(self, f.name) != getattr(other, f.name)
        ]

    def to_toml(self) -> str:
        """All fields, in their groups."""
        lines, group = [], ""
        for f in fields(self):
            if f.metadata["group"] != group:
                group = f.metadata["group"]
                lines.append(f"# {group}")
            lines.append(f"{f.name} = {json.dumps(getattr(self, f.name))}")
        return "\n".join(lines) + "\n"


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def read_recipe(name_or_path: str | Path) -> Recipe:
    """A recipe of the package by name, or one from a TOML file."""
    path = Path(name_or_path)
    if not path.suffix:
        path = FOLDER / f"{name_or_path}.toml"
        if not path.is_file():
            known = recipe_names()
            close = difflib.get_close_matches(str(name_or_path), known, n=1)
            hint = f"did you mean {close[0]}?" if close else "or name a file that ends in .toml."
            raise GncpriorError(
                f"There is no recipe {name_or_path}: known are {', '.join(known)}; {hint}"
            )
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise GncpriorError(f"Cannot read the recipe {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise GncpriorError(f"The recipe {path} is not TOML: {error}.") from error
    return Recipe().changed(values, str(path))
