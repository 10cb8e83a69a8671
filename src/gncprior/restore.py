r"""Restore pictures: array in, the same kind of array out.

.. code-block:: python

    x = denoise(y)                        # the noise level is estimated
    x = denoise(y, sigma=25 / 255, channel_axis=-1)
    x = inpaint(y, mask)                  # mask True = unknown

Numpy arrays and torch tensors of uint8, uint16, float16, float32 and float64 keep their kind, type,
shape and device.  σ is a standard deviation on the scale [0, 1] whatever the type: 25/255 is 25 grey
levels of a byte picture.  Pictures are (…, H, W), leading axes being a stack; with ``channel_axis`` that
axis holds colours, and of 2 or 4 channels the last is alpha, which is kept.  Three colours are restored
together by a prior for colour, where one with a schedule for the task is shipped, and else one by one.

``quality="best"`` takes the prior that scored best of those with a learned schedule; "fast" the shallowest,
which also gives a second opinion where the result of the best is in doubt (:mod:`gncprior.doubts`).
Without a learned schedule a predefined one serves: t̂ from log σ² down by 3 in 4 steps, or the one step of
Tweedie's formula; for inpainting from t̂_max to t̂_min in 60 steps, or in 30 from t = 0.1 (docs/restoring.md
says what was tried).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from gncprior.arrays import Pictures, copy_of, masks_like
from gncprior.calibration import joint_noise_level
from gncprior.checkpoints import SUFFIX, WEIGHTS, load_prior
from gncprior.doubts import overshoot_doubt, residual_doubt
from gncprior.errors import GncpriorError
from gncprior.fidelity import Denoising, Fidelity, Inpainting
from gncprior.noise_reading import Reading, load, reading_path
from gncprior.prior import Prior
from gncprior.schedules import linear, sigma_from_t_hat, t_hat_from_sigma, t_hat_from_t
from gncprior.solvers import History, solve_scheduled
from gncprior.symmetries import mean_over, turn
from gncprior.tiles import Tile, TiledEnergy, halo, tiles
from gncprior.unrolled import DENOISE, INPAINT, load_schedules

Array = TypeVar("Array", np.ndarray, Tensor)
Quality = Literal["fast", "best"]
Method = Literal["auto", "learned", "scheduled", "tweedie"]
Progress = Callable[[int, int], None]  # parts done, parts in all

TILE = 2048  # a tile of floats takes 16 MB, and the solver holds some six of them
GAUGE = "r1"  # the prior that noise levels are estimated with
TEXTURE = 0.0035  # what texture adds to a noise level on average, nearly the same at every σ
CLEARLY = 0.8  # of a doubt, that of a second opinion is at most
_ESTIMATE_TILE, _ESTIMATE_TILES = 512, 16  # more pixels make the estimate no better


def denoise(
    image: Array,
    sigma: float | None = None,
    *,
    channel_axis: int | None = None,
    data_range: float | None = None,
    quality: Quality = "best",
    prior: str | Path | Prior = "auto",
    method: Method = "auto",
    half: bool = False,
    views: int = 1,
    tile: int = TILE,
    trace: list[History] | None = None,
    progress: Progress | None = None,
) -> Array:
    """Remove Gaussian noise of standard deviation ``sigma``, on the scale [0, 1]; None estimates it.

    ``data_range`` says what stands for 1 in float pictures (default 1; values outside are legal).
    ``half`` lets the inner filters of deep priors multiply in bfloat16, where the processor has that: a
    fraction of the time, for an error far below a grey level of a byte picture.
    ``views`` of 2, 4 or 8 restore the picture turned, too, and take the mean: a little better, and as many times
    as long (:mod:`gncprior.symmetries`).
    ``tile`` is the side of the parts that are worked on, which the result does not depend on.
    ``trace`` is given the history of every part, and ``progress`` is told how many are done.
    """
    pictures = Pictures(image, channel_axis, data_range)
    if sigma is not None and not 0 < sigma < math.inf:
        raise GncpriorError(f"The noise level sigma must be positive and finite, not {sigma}.")
    result = Pictures(copy_of(image), channel_axis, data_range)
    levels: dict[tuple[int, ...], float] = {}
    for index in pictures:
        levels[index] = _estimate(pictures, index, *_gauge())[0] if sigma is None else float(sigma)

    def solve(index: tuple[int, ...], part: Tile, scheme: Scheme) -> float:
        z = pictures.read(index, part.outer)
        pictures.check_finite(index, part.outer, z)
        x = scheme.run(z, lambda z, _: Denoising(z, levels[index]), trace)
        inside = (..., *part.crop)
        result.write(index, part.inner, x[inside])
        return residual_doubt(x[inside], z[inside], levels[index])

    def schemes(index: tuple[int, ...]) -> Iterator[Scheme]:
        for model, name in _choose(prior, quality, pictures, index, DENOISE, method):
            yield _scheme(DENOISE, levels[index], model, name, quality, method, half, views)

    _each_picture(result, tile, schemes, solve, progress, trace)
    return result.array


def inpaint(
    image: Array,
    mask: Any,
    *,
    channel_axis: int | None = None,
    data_range: float | None = None,
    quality: Quality = "best",
    prior: str | Path | Prior = "auto",
    method: Method = "auto",
    half: bool = False,
    views: int = 1,
    tile: int = TILE,
    trace: list[History] | None = None,
    progress: Progress | None = None,
) -> Array:
    """Fill in the pixels where ``mask`` is True; all others come back exactly as they were.

    The mask is boolean and has the shape of the picture, or that without the channel axis, or is one
    (H, W) for a stack.  Unknown pixels may hold anything, NaN too.  The rest is as in :func:`denoise`.
    """
    pictures = Pictures(image, channel_axis, data_range)
    masks = masks_like(mask, pictures, channel_axis)[..., : pictures.colours, :, :]
    if method == "tweedie":
        raise GncpriorError("One step of Tweedie's formula denoises; choose another method.")
    result = Pictures(copy_of(image), channel_axis, data_range)
    shares = {index: float(masks[index].mean()) for index in pictures}
    if any(masks[index].all(axis=(-2, -1)).any() for index in pictures):
        raise GncpriorError("The mask marks every pixel as unknown: nothing is observed.")

    def solve(index: tuple[int, ...], part: Tile, scheme: Scheme) -> float:
        unknown = torch.from_numpy(np.array(masks[(*index, slice(None), *part.outer)]))
        if not bool(unknown[(..., *part.crop)].any()):
            return 0.0
        z = pictures.read(index, part.outer)
        unknown = unknown.to(z.device)
        pictures.check_finite(index, part.outer, z, hidden=unknown)
        z = torch.where(unknown, torch.as_tensor(scheme.fill).to(z), z)
        x, doubt = z, 0.0
        if not bool(unknown.flatten(1).all(1).any()):  # else a hole larger than the tile
            x = scheme.run(z, lambda z, turned: Inpainting(z, turned(unknown)), trace)
            doubt = overshoot_doubt(x, z, unknown)
        inside = (..., *part.crop)
        result.write(index, part.inner, x[inside], where=unknown[inside])
        return doubt

    def schemes(index: tuple[int, ...]) -> Iterator[Scheme]:
        fill = _mean_of_known(pictures, index, masks[index])
        for model, name in _choose(prior, quality, pictures, index, INPAINT, method):
            level = shares[index] or 0.5
            chosen = _scheme(INPAINT, level, model, name, quality, method, half, views)
            yield replace(chosen, fill=fill)

    _each_picture(result, tile, schemes, solve, progress, trace)
    return result.array


def estimate_sigma(
    image: Any,
    *,
    channel_axis: int | None = None,
    data_range: float | None = None,
    prior: str | Path | Prior = "auto",
) -> Any:
    """The standard deviation of the noise on the scale [0, 1]; an array for a stack of pictures.

    It is read off the terms of the energy R(y, t̂) of the prior with one layer (:mod:`gncprior.noise_reading`);
    of another prior it is where R(y, ·) has its first minimum from t̂_max downwards.
    """
    return noise_levels(image, channel_axis=channel_axis, data_range=data_range, prior=prior)[0]


def noise_levels(
    image: Any,
    *,
    channel_axis: int | None = None,
    data_range: float | None = None,
    prior: str | Path | Prior = "auto",
) -> tuple[Any, Any]:
    """The same with error bars: what the reading was off by where it was learned.

    Without one it is 1/√(∂²R/∂t̂²), and what texture is usually taken for noise.
    """
    pictures = Pictures(image, channel_axis, data_range)
    chosen = _choose(GAUGE if prior == "auto" else prior, "fast", pictures, None, DENOISE)
    model, name = next(chosen)
    reading = None if name is None else load(reading_path(name), model)
    found = np.array([_estimate(pictures, index, model, reading) for index in pictures])
    levels, errors = (found[:, k].reshape(pictures.view.shape[:-3]) for k in (0, 1))
    return (levels, errors) if levels.ndim else (float(levels), float(errors))


# ---------------------------------------------------------------- how


@dataclass(frozen=True)
class Scheme:
    """A prior, t̂ and η of every step (η = e^t̂ where None), and what unknown pixels start with."""

    model: Prior
    t_hats: Tensor
    etas: Tensor | None
    fill: Tensor | float = 0.0
    data_term: bool = True
    half: bool = False
    views: int = 1

    def run(
        self,
        z: Tensor,
        fidelity: Callable[[Tensor, Callable[[Tensor], Tensor]], Fidelity],
        trace: list[History] | None,
    ) -> Tensor:
        """The steps on a part z (C, h, w); a prior for grey takes the channels as a batch.

        ``fidelity`` is given the batch, and a function that brings what else is shaped like z into its shape.  The
        trace is that of the first view.
        """
        model = self.model

        def view(k: int) -> Tensor:
            def batched(x: Tensor) -> Tensor:
                x = turn(x, k)
                return (x[:, None] if model.architecture.channels == 1 else x[None]).to(
                    model.filters[0].device
                )

            batch = batched(z).to(model.filters[0])
            term: Fidelity = fidelity(batch, batched) if self.data_term else _NoData()
            traced = trace is not None and k == 0
            result = solve_scheduled(
                TiledEnergy(model, half=self.half),
                term,
                batch,
                self.t_hats,
                etas=self.etas,
                history=traced,
            )
            if traced and trace is not None and result.history is not None:
                trace.append(result.history)
            return result.x.flatten(0, 1)

        return mean_over(self.views, view).to(z)


class _NoData:
    """Of Tweedie's formula: the step is all there is."""

    def value(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), dtype=torch.float64, device=x.device)

    def prox(self, v: Tensor, tau: float | Tensor) -> Tensor:  # noqa: ARG002
        return v


def _scheme(
    task: str,
    level: float,
    model: Prior,
    name: str | Path | None,
    quality: Quality,
    method: Method,
    half: bool,
    views: int,
) -> Scheme:
    new = functools.partial(Scheme, half=half, views=views)
    low, high = model.t_hat_range
    file = _learned(name, task) if method in ("auto", "learned") else None
    if file is not None:
        schedules = load_schedules(file, model)
        return new(schedules.prior_at(model, level), *schedules.at(level))
    if method == "learned":
        raise GncpriorError(f"There is no learned schedule for {task} beside this prior.")
    if task == INPAINT:
        start, steps = (high, 60) if quality == "best" else (min(t_hat_from_t(0.1), high), 30)
        return new(model, linear(start, low, steps), None)
    t_hat = t_hat_from_sigma(level)
    if method == "tweedie" or (method == "auto" and quality == "fast"):
        return new(model, torch.tensor([t_hat]), torch.tensor([level**2]), data_term=False)
    start = min(max(t_hat, low), high)
    return new(model, linear(start, max(start - 3, low), 4), None)


def _learned(name: str | Path | None, task: str) -> Path | None:
    """The shortest schedule beside a prior: 30 steps gain nothing that could be measured over 10."""
    if name is None:
        return None
    path = Path(name)
    folder = path.parent if path.suffix == SUFFIX else WEIGHTS
    files = {
        int(match[1]): file
        for file in folder.glob(f"{path.stem}-{task}-*{SUFFIX}")
        if (match := re.fullmatch(rf"{re.escape(path.stem)}-{task}-(\d+)", file.stem))
    }
    if not files:
        return None
    return files[min(files)]


def _choose(
    prior: str | Path | Prior,
    quality: Quality,
    pictures: Pictures,
    index: tuple[int, ...] | None,
    task: str,
    method: Method = "auto",
) -> Iterator[tuple[Prior, str | Path | None]]:
    """The prior for a picture and, where it has one, the name by which its schedules are found.

    The choice is made for every picture of a stack: it depends on whether that one has colours.  Where it
    is left to us, the shallowest prior comes second, for an opinion on results that are in doubt.
    """
    if quality not in ("fast", "best"):
        raise GncpriorError(f'The quality is "fast" or "best", not {quality!r}.')
    if isinstance(prior, Prior):
        yield _fitting(prior, pictures), None
    elif prior != "auto":
        yield _fitting(_load(prior), pictures), prior
    else:
        seen = pictures.colours if index is None else pictures.hues(index)
        first = _best(quality, seen, task, method)
        yield _fitting(_load(first), pictures), first
        if (second := _best("fast", seen, task, method)) != first:
            yield _fitting(_load(second), pictures), second


def _fitting(model: Prior, pictures: Pictures) -> Prior:
    channels, colours = model.architecture.channels, pictures.colours
    if channels not in (1, colours):
        raise GncpriorError(
            f"This prior is for pictures of {channels} channels, not {colours}: choose another."
        )
    return model


def _best(quality: Quality, colours: int, task: str, method: Method = "auto") -> str:
    """The prior whose learned schedules for the task scored best, or the shallowest if it should be fast.

    A picture of three colours gets a prior for colour that has schedules, and where there is none a prior
    for grey, channel by channel; priors fine-tuned for the task compete with the others of their depth.
    Those that denoise do so with their learned steps only: their t is no noise level any more.
    Depth, and colour, pay only with a schedule: they make a step dear, and the few steps of a predefined
    schedule do not use them.
    """
    names = [file.stem for file in WEIGHTS.glob(f"*{SUFFIX}")]

    def known(pattern: str) -> dict[str, int]:
        """Name → depth."""
        return {n: int(match[1]) for n in names if (match := re.fullmatch(pattern, n))}

    tuned = task == INPAINT or method in ("auto", "learned")
    grey = rf"r(\d+)(?:-{task})?" if tuned else r"r(\d+)"
    for pattern in (r"r(\d+)-rgb", grey) if colours == 3 else (grey,):
        ready = {n: depth for n, depth in known(pattern).items() if _learned(n, task)}
        if quality == "fast":
            ready = {n: depth for n, depth in ready.items() if depth == min(ready.values())}
        if ready:
            return max(ready, key=lambda n: (_score(n, task), ready[n], n))
    if not (rest := known(r"r(\d+)")):
        raise GncpriorError("No prior is shipped with this version: name the file of one.")
    return min(rest, key=lambda n: rest[n])


def _score(name: str, task: str) -> float:
    """The mean PSNR over all levels that the schedules of a prior had on crops of validation images."""
    file = _learned(name, task)
    return 0.0 if file is None else _validation(file)


@functools.lru_cache(maxsize=32)
def _validation(file: Path) -> float:
    """The same of a file of schedules, read once however many pictures there are; 0 if it has no scores."""
    scores = load_schedules(file).info.get("scores", {}).values()
    values = [float(s["validation"]) for s in scores if isinstance(s, dict) and "validation" in s]
    return sum(values) / len(values) if values else 0.0


@functools.lru_cache(maxsize=8)
def _load(name: str | Path) -> Prior:
    return load_prior(name)


# ---------------------------------------------------------------- part by part


def _each_picture(
    result: Pictures,
    side: int,
    schemes: Callable[[tuple[int, ...]], Iterator[Scheme]],
    solve: Callable[[tuple[int, ...], Tile, Scheme], float],
    progress: Progress | None,
    trace: list[History] | None,
) -> None:
    """Solve every picture of the stack by its first scheme, and where that leaves doubts by its second too.

    The result of the second stays where its doubts are clearly less.
    """
    indices = list(result)
    for k, index in enumerate(indices):
        told = 0 if trace is None else len(trace)
        choice = schemes(index)
        first = next(choice)
        parts = list(tiles(result.size, side, halo(first.model, len(first.t_hats))))
        doubt = 0.0
        for j, part in enumerate(parts):
            doubt = max(doubt, solve(index, part, first))
            if progress is not None:
                progress(k * len(parts) + j + 1, len(indices) * len(parts))
        if doubt <= 1 or (second := next(choice, None)) is None:
            continue
        kept, histories = copy_of(result.view[index]), [] if trace is None else trace[told:]
        if trace is not None:
            del trace[told:]
        parts = list(tiles(result.size, side, halo(second.model, len(second.t_hats))))
        if max(solve(index, part, second) for part in parts) >= CLEARLY * doubt:
            result.view[index] = kept
            if trace is not None:
                trace[told:] = histories


def _gauge() -> tuple[Prior, Reading | None]:
    """What noise levels are estimated with."""
    model = _load(GAUGE)
    return model, load(reading_path(GAUGE), model)


def _estimate(
    pictures: Pictures, index: tuple[int, ...], model: Prior, reading: Reading | None
) -> tuple[float, float]:
    """σ and its error of one picture, from tiles spread over it and all its colours."""
    parts = list(tiles(pictures.size, _ESTIMATE_TILE, 0))
    chosen = parts[:: max(len(parts) // _ESTIMATE_TILES, 1)]
    values = []
    for part in chosen:
        z = pictures.read(index, part.outer)
        pictures.check_finite(index, part.outer, z)
        z = z.to(model.filters[0])
        values += list(z[:, None, None]) if model.architecture.channels == 1 else [z[None]]
    if reading is not None:
        t_hat, spread = reading.read(model, values)
        sigma = sigma_from_t_hat(t_hat)
        return sigma, sigma / 2 * spread
    t_hat, curvature = joint_noise_level(model, values)
    sigma = sigma_from_t_hat(t_hat)
    spread = sigma / 2 / math.sqrt(curvature) if curvature > 0 else 0.0
    return sigma, math.hypot(spread, TEXTURE)


def _mean_of_known(pictures: Pictures, index: tuple[int, ...], mask: np.ndarray) -> Tensor:
    """The mean of the known pixels of every colour, (C, 1, 1), band by band."""
    total = torch.zeros(pictures.colours, dtype=torch.float64)
    for part in tiles(pictures.size, TILE, 0):
        known = ~torch.from_numpy(np.array(mask[(slice(None), *part.outer)]))
        z = pictures.read(index, part.outer).cpu()
        total += torch.where(known, z, 0).sum((1, 2), dtype=torch.float64)
    count = (~mask).sum(axis=(-2, -1))
    return (total / torch.from_numpy(count))[:, None, None].float()
