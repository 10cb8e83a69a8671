r"""Training: one loop over steps, each of which is a pure function of the state and of its number.

Step i takes batch (seed, i), computes the gradient of the objective of :mod:`gncprior.score_matching`,
and moves the weights by AdaBelief with rates that follow a cosine; a moving average of the weights is
what is validated and what becomes the prior.  The state is weights, moments and averages, and two
counters; a run that goes on from a checkpoint repeats the same numbers to the last bit.

Under ``torchrun`` every process takes its slice of the same batch.  With means over slices g_r of
sizes b_r, Σ_r (b_r/b) g_r is the gradient of the whole batch, and all processes make the same step.
A ``chunk`` does the same one after the other in one process, to save memory.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gncprior.balance import balance
from gncprior.calibration import calibrate, centre
from gncprior.checkpoints import load_prior, save_prior
from gncprior.convexity import settle_at_t_max, steady_at_t_max
from gncprior.datasets import Dataset
from gncprior.deepening import deepened
from gncprior.errors import GncpriorError
from gncprior.gauges import Meter, one_step_psnr
from gncprior.optimizers import AdaBelief, Average, cosine, prior_groups
from gncprior.prior import Architecture, Prior
from gncprior.recipes import Recipe
from gncprior.runs import Event, RunFolder
from gncprior.score_matching import ScoreMatching
from gncprior.tails import straighten_tails
from gncprior.workers import Workers, signals

MAX_SKIPPED = 5  # steps in a row without a finite gradient
CALIBRATION_IMAGES, CALIBRATION_SIZE = 40, 256  # and pixels along an edge: enough, and quick
BALANCE_IMAGES = 200  # of the same size: what differs between images takes more of them
LARGEST = 512  # pixels along an edge of images for validation


@dataclass(frozen=True)
class Outcome:
    """How a run ended: finished, or stopped by a signal and ready to go on."""

    step: int
    scores: dict[str, float]
    prior_file: Path | None
    stopped_by: int | None = None


def architecture_of(recipe: Recipe) -> Architecture:
    """The part of a recipe that fixes the shape of the prior."""
    names = [f.name for f in dataclasses.fields(Architecture)]
    return Architecture(**{name: getattr(recipe, name) for name in names})


def _start(recipe: Recipe) -> Prior:
    """The paper's start, or that of a prior learned before, made deeper."""
    architecture = architecture_of(recipe)
    if not recipe.start:
        return Prior(architecture).start(recipe.gain, recipe.spread, recipe.seed)
    shallow = load_prior(recipe.start)
    prior = deepened(shallow, recipe.layers, fold=recipe.fold).requires_grad_(True)
    if prior.architecture != architecture:
        raise GncpriorError(
            f"The prior {recipe.start} is {prior.architecture}, the recipe wants {architecture}."
        )
    return prior


# ---------------------------------------------------------------- state


class State:
    """Weights, moments, averages, the number of the next step, and how many steps were skipped."""

    def __init__(self, recipe: Recipe, device: torch.device | str = "cpu") -> None:
        self.recipe = recipe
        self.prior = _start(recipe).to(device)
        filters, splines = prior_groups(
            self.prior, recipe.t_rates, recipe.smoothing, recipe.t_smoothing
        )
        self.params = [*filters["params"], *splines["params"]]
        self.optimizer = AdaBelief([filters, splines], weight_decay=recipe.weight_decay)
        for p in self.params:
            self.optimizer.state[p] = {"mean": torch.zeros_like(p), "spread": torch.zeros_like(p)}
        self.average = Average(self.params, recipe.average)
        self.step = self.skipped = self.skipped_in_a_row = 0

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state, to be saved or filled."""
        named: dict[str, Tensor] = {f"buffers.{n}": b for n, b in self.prior.named_buffers()}
        for k, (p, mean) in enumerate(zip(self.params, self.average.tensors, strict=True)):
            moments = self.optimizer.state[p]
            named |= {f"weights.{k}": p.data, f"average.{k}": mean}
            named |= {f"mean.{k}": moments["mean"], f"spread.{k}": moments["spread"]}
        return named

    @property
    def counters(self) -> list[int]:
        return [self.step, self.skipped, self.skipped_in_a_row]

    @counters.setter
    def counters(self, values: Sequence[int]) -> None:
        self.step, self.skipped, self.skipped_in_a_row = values
        taken = self.step - self.skipped
        self.average.updates = taken
        for group in self.optimizer.param_groups:
            group["step"] = taken

    def fill(self, tensors: dict[str, Tensor], counters: Sequence[int]) -> None:
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])
        self.counters = list(counters)

    def advance(self, gradient: Tensor) -> bool:
        """Make the step along a gradient of all parameters in one vector; skip it where not finite."""
        self.step += 1
        if not bool(gradient.isfinite().all()):
            self.skipped += 1
            self.skipped_in_a_row += 1
            return False
        self.skipped_in_a_row = 0
        parts = gradient.split([p.numel() for p in self.params])
        for p, part in zip(self.params, parts, strict=True):
            p.grad = part.view_as(p)
        factor = self.rate_factor
        rates = (self.recipe.lr_filters, self.recipe.lr_splines)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        if self.recipe.convex:
            settle_at_t_max(self.prior)
        straighten_tails(self.prior)
        self.average.update()
        return True

    @property
    def rate_factor(self) -> float:
        """Of the step made last."""
        return cosine(self.step - 1, self.recipe.steps, self.recipe.lr_end, self.recipe.warmup)

    def averaged(self) -> Prior:
        """A new prior with the averaged weights."""
        prior = Prior(self.prior.architecture).to(self.params[0].device)
        prior.load_state_dict(self.prior.state_dict())
        copies = [*prior.filters, *(s.weight for s in prior._splines())]
        self.average.copy_to(copies)
        return prior.eval().requires_grad_(False)


# ---------------------------------------------------------------- the loop


def train(
    recipe: Recipe,
    training: Dataset,
    validation: Dataset,
    out: Path | str,
    *,
    resume: bool = False,
    device: str = "cpu",
    watch: Callable[[Event], None] | None = None,
) -> Outcome:
    """Train a prior in the folder ``out``; ``watch`` hears of every step and all that is logged."""
    training, validation = training.at_least(recipe.patch), validation.cropped(LARGEST)
    with ExitStack() as stack:
        workers = stack.enter_context(Workers(device))
        run = stack.enter_context(RunFolder(out, watch)) if workers.rank == 0 else None
        received = stack.enter_context(signals())
        state = State(recipe, workers.device)
        facts = {"title": training.title, "images": len(training), "digest": training.digest()}
        if run is not None:
            _begin(run, state, facts, resume)
        counters = torch.tensor(state.counters, device=workers.device)
        workers.share([*state.tensors().values(), counters])
        state.counters = counters.tolist()
        loop = _Loop(state, training, validation, workers, run, facts)
        stopped = loop.go(received)
        if stopped is not None:
            return Outcome(state.step, {}, None, stopped)
        if run is None:
            return Outcome(state.step, {}, None)
        return loop.finish(run)


def _begin(run: RunFolder, state: State, facts: Event, resume: bool) -> None:
    """Fill the state from the run's checkpoint, or start the run."""
    if not resume and (run.checkpoints() or run.prior_file.exists()):
        raise GncpriorError(
            f"{run.folder} holds a run already: go on with --resume or choose another folder."
        )
    found = run.restore() if resume else None
    if found is not None:
        tensors, header = found
        started = Recipe().changed(header["recipe"], f"The run in {run.folder}")
        if differing := state.recipe.differing(started):
            raise GncpriorError(
                f"The run in {run.folder} was started with other values of {', '.join(differing)}: "
                "resume it with the same, or start another in a new folder."
            )
        if header["data"]["digest"] != facts["digest"]:
            raise GncpriorError(
                f"The run in {run.folder} was started with other images ({header['data']['title']})."
            )
        state.fill(tensors, header["counters"])
    run.open_log(state.step, state.recipe.tensorboard)
    run.write_recipe(state.recipe)


def calibrate_all(
    prior: Prior,
    training: Dataset,
    convex: bool,
    weight: float = 0.0,
    done: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Centre and calibrate a prior on training images, after balancing it where that has a weight.

    A prior that is ``convex`` at t_max stays so.  ``done`` is called after every image of the balance.
    """
    images = training.cropped(CALIBRATION_SIZE)

    def some(count: int) -> list[Tensor]:
        chosen = np.linspace(0, len(images) - 1, min(count, len(images))).round()
        return [images.tensor(int(k))[0] for k in chosen]

    facts: dict[str, float] = {}
    if weight:
        facts = {"balance": weight, **balance(prior, some(BALANCE_IMAGES), weight, done=done)}
        if convex:
            settle_at_t_max(prior)
            steady_at_t_max(prior)
    centre(prior)
    return facts | calibrate(prior, some(CALIBRATION_IMAGES))


class _Loop:
    """The loop's surroundings, so that the loop itself can be read."""

    def __init__(
        self, state: State, training: Dataset, validation: Dataset, workers: Workers,
        run: RunFolder | None, facts: Event,
    ) -> None:  # fmt: skip
        self.state, self.training, self.validation = state, training, validation
        self.workers, self.run, self.facts = workers, run, facts
        recipe = state.recipe
        self.objective = ScoreMatching(
            state.prior,
            t_weight=recipe.t_weight,
            t_fraction=recipe.t_fraction,
            boundary=recipe.boundary,
            explicit=recipe.explicit,
            half=recipe.half,
        )
        self.saved_at = -math.inf
        self.saved_step = -1

    def go(self, received: list[int]) -> int | None:
        """All steps that are left; the signal that ended them early, if one did."""
        state, recipe = self.state, self.state.recipe
        self._tell(
            {"event": "start", "step": state.step, "steps": recipe.steps, "data": self.facts}
        )
        self._save()  # a folder that cannot be written to is met before the work
        meter = Meter(recipe.batch)
        while state.step < recipe.steps:
            gradient, terms, stop = self._gradient(bool(received))
            if state.advance(gradient):
                meter.add(terms)
            else:
                self._skipped()
            last = state.step == recipe.steps
            if self.run is not None and self.run.watch is not None:
                self.run.watch({"event": "step", "step": state.step})
            if last or state.step % recipe.log_every == 0:
                facts = {"rate": state.rate_factor, "skipped": state.skipped}
                self._tell({"event": "progress", "step": state.step, **meter.read(), **facts})
            if recipe.validate_every and state.step % recipe.validate_every == 0 and not last:
                with meter.paused():
                    self._validate(state.averaged())
            if stop or last or time.monotonic() - self.saved_at >= recipe.save_seconds:
                self._save()
            if stop:
                self._tell({"event": "stopped", "step": state.step})
                return received[0] if received else signal.SIGTERM
        return None

    def finish(self, run: RunFolder) -> Outcome:
        """Steady, centre and calibrate the averaged weights, score them and write the prior."""
        recipe, prior = self.state.recipe, self.state.averaged()
        info: Event = {
            "recipe": dataclasses.asdict(recipe),
            "data": self.facts,
            "steps": self.state.step,
            "seed": recipe.seed,
            "skipped": self.state.skipped,
        }
        if recipe.convex:
            steady_at_t_max(prior)
        if recipe.calibrate:
            info["calibration"] = calibrate_all(prior, self.training, recipe.convex, recipe.balance)
        scores = self._validate(prior)
        info["scores"] = {"one-step PSNR, " + self.validation.title: scores}
        save_prior(run.prior_file, prior, info)
        self._tell({"event": "finished", "step": self.state.step, "file": run.prior_file.name})
        return Outcome(self.state.step, scores, run.prior_file)

    def _gradient(self, stop: bool) -> tuple[Tensor, np.ndarray, bool]:
        """The gradient of the batch, the terms of its loss, and whether any process was asked to stop."""
        state, recipe = self.state, self.state.recipe
        batch = self.training.batch(
            recipe.seed, state.step, count=recipe.batch, size=recipe.patch,
            t_hat_range=state.prior.t_hat_range, stratified=recipe.stratified,
        )  # fmt: skip
        part = self.workers.slice(recipe.batch)
        total: Tensor | None = None
        for begin in range(part.start, part.stop, recipe.chunk or recipe.batch):
            end = min(begin + (recipe.chunk or recipe.batch), part.stop)
            terms = self.objective(*(b[begin:end].to(self.workers.device) for b in batch))
            numbers = torch.tensor([terms.x, terms.t, terms.boundary], device=self.workers.device)
            grads = [p.grad.flatten() for p in state.params if p.grad is not None]
            mine = torch.cat([*grads, numbers]).mul_((end - begin) / recipe.batch)
            total = mine if total is None else total.add_(mine)
        assert total is not None
        flag = torch.full((1,), float(stop), device=self.workers.device)
        total = self.workers.sum(torch.cat([total, flag]))
        return total[:-4], total[-4:-1].double().cpu().numpy(), bool(total[-1] > 0)

    def _skipped(self) -> None:
        state = self.state
        self._tell({"event": "skipped", "step": state.step})
        if state.skipped_in_a_row >= MAX_SKIPPED:
            raise GncpriorError(
                f"The gradient was not finite in {MAX_SKIPPED} steps in a row, up to step {state.step}: "
                "use smaller learning rates."
            )

    def _validate(self, prior: Prior) -> dict[str, float]:
        if self.run is None:
            return {}
        scores = one_step_psnr(prior, self.validation)
        self._tell({"event": "validation", "step": self.state.step, **scores})
        return scores

    def _save(self) -> None:
        state = self.state
        if self.run is not None and state.step != self.saved_step:
            header = {
                "recipe": dataclasses.asdict(state.recipe),
                "data": self.facts,
                "counters": state.counters,
            }
            self.run.save(state.step, state.tensors(), header)
        self.saved_at, self.saved_step = time.monotonic(), state.step

    def _tell(self, event: Event) -> None:
        if self.run is not None:
            self.run.note(event)


# ---------------------------------------------------------------- before a run


def step_seconds(recipe: Recipe, device: str = "cpu", repeats: int = 2) -> float:
    """The time of a step, measured on noise."""
    shape = (recipe.channels, 2 * recipe.patch, 2 * recipe.patch)
    pixels = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
    noise = Dataset("noise", ("noise",), (pixels,))
    times = []
    with Workers(device) as workers:
        loop = _Loop(State(recipe, workers.device), noise, noise, workers, None, {})
        for _ in range(repeats + 1):  # the first one allocates
            begin = time.perf_counter()
            loop.state.advance(loop._gradient(False)[0])
            times.append(time.perf_counter() - begin)
    return min(times[1:])
