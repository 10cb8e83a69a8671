r"""Learning a schedule: minimise ‖x_I − x̂‖² over t̂_i and η_i (paper, section 4.3).

The 2I parameters are free numbers a_i, b_i:

    t̂_i = t̂_min + (t̂_max − t̂_min)·sigmoid(a_i),    η_i = exp(t̂_i + b_i),

so t̂ stays in its range, η stays positive, and a change of t̂_i takes the step size e^t̂_i along.

Back-propagation through the steps is written out.  Let w_i = x_{i−1} − η_i g_i, g_i = ∇R(x_{i−1},t̂_i),
and v = ∂loss/∂x_i.  Through x_i = prox_{η_iD}(w_i) it becomes w̄ = (∂prox/∂w)ᵀv; then

    ∂loss/∂η_i = ⟨v, ∂prox/∂η⟩ − ⟨w̄, g_i⟩,
    ∂loss/∂t̂_i = −η_i ⟨w̄, ∂_t̂∇R⟩,
    ∂loss/∂x_{i−1} = w̄ − η_i ∇²R w̄,

with the two answers of :mod:`gncprior.sensitivities`.  Only the images x_i and g_i are kept, so memory
does not depend on the features: R_3 with 30 steps takes little more than R_3 with one.

So few parameters need few images, and the set of crops is fixed: the loss is a smooth function, and
L-BFGS finds its minimum in some tens of evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gncprior.buffers import Buffers
from gncprior.datasets import Dataset
from gncprior.errors import GncpriorError
from gncprior.fidelity import Denoising, Fidelity, Inpainting
from gncprior.prior import Prior
from gncprior.sensitivities import gradient_adjoint
from gncprior.unrolled import DENOISE


class SmoothFidelity(Fidelity, Protocol):
    """A data term whose prox can be differentiated."""

    def prox_adjoint(self, x: Tensor, tau: float | Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """For x = prox_{τD}(v): (∂x/∂v)ᵀw, and ⟨∂x/∂τ, w⟩ per image."""
        ...


@dataclass(frozen=True)
class Problem:
    """Images x̂ and what was seen of them."""

    target: Tensor
    fidelity: SmoothFidelity
    x0: Tensor


def make_problem(task: str, level: float, x: Tensor, generator: torch.Generator) -> Problem:
    """Degrade images: noise of standard deviation ``level``, or that share of pixels missing."""
    if task == DENOISE:
        z = x + level * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return Problem(x, Denoising(z, level), z)
    mask = torch.rand(x.shape, generator=generator, dtype=x.dtype) < level
    z = x.masked_fill(mask, 0)
    return Problem(x, Inpainting(z, mask), z)


def crops(
    dataset: Dataset,
    task: str,
    level: float,
    *,
    count: int,
    size: int,
    seed: int = 0,
    chunk: int = 8,
) -> list[Problem]:
    """The fixed set to learn from: ``count`` crops of size × size, a few at a time to stay in cache."""
    x, _, _ = dataset.at_least(size).batch(seed, 0, count=count, size=size, t_hat_range=(0.0, 0.0))
    generator = torch.Generator().manual_seed(seed)
    return [make_problem(task, level, part, generator) for part in x.split(chunk)]


# ---------------------------------------------------------------- the loss and its gradient


@torch.no_grad()
def squared_error(
    prior: Prior, problem: Problem, t_hats: Tensor, etas: Tensor, buffers: Buffers
) -> tuple[float, Tensor, Tensor]:
    """Σ‖x_I − x̂‖² over the images, and its derivatives in t̂ and η, each (I,) in float64."""
    x, fidelity = problem.x0, problem.fidelity
    times = t_hats.to(x)[:, None].expand(-1, len(x))
    sizes = etas.tolist()
    points, slopes = [x], []
    for t_hat, eta in zip(times, sizes, strict=True):
        slopes.append(prior.grad(x, t_hat, buffers=buffers).clone())
        x = fidelity.prox(torch.add(x, slopes[-1], alpha=-eta), eta)
        points.append(x)
    v = x - problem.target
    loss = float(v.square().sum(dtype=torch.float64))
    v = 2 * v
    dt_hats = torch.zeros(len(sizes), dtype=torch.float64)
    detas = torch.zeros_like(dt_hats)
    for i in reversed(range(len(sizes))):
        v, deta = fidelity.prox_adjoint(points[i + 1], sizes[i], v)
        detas[i] = deta.sum() - (v * slopes[i]).sum(dtype=torch.float64)
        hv, mixed = gradient_adjoint(prior, points[i], times[i], v, buffers=buffers)
        dt_hats[i] = -sizes[i] * mixed.sum()
        v = v - sizes[i] * hv
    return loss, dt_hats, detas


class Parameters:
    """The 2I free numbers, as one tensor (2, I)."""

    def __init__(self, t_hats: Tensor, etas: Tensor, t_hat_range: tuple[float, float]) -> None:
        self.low, self.high = t_hat_range
        share = (t_hats.double() - self.low) / (self.high - self.low)
        a = torch.logit(share.clamp(1e-3, 1 - 1e-3))
        b = etas.double().log() - t_hats.double().clamp(self.low, self.high)
        self.free = torch.stack([a, b]).requires_grad_()

    def schedule(self) -> tuple[Tensor, Tensor]:
        a, b = self.free
        t_hats = self.low + (self.high - self.low) * a.sigmoid()
        return t_hats, (t_hats + b).exp()


def start_schedule(
    task: str, level: float, steps: int, t_hat_range: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Where learning starts: t̂ from log σ² down by 3, or through the whole range for inpainting."""
    first, last = (
        (2 * math.log(level), 2 * math.log(level) - 3) if task == DENOISE else t_hat_range[::-1]
    )
    low, high = t_hat_range
    t_hats = torch.linspace(first, last, steps, dtype=torch.float64).clamp(low, high)
    etas = (0.5 if task == DENOISE else 1.0) * t_hats.exp()
    etas[-1] = t_hats[-1].exp()
    return t_hats, etas


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
    callback: Callable[[Progress], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """t̂ and η, each (I,), that minimise the squared error on all crops, by L-BFGS from ``start``."""
    if not problems or evaluations < 1:
        raise GncpriorError("Learning a schedule needs images and at least one evaluation.")
    parameters = Parameters(*start, prior.t_hat_range)
    pixels = sum(p.target.numel() for p in problems)
    buffers = Buffers()
    best = math.inf, parameters.free.detach().clone()
    count = 0

    def closure() -> float:
        """10 log10 of the mean squared error: the same minimiser, in dB."""
        nonlocal best, count
        t_hats, etas = parameters.schedule()
        loss, dt_hats, detas = _sums(
            squared_error(prior, p, t_hats.detach(), etas.detach(), buffers) for p in problems
        )
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
        lr=1.0,
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


def _sums(parts: Iterable[tuple[float, Tensor, Tensor]]) -> tuple[float, Tensor, Tensor]:
    losses, dt_hats, detas = zip(*parts, strict=True)
    return sum(losses), torch.stack(dt_hats).sum(0), torch.stack(detas).sum(0)
