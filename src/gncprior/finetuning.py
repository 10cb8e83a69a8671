r"""Fine-tuning: a prior and its schedules learned together, through the unrolled steps (paper, section 4.3).

From a prior that knows images in general and schedules for several noise levels, one model is made
that denoises them all, and likewise one that inpaints from schedules for several shares of missing pixels.
Every image of a batch has one of the levels, and is restored by the schedule of that level with the same
R.  The loss is the mean of ‖x_I − x̂‖² over crops, each divided by the error that its image had at its level with
what was given: to first order it is the mean logarithm of the error of images, which is their PSNR, and all
levels count alike.  (Divided by the error of the crop instead, crops of sky would count for too much.)

Schedules of neighbouring noise levels pass through the same t̂ at different steps, and would pull the
potentials there to and fro.  Therefore images to denoise are scaled by c = 0.1/σ, after which all have the
noise of σ = 0.1, and all levels start from the schedule of 0.1.  The scale is at most 2, as features leave the
knots beyond; what noise is then missing is taken off t̂.

Where pixels are missing no data term holds x back, and steps longer than twice the inverse of the curvature
let any unevenness of a flat region grow.  As the curvature changes while a model learns to inpaint, it is
followed (:func:`gncprior.convexity.flat_curvature`), and no step gets longer than 2.5 times its inverse: some may
be too long by that much, as long as the others make up for it.

Derivatives are those of :func:`gncprior.unrolled_adjoint.squared_error`, whose memory does not depend
on the number of steps.  The first batches, and one of 32 later, are only looked at, for the natural gradient
by which filters and splines move (:mod:`gncprior.natural_gradient`); the few numbers of the schedules have
AdaBelief.  Many steps in a row may blow up a rare picture, so the gradient of every picture is shortened to
twice the usual length, in the units of the natural gradient.  A blank picture goes with every batch to denoise:
the steps should leave it as it is, and learn from photographs alone to pull at the edges of what is flat.  Rates
rise at first and then fall along a cosine, and the result is a moving average of what was passed.  Under
``torchrun`` the processes share every batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gncprior.buffers import Buffers
from gncprior.calibration import centre, set_pace
from gncprior.convexity import flat_curvature, settle_at_t_max, steady_at_t_max
from gncprior.datasets import Dataset
from gncprior.errors import GncpriorError
from gncprior.fidelity import Denoising, Inpainting
from gncprior.natural_gradient import NaturalGradient
from gncprior.optimizers import AdaBelief, Average, cosine
from gncprior.prior import Prior
from gncprior.retiming import spread_times
from gncprior.tails import straighten_tails
from gncprior.training import calibrate_all
from gncprior.unrolled import DENOISE, INPAINT, Schedules, unroll
from gncprior.unrolled_adjoint import Problem, make_problem, squared_error
from gncprior.unrolled_learning import Parameters, scores_of
from gncprior.workers import Workers

NOISE, MOST = 0.1, 2.0  # σ that images are scaled to, and the largest scale
LONGEST = 2.5  # η times the curvature of flat images, in inpainting
LOOK_EVERY = 32  # batches
MIDDLE = 128  # pixels along an edge of what tells how hard an image is
# Steps of the joint scheme with that share of pixels missing: with one layer slopes differ more between
# pictures, and on a slow way down some would come to rest.
PACE, PACE_OF_ONE_LAYER, PACE_SHARE = 60, 25, 0.8
PACE_IMAGES, PACE_SIZE = 16, 96  # what the pace is measured on
EASIEST = 0.1  # times the mean error, so that no flat image counts for all
FLAT_SIZE, FLAT_ERROR = 32, 6 / 255  # the blank picture of every batch, and what is usual for it


@dataclass(frozen=True)
class Settings:
    """Choices of a run; rates are those at its beginning."""

    steps: int = 2000
    looks: int = 40  # batches before, which nothing moves in
    batch: int = 14
    size: int = 64
    lr: float = 1e-3  # of filters and splines, where 1 were a Newton step
    lr_schedules: float = 3e-3
    lr_end: float = 0.02
    warmup: int = 30
    average: float = 0.985
    spread: bool = False  # give every step potentials of its own first
    half: bool = True  # inner filters multiply in bfloat16, where the processor has that
    seed: int = 0
    turns: tuple[float, ...] = ()  # levels in the order they take turns; none for each once

    def __post_init__(self) -> None:
        if min(self.steps, self.looks, self.batch, self.size) < 1:
            raise GncpriorError("Steps, looks, batch and size must be positive.")

    @property
    def batches(self) -> int:
        return self.looks + self.steps


@dataclass(frozen=True)
class Progress:
    """One batch: its loss, which is 1 where nothing has changed."""

    number: int
    loss: float


class FineTuning:
    """A run: call :meth:`step` for every batch, and take :meth:`result` whenever wanted."""

    def __init__(
        self,
        prior: Prior,
        schedules: Schedules,
        training: Dataset,
        settings: Settings,
        workers: Workers | None = None,
    ) -> None:
        self.settings, self.task, self.levels = settings, schedules.task, schedules.levels
        self.workers = Workers("cpu") if workers is None else workers
        self.turns = _turns(settings.turns, schedules.levels)
        self.training = training.at_least(settings.size)
        self.usual_errors = self._errors(prior, schedules)
        if self.task == DENOISE and schedules.scales is None:
            schedules = on_one_scale(schedules)
        if settings.spread:
            prior, schedules = spread_times(prior, schedules, self._middle_level())
        ones = torch.ones_like(self.levels)
        self.scales = ones if schedules.scales is None else schedules.scales
        self.prior = copy.deepcopy(prior).requires_grad_(True)
        # of scaled images, so with η times c²
        self.schedules = [
            Parameters(t_hats, c**2 * etas, prior.t_hat_range)
            for t_hats, etas, c in zip(schedules.t_hats, schedules.etas, self.scales, strict=True)
        ]
        filters, splines = list(self.prior.filters), [s.weight for s in self.prior._splines()]
        schedule = [s.free for s in self.schedules]
        # parts of splines that few images reach must not move far for one that does, and filters not at random
        # in directions that hardly matter
        self.model = NaturalGradient([*filters, *splines], [1e-2] * (len(filters) + len(splines)))
        self.schedule = AdaBelief(schedule)
        self.tensors = [*filters, *splines, *schedule]
        self.average = Average(self.tensors, settings.average)
        self.buffers = Buffers()
        self._waves: Tensor | None = None  # where flat images bend most
        self._usual = 0.0  # the length of the gradients of pictures, a moving average
        self.number = 0

    def step(self) -> Progress:
        """One batch, and one step unless it is among those that are looked at."""
        settings = self.settings
        x, noise, _ = self.training.batch(
            settings.seed, self.number, count=settings.batch, size=settings.size, t_hat_range=(0, 0)
        )
        # levels take turns, so that over the batches each meets every image
        which = self.turns[(torch.arange(settings.batch) + self.number) % len(self.turns)]
        images = self.training.order(settings.seed, self.number * settings.batch, settings.batch)
        usual = self.usual_errors[images, which] * self.scales[which] ** 2 * x[0].numel()
        step = self.number - settings.looks
        look = step < 0 or step % LOOK_EVERY == LOOK_EVERY - 1
        loss = (self._look if look else self._move)(x, noise, which, usual)
        self.number += 1
        return Progress(self.number, loss)

    def _move(self, x: Tensor, noise: Tensor, which: Tensor, usual: Tensor) -> float:
        """A step along the gradient of the loss, which is returned."""
        settings = self.settings
        total = self._total()
        for part in self._mine().split(1):
            s = which[part]
            problem = _problem(self.task, x[part], noise[part], self.levels[s], self.scales[s])
            self._add(total, problem, s, usual[part])
        if self.task == DENOISE and not self.workers.rank:
            # R is blind to a constant, so that a blank picture stands for flat ones of any brightness
            s = self.turns[self.number % len(self.turns)].view(1)
            blank = torch.zeros(1, self.training.channels, FLAT_SIZE, FLAT_SIZE)
            problem = _problem(self.task, blank, blank, self.levels[s], self.scales[s])
            self._add(total, problem, s, (FLAT_ERROR * self.scales[s]) ** 2 * blank.numel())
        loss, length, count = self._share(total)
        if not count:  # a model that blows images up would not learn any more
            self.average.copy_to([t.detach() for t in self.tensors])
            return loss
        length /= count
        self._usual += 0.05 * (length - self._usual) if self._usual else length
        step = self.number - settings.looks
        factor = cosine(step, settings.steps, settings.lr_end, settings.warmup)
        self.model.step(settings.lr * factor)
        straighten_tails(self.prior)
        self.schedule.param_groups[0]["lr"] = settings.lr_schedules * factor
        self.schedule.step()
        self.average.update()
        return loss

    def _add(self, total: Tensor, problem: Problem, s: Tensor, usual: Tensor) -> None:
        """Add to ``total`` the gradient of one picture, and its loss, the length of the gradient and one.

        A gradient of more than twice the usual length is shortened, and one that is not finite passed over.
        """
        t_hats, etas = self._zero_grad()
        times, sizes = t_hats.detach()[:, s], etas.detach()[:, s]
        errors, dt_hats, detas = squared_error(
            self.prior, problem, times, sizes, self.buffers,
            weights=1 / (usual * self.settings.batch), parameters=True, half=self.settings.half,
        )  # fmt: skip
        torch.autograd.backward([t_hats[:, s], etas[:, s]], [dt_hats, detas])
        gradients = self._gradients()
        total[-3] += float(errors / usual) / self.settings.batch
        length = self.model.length() if bool(gradients.isfinite().all()) else math.inf
        if not math.isfinite(length):
            return
        limit = 2 * self._usual if self._usual else length
        share = min(1.0, limit / length) if length else 1.0
        total[:-3] += share * gradients
        total[-2:] += torch.tensor([share * length, 1.0])

    def _look(self, x: Tensor, noise: Tensor, which: Tensor, usual: Tensor) -> float:
        """Show random residuals of one crop after the other to the natural gradient; the loss is returned."""
        settings = self.settings
        generator = torch.Generator().manual_seed((settings.seed << 32) + self.number)
        residual = torch.randn(x.shape, generator=generator) * (usual / 2).sqrt().view(-1, 1, 1, 1)
        mine, loss = self._mine(), 0.0
        # one crop of every process at a time, and as many times in each
        for k in range(-(-settings.batch // self.workers.size)):
            t_hats, etas = self._zero_grad()
            part, one = mine[k : k + 1], 0.0
            if s := which[part].tolist():
                problem = _problem(self.task, x[part], noise[part], self.levels[s], self.scales[s])
                errors, _, _ = squared_error(
                    self.prior, problem, t_hats.detach()[:, s], etas.detach()[:, s], self.buffers,
                    weights=1 / usual[part], residual=residual[part].to(x), parameters=True, half=settings.half,
                )  # fmt: skip
                one = float((errors / usual[part]).sum()) / settings.batch
            total = self._total()
            total[:-3] = self._gradients()
            total[-3:] = torch.tensor([one, 0.0, len(part)])
            one, _, crops = self._share(total)
            loss += one
            for tensor in self.tensors:  # second moments are those of a mean over crops
                if tensor.grad is not None:
                    tensor.grad /= crops**0.5
            self.model.look()
        return loss

    def _mine(self) -> Tensor:
        """Numbers of the crops of a batch that are this process's."""
        mine = self.workers.slice(self.settings.batch)
        return torch.arange(mine.start, mine.stop)

    def _zero_grad(self) -> tuple[Tensor, Tensor]:
        """Forget all gradients; t̂ and η of the schedules, (I, S)."""
        for tensor in self.tensors:
            tensor.grad = None
        t_hats, etas, self._waves = self._schedules(self.prior, self.schedules)
        return t_hats.T, etas.T

    def result(self) -> tuple[Prior, Schedules]:
        """The averaged model, with potentials centred as after training, and its schedules."""
        prior = copy.deepcopy(self.prior).requires_grad_(False)
        schedules = copy.deepcopy(self.schedules)
        splines = [s.weight for s in prior._splines()]
        self.average.copy_to([*prior.filters, *splines, *(s.free.detach() for s in schedules)])
        centre(prior)
        with torch.no_grad():
            t_hats, etas, _ = self._schedules(prior, schedules, 30)
        etas = etas / self.scales[:, None] ** 2
        scales = None if bool((self.scales == 1).all()) else self.scales
        return prior.eval(), Schedules(self.task, self.levels, t_hats, etas, scales=scales)

    def _schedules(
        self, prior: Prior, schedules: Sequence[Parameters], products: int = 2
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """t̂ and η (S, I), and where flat images bend most: steps of inpainting are short enough for these."""
        pairs = [s.schedule() for s in schedules]
        t_hats, etas = (torch.stack(s) for s in zip(*pairs, strict=True))
        if self.task != INPAINT:
            return t_hats, etas, None
        times = t_hats.detach().flatten()
        curvature, waves = flat_curvature(prior, times, products, self._waves)
        return t_hats, torch.minimum(etas, LONGEST / curvature.view_as(etas)), waves

    def _total(self) -> Tensor:
        """Zeros for all gradients and three numbers more, which the processes add up."""
        return torch.zeros(sum(t.numel() for t in self.tensors) + 3, dtype=torch.float64)

    def _gradients(self) -> Tensor:
        grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in self.tensors]
        return torch.cat([g.double().flatten() for g in grads])

    def _share(self, total: Tensor) -> tuple[float, float, float]:
        """Let ``total``, added up over the processes, be the gradients; its last three numbers are returned."""
        *grads, last = self.workers.sum(total).split([*(t.numel() for t in self.tensors), 3])
        for tensor, grad in zip(self.tensors, grads, strict=True):
            tensor.grad = grad.view_as(tensor).to(tensor.dtype)
        loss, length, count = last.tolist()
        return loss, length, count

    def _middle_level(self) -> float:
        return float(self.levels[len(self.levels) // 2])

    def _errors(self, prior: Prior, schedules: Schedules) -> Tensor:
        """The mean squared error of every image at every level, (images, S).

        How hard an image is beside others is measured in its middle and at the middle level only.
        """
        scores = scores_of(prior, self.training, schedules, self.settings.size, count=16)
        errors = 10 ** (-torch.tensor(list(scores.values()), dtype=torch.float64) / 10)
        level = self._middle_level()
        energy, schedule = schedules.prior_at(prior, level), schedules.at(level)
        generator = torch.Generator().manual_seed(self.settings.seed)
        middles = self.training.cropped(MIDDLE)
        found = []
        for k in range(len(middles)):
            problem = make_problem(self.task, level, middles.tensor(k), generator)
            x = unroll(energy, problem.fidelity, problem.x0, schedule)
            found.append(float((x - problem.target).square().mean(dtype=torch.float64)))
        hardness = torch.tensor(found, dtype=torch.float64)
        hardness = (hardness / hardness.mean()).clamp(min=EASIEST)
        return hardness[:, None] * errors


def _turns(turns: Sequence[float], levels: Tensor) -> Tensor:
    """Which of the levels (S,) comes when; a level that is named more often counts for more."""
    if not turns:
        return torch.arange(len(levels))
    away = (torch.tensor(turns, dtype=torch.float64)[:, None] / levels.double() - 1).abs()
    if bool((away.amin(1) > 1e-5).any()):  # files hold levels with so many digits
        known = ", ".join(f"{level:.4g}" for level in levels.tolist())
        raise GncpriorError(f"The schedules to start from have the levels {known} and no others.")
    return away.argmin(1)


def on_one_scale(schedules: Schedules) -> Schedules:
    """Scales c = min(0.1/σ, 2), and for every level the schedule of σ = 0.1 rescaled to the noise cσ."""
    t_hats, etas = schedules.unscaled(NOISE)
    scales = (NOISE / schedules.levels.double()).clamp(max=MOST)
    variance = schedules.levels.double()[:, None].square() / NOISE**2
    shift = (variance * scales[:, None] ** 2).log()  # 0 where c = 0.1/σ
    return Schedules(
        schedules.task, schedules.levels, t_hats + shift, etas * variance, scales=scales
    )


def fine_tune(
    prior: Prior,
    schedules: Schedules,
    training: Dataset,
    settings: Settings,
    *,
    workers: Workers | None = None,
    save: Callable[[Prior, Schedules], None] | None = None,
    save_every: int = 200,
    callback: Callable[[Progress], None] | None = None,
) -> tuple[Prior, Schedules]:
    """All batches of a run; ``save`` gets what there is from time to time, and the result at the end.

    The result is convex at t_max and calibrated in t̂, as after training, or has a pace for inpainting, so that
    the joint scheme works with it.  Of several processes the first one saves.
    """
    run = FineTuning(prior, schedules, training, settings, workers)
    if run.workers.rank:
        save = None
    while run.number < settings.batches:
        progress = run.step()
        if callback is not None:
            callback(progress)
        if save is not None and run.number % save_every == 0:
            save(*run.result())
    tuned, learned = run.result()
    complete(tuned, training, learned.task)
    if save is not None:
        save(tuned, learned)
    return tuned, learned


def complete(prior: Prior, training: Dataset, task: str) -> dict[str, float]:
    """Make a fine-tuned prior convex at t_max, and calibrate it or set its pace; see :func:`fine_tune`."""
    settle_at_t_max(prior)
    steady_at_t_max(prior)
    straighten_tails(prior)
    if task == DENOISE:
        return calibrate_all(prior, training, convex=True)
    centre(prior)
    images = training.cropped(PACE_SIZE)
    generator = torch.Generator().manual_seed(0)
    problems = []
    for k in range(0, len(images), -(-len(images) // PACE_IMAGES)):
        problem = make_problem(task, PACE_SHARE, images.tensor(k), generator)
        problems.append((problem.fidelity, problem.x0))
    return set_pace(prior, problems, PACE if prior.architecture.layers > 1 else PACE_OF_ONE_LAYER)


def _problem(task: str, x: Tensor, noise: Tensor, levels: Tensor, scales: Tensor) -> Problem:
    """Images with noise of σ, or with that share of pixels missing: those where the noise is least.

    All are scaled by c.
    """
    levels, scales = (v.to(x).view(-1, 1, 1, 1) for v in (levels, scales))
    x = x * scales
    if task == DENOISE:
        sigma = levels * scales
        z = torch.addcmul(x, noise, sigma)
        return Problem(x, Denoising(z, sigma), z)
    inpainting = Inpainting(x, noise < torch.special.ndtri(levels))
    return Problem(x, inpainting, inpainting.start())
