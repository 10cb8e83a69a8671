r"""Learning a schedule: minimise ‖x_I − x̂‖² over t̂_i and η_i (paper, section 4.3).

The 2I parameters are free numbers a_i, b_i:

    t̂_i = t̂_min + (t̂_max − t̂_min)·sigmoid(a_i),    η_i = exp(t̂_i + b_i),

so t̂ stays in its range, η stays positive, and a change of t̂_i takes the step size e^t̂_i along.
Inpainting has η_i = e^t̂_i·r·sigmoid(b_i).  Where nothing is observed no data term holds x back, and steps of more
than twice the curvature's inverse blow up any unevenness of a flat region.  There the curvature of noise is 1/t,
and that of a prior with two layers was found to be up to 2.3/t: r is 1.8 for one layer and 1.2 for more.
Derivatives are those of :mod:`gncprior.unrolled_adjoint`.

So few parameters need few images, and the set of crops is fixed.  The loss is then a smooth function, and
L-BFGS finds its minimum in some tens of evaluations.  Its derivatives may be off by some thousandths where
inner filters multiply in bfloat16, the loss itself is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gncprior.buffers import Buffers
from gncprior.datasets import Dataset
from gncprior.errors import GncpriorError
from gncprior.prior import Prior
from gncprior.unrolled import DENOISE, Schedules, unroll
from gncprior.unrolled_adjoint import Problem, crops, squared_error

HELD_OUT = 32  # crops of validation images, the same for all that is to be compared
_EDGE = 0.03  # of the range of t̂; closer to its ends the sigmoid is flat and learning slow


class Parameters:
    """The 2I free numbers, as one tensor (2, I).  ``longest`` is r of inpainting; without it η is free."""

    def __init__(
        self,
        t_hats: Tensor,
        etas: Tensor,
        t_hat_range: tuple[float, float],
        longest: float | None = None,
    ) -> None:
        self.low, self.high = t_hat_range
        self.longest = longest
        share = (t_hats.double() - self.low) / (self.high - self.low)
        a = torch.logit(share.clamp(_EDGE, 1 - _EDGE))
        b = etas.double().log() - t_hats.double().clamp(self.low, self.high)
        if longest is not None:
            b = torch.logit((b.exp() / longest).clamp(0.01, 0.9))
        self.free = torch.stack([a, b]).requires_grad_()

    def schedule(self) -> tuple[Tensor, Tensor]:
        a, b = self.free
        t_hats = self.low + (self.high - self.low) * a.sigmoid()
        if self.longest is not None:
            return t_hats, t_hats.exp() * self.longest * b.sigmoid()
        return t_hats, (t_hats + b).exp()


def start_schedule(
    task: str, level: float, steps: int, t_hat_range: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Where learning starts: t̂ from log σ² down by 3; for inpainting from log 0.1 down to t̂_min."""
    low, high = t_hat_range
    edge = _EDGE * (high - low)
    noise = 2 * math.log(level)
    first, last = (noise, noise - 3) if task == DENOISE else (math.log(0.1), low)
    t_hats = torch.linspace(first, last, steps, dtype=torch.float64).clamp(low + edge, high - edge)
    ratio = torch.full_like(t_hats, 0.5 if task == DENOISE else 1.2)  # η_i/e^t̂_i
    if task == DENOISE:
        ratio[-1] = 1.0
    return t_hats, ratio * t_hats.exp()


def stretch(schedule: tuple[Tensor, Tensor], steps: int) -> tuple[Tensor, Tensor]:
    """A schedule with another number of steps that covers the same way: a start for learning it."""
    t_hats, etas = (s.double() for s in schedule)
    old = torch.linspace(0, 1, len(t_hats), dtype=torch.float64)
    new = torch.linspace(0, 1, steps, dtype=torch.float64)
    right = torch.searchsorted(old, new).clamp(1, len(old) - 1)
    share = (new - old[right - 1]) / (old[right] - old[right - 1])
    ratio = etas.log() - t_hats  # log η_i/e^t̂_i

    def resample(y: Tensor) -> Tensor:
        return torch.lerp(y[right - 1], y[right], share)

    t_hats, ratio = resample(t_hats), resample(ratio)
    return t_hats, (t_hats + ratio - math.log(max(1.0, steps / len(old)))).exp()


@dataclass(frozen=True)
class Progress:
    """One evaluation of the loss."""

    evaluation: int
    psnr: float  # −10 log10 of the mean squared error of all crops


def learn_schedule(
    prior: Prior,
    problems: Sequence[Problem],
    start: tuple[Tensor, Tensor],
    *,
    evaluations: int = 40,
    longest: float | None = None,
    callback: Callable[[Progress], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """t̂ and η, each (I,), that minimise the squared error on all crops, from ``start``.

    By L-BFGS; the best that was met is returned.  ``longest`` bounds η_i/e^t̂_i.
    """
    if not problems or evaluations < 1:
        raise GncpriorError("Learning a schedule needs images and at least one evaluation.")
    parameters = Parameters(*start, prior.t_hat_range, longest)
    pixels = sum(p.target.numel() for p in problems)
    buffers = Buffers()
    best = math.inf, parameters.free.detach().clone()
    count = 0

    def closure() -> float:
        """10 log10 of the mean squared error: the same minimiser, in dB."""
        nonlocal best, count
        t_hats, etas = parameters.schedule()
        loss, dt_hats, detas = 0.0, torch.zeros_like(t_hats), torch.zeros_like(etas)
        for problem in problems:
            errors, dt, de = squared_error(
                prior, problem, t_hats.detach(), etas.detach(), buffers, half=True
            )
            loss += float(errors.sum())
            dt_hats += dt.sum(1)
            detas += de.sum(1)
        decibels = 10 * math.log10(loss / pixels) if math.isfinite(loss) else math.inf
        scale = 10 / (math.log(10) * loss)
        parameters.free.grad = None
        torch.autograd.backward([t_hats, etas], [scale * dt_hats, scale * detas])
        if decibels < best[0]:
            best = decibels, parameters.free.detach().clone()
        count += 1
        if callback is not None:
            callback(Progress(count, -decibels))
        return decibels

    optimizer = torch.optim.LBFGS(
        [parameters.free],
        max_iter=evaluations,
        max_eval=evaluations,
        history_size=20,
        tolerance_grad=1e-4,
        tolerance_change=1e-5,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(closure)
    with torch.no_grad():
        parameters.free.copy_(best[1])
        return parameters.schedule()


def learn_schedules(
    prior: Prior,
    training: Dataset,
    validation: Dataset,
    task: str,
    levels: Sequence[float],
    *,
    steps: int,
    count: int = 64,
    size: int = 64,
    evaluations: int = 40,
    seed: int = 0,
    start: Schedules | None = None,
    save: Callable[[Schedules], None] | None = None,
    callback: Callable[[float, Progress], None] | None = None,
) -> Schedules:
    """Schedules for several levels, each learned on ``count`` crops, from the one of the level before.

    ``start``, which may have another number of steps, is taken instead where given.  ``save`` is told
    of what there is after every level.  ``info["scores"]`` holds the PSNR of all crops together, of
    training and of validation, in dB.
    """
    learned: list[tuple[Tensor, Tensor]] = []
    scores: dict[str, dict[str, float]] = {}
    result: Schedules | None = None
    ordered = sorted(levels)
    for number, level in enumerate(ordered, 1):
        problems = crops(training, task, level, count=count, size=size, seed=seed)
        held_out = crops(validation, task, level, count=HELD_OUT, size=size)
        before = _first_schedule(prior, task, level, steps, start or result)
        tell = None if callback is None else (lambda p, level=level: callback(level, p))
        found = learn_schedule(
            prior,
            problems,
            before,
            evaluations=evaluations,
            longest=_longest(task, prior.architecture.layers),
            callback=tell,
        )
        learned.append(found)
        scores[f"{level:.6g}"] = {
            "training": mean_psnr(prior, problems, learned[-1]),
            "validation": mean_psnr(prior, held_out, learned[-1]),
            "validation before": mean_psnr(prior, held_out, before),
        }
        info = {"scores": scores, "crops": count, "size": size, "seed": seed}
        t_hats, etas = (torch.stack(s) for s in zip(*learned, strict=True))
        done = torch.tensor(ordered[:number], dtype=torch.float64)
        result = Schedules(task, done, t_hats, etas, info)
        if save is not None:
            save(result)
    if result is None:
        raise GncpriorError("Name at least one level to learn a schedule for.")
    return result


def mean_psnr(prior: Prior, problems: Sequence[Problem], schedule: tuple[Tensor, Tensor]) -> float:
    """−10 log10 of the mean squared error of all images after the unrolled steps."""
    loss = 0.0
    for p in problems:
        x = unroll(prior, p.fidelity, p.x0, schedule)
        loss += float((x - p.target).square().sum(dtype=torch.float64))
    return -10 * math.log10(loss / sum(p.target.numel() for p in problems))


def scores_of(
    prior: Prior, images: Dataset, schedules: Schedules, size: int = 64, count: int = HELD_OUT
) -> dict[str, float]:
    """The PSNR of crops of images together, for every level."""

    def score(level: float) -> float:
        held_out = crops(images, schedules.task, level, count=count, size=size)
        return mean_psnr(schedules.prior_at(prior, level), held_out, schedules.at(level))

    return {f"{level:.6g}": score(level) for level in schedules.levels.tolist()}


def _longest(task: str, layers: int) -> float | None:
    """r, the bound of η_i/e^t̂_i, where there is one."""
    if task == DENOISE:
        return None
    return 1.8 if layers == 1 else 1.2


def _first_schedule(
    prior: Prior, task: str, level: float, steps: int, known: Schedules | None
) -> tuple[Tensor, Tensor]:
    if known is None:
        return start_schedule(task, level, steps, prior.t_hat_range)
    t_hats, etas = known.unscaled(level)
    return (t_hats, etas) if len(t_hats) == steps else stretch((t_hats, etas), steps)
