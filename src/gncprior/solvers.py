r"""Minimise R(x,t) + D(z,x): three ways to choose t (paper, section 4).

All are proximal gradient steps on x, which differ in where t̂ = log t comes from:

.. math:: x ← \mathrm{prox}_{τD}(x − τ∇_xR(x,\hat t)),\qquad τ = η e^{\hat t}

* joint (Algorithm 2): t̂ ← proj(t̂ − (η/d) ∂R/∂t̂), from the same point as the step on x;
* predefined: t̂ follows a given schedule;
* learned (:mod:`gncprior.unrolled`): the same with given step sizes τ_i = η_i.

And one step without a data term, Tweedie's formula x = z − σ²∇R(z, log σ²), the mean of the images
that noise of standard deviation σ may have turned into z.

The loop is written once.  A solver knows of the prior that it has gradients (:class:`Energy`) and of
the data term that it has a prox; t̂ and step sizes are per image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gncprior.buffers import Buffers
from gncprior.errors import GncpriorError
from gncprior.fidelity import Fidelity


class Energy(Protocol):
    """What a solver needs of R(x,t): per-image values, and t̂ a number or one value per image.

    Gradients may be returned in memory that the next call with the same buffers uses again.
    """

    @property
    def t_hat_range(self) -> tuple[float, float]:
        """[t̂_min, t̂_max], to which t̂ is clamped."""
        ...

    def grad(self, x: Tensor, t_hat: float | Tensor, *, buffers: Buffers | None = None) -> Tensor:
        """∇_x R."""
        ...

    def energy_and_grad(
        self, x: Tensor, t_hat: float | Tensor, *, buffers: Buffers | None = None
    ) -> tuple[Tensor, Tensor]:
        """R and ∇_x R."""
        ...

    def joint_grad(
        self, x: Tensor, t_hat: float | Tensor, *, buffers: Buffers | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """R, ∇_x R and ∂R/∂t̂."""
        ...


@dataclass(frozen=True)
class State:
    """Where an iteration stands after ``iteration`` steps; x is the solver's memory: copy what you keep."""

    iteration: int
    x: Tensor
    t_hat: Tensor
    step_size: Tensor  # τ of the step that led here


@dataclass(frozen=True)
class History:
    """E(x_i, t̂_i) = R + D and t̂_i for i = 0 … I, (I+1, B), and the step sizes τ_i, (I, B)."""

    energy: Tensor
    t_hat: Tensor
    step_size: Tensor


@dataclass(frozen=True)
class Result:
    """What came out, and why it ended.

    ``status`` is "converged", "finished" (all steps were made), "stopped" (the callback asked) or
    "diverged"; ``message`` says it in a sentence.  ``energy`` and ``history`` are None unless asked for.
    """

    x: Tensor
    t_hat: Tensor
    energy: Tensor | None
    iterations: int
    converged: bool
    status: str
    message: str
    history: History | None


Callback = Callable[[State], bool | None]

_MOST_HALVINGS = 40
_REGROWTH = (
    1.2  # after a step that held, so that one hard place does not slow down all that follows
)


def solve_joint(
    prior: Energy,
    fidelity: Fidelity,
    x0: Tensor,
    t_hat0: float | Tensor,
    *,
    max_iter: int,
    eta: float = 1.0,
    tolerance: float = 0.0,
    backtracking: bool = False,
    history: bool = False,
    callback: Callback | None = None,
) -> Result:
    """Algorithm 2: minimise R + D in x and t̂ together, from (x0, t_hat0).

    Ends after ``max_iter`` steps, when no image moves by more than ``tolerance`` (the root mean square
    over its pixels, and t̂), or when ``callback(state)`` returns True.  ``backtracking`` halves η for
    every image whose energy would rise above its quadratic bound, so that energies never rise.
    """
    loop = _Loop(prior, fidelity, x0, t_hat0, eta, tolerance, backtracking, history, callback)
    size = x0[0].numel()

    def step(_: int) -> None:
        energy, grad, dt = prior.joint_grad(loop.x, loop.t_hat, buffers=loop.buffers)
        loop.move(energy, grad, loop.t_hat.exp(), dt.to(x0) / size)

    return loop.run(step, max_iter)


def solve_scheduled(
    prior: Energy,
    fidelity: Fidelity,
    x0: Tensor,
    t_hats: Tensor,
    *,
    etas: Tensor | None = None,
    max_iter: int | None = None,
    tolerance: float = 0.0,
    backtracking: bool = False,
    history: bool = False,
    callback: Callback | None = None,
) -> Result:
    """Minimise R + D in x while t̂ follows a schedule: (I,), or (I, B) for one per image.

    The step sizes are e^t̂ (η = 1), or ``etas``, shaped like t_hats, as they are.  Where ``max_iter``
    exceeds I, the last t̂ and η stay; only then, ``tolerance`` can end it, as in :func:`solve_joint`.
    """
    t_hats = torch.as_tensor(t_hats).to(x0)
    if t_hats.dim() not in (1, 2) or len(t_hats) == 0:
        raise GncpriorError(f"A schedule must be shaped (I,) or (I, B), not {tuple(t_hats.shape)}.")
    if etas is not None and torch.as_tensor(etas).shape != t_hats.shape:
        raise GncpriorError("A schedule needs as many step sizes as values of t̂.")
    sizes = None if etas is None else torch.as_tensor(etas).to(x0)
    loop = _Loop(prior, fidelity, x0, t_hats[0], 1.0, tolerance, backtracking, history, callback)

    def step(i: int) -> None:
        i = min(i, len(t_hats) - 1)
        loop.t_hat = loop.times(t_hats[i])
        energy: Tensor | None = None
        if history or backtracking:
            energy, grad = prior.energy_and_grad(loop.x, loop.t_hat, buffers=loop.buffers)
        else:
            grad = prior.grad(loop.x, loop.t_hat, buffers=loop.buffers)
        loop.move(energy, grad, loop.t_hat.exp() if sizes is None else sizes[i])

    return loop.run(step, len(t_hats) if max_iter is None else max_iter, schedule=len(t_hats))


@torch.no_grad()
def tweedie(prior: Energy, z: Tensor, sigma: float | Tensor) -> Tensor:
    """x = z − σ²∇R(z, log σ²): denoise in one step; σ is a number or one value per image."""
    sigma = torch.as_tensor(sigma, dtype=z.dtype, device=z.device)
    if not bool(((sigma > 0) & sigma.isfinite()).all()):
        raise GncpriorError("The noise level sigma must be positive and finite.")
    variance = sigma.square().expand(len(z))
    return torch.addcmul(z, prior.grad(z, variance.log()), -variance.view(-1, 1, 1, 1))


class _Loop:
    """The state of an iteration, and the step on x and t̂ that all schemes share."""

    def __init__(
        self, prior: Energy, fidelity: Fidelity, x0: Tensor, t_hat0: float | Tensor, eta: float,
        tolerance: float, backtracking: bool, history: bool, callback: Callback | None,
    ) -> None:  # fmt: skip
        if not eta > 0:
            raise GncpriorError(f"The step size eta must be positive, not {eta}.")
        if not tolerance >= 0:
            raise GncpriorError(f"The tolerance must not be negative, but is {tolerance}.")
        if x0.numel() == 0 or not bool(x0.isfinite().all()):
            raise GncpriorError("The image to start from must have pixels, all of them finite.")
        self.prior, self.fidelity = prior, fidelity
        # Our data terms can write the prox over its argument; a user's need not.
        self.prox: Callable[[Tensor, Tensor], Tensor] = getattr(fidelity, "prox_", fidelity.prox)
        self.range = prior.t_hat_range
        self.tolerance, self.backtracking, self.callback = tolerance, backtracking, callback
        self.buffers, self.trial_buffers = Buffers(), Buffers()
        self.x = x0.clone(memory_format=torch.contiguous_format)
        self.next = torch.empty_like(self.x)
        self.t_hat = self.times(t_hat0)
        self.largest_eta = eta
        self.eta = torch.full_like(self.t_hat, eta)
        self.active = torch.ones_like(self.t_hat)  # 0 for images that have converged
        self.step_size = torch.zeros_like(self.t_hat)
        self.moved = torch.zeros_like(self.t_hat)
        self.past: list[tuple[Tensor, Tensor, Tensor]] | None = [] if history else None

    def times(self, t_hat: float | Tensor) -> Tensor:
        """t̂ per image, clamped to the prior's range."""
        t_hat = torch.as_tensor(t_hat, dtype=self.x.dtype, device=self.x.device)
        if t_hat.dim() > 1 or t_hat.numel() not in (1, len(self.x)) or bool(t_hat.isnan().any()):
            raise GncpriorError(
                f"t̂ must be a number, or one per image: {len(self.x)}, not {tuple(t_hat.shape)}."
            )
        return t_hat.expand(len(self.x)).clamp(*self.range)

    @torch.no_grad()
    def run(self, step: Callable[[int], None], max_iter: int, schedule: int = 0) -> Result:
        """Steps until one of the three reasons to end; convergence counts only after the schedule."""
        if max_iter < 1:
            raise GncpriorError(f"A solver needs at least one step, not {max_iter}.")
        status, message, iteration = "finished", f"All {max_iter} steps were made.", 0
        while iteration < max_iter:
            step(iteration)
            iteration += 1
            state = State(iteration, self.x, self.t_hat, self.step_size)
            if not self.t_hat.isfinite().all():
                break
            if self.callback is not None and self.callback(state):
                status, message = "stopped", f"The callback ended it after {iteration} steps."
                break
            if self.tolerance > 0 and iteration >= schedule:
                # A converged image stays as it is, so that results do not depend on the batch.
                self.active = self.active * (self.moved > self.tolerance)
                if not self.active.any():
                    status = "converged"
                    message = f"No image moved by more than {self.tolerance:g} in step {iteration}."
                    break
        if not self.x.isfinite().all():
            status = "diverged"
            message = f"It diverged within {iteration} steps: lower eta, or use backtracking."
        energy, history = self.summary()
        return Result(
            self.x, self.t_hat, energy, iteration, status == "converged", status, message, history
        )

    def move(
        self, energy: Tensor | None, grad: Tensor, scale: Tensor, rate: Tensor | None = None
    ) -> None:
        """x ← prox_{τD}(x − τ grad) with τ = η·scale, and t̂ ← proj(t̂ − η·rate)."""
        if self.past is not None and energy is not None:
            total = energy + self.fidelity.value(self.x).to(energy)
        for _ in range(_MOST_HALVINGS):
            eta = self.eta * self.active
            tau = eta * scale
            torch.addcmul(self.x, grad, -tau.view(-1, 1, 1, 1), out=self.next)
            result = self.prox(self.next, tau)
            if result is not self.next:
                self.next.copy_(result)
            t_hat = self.t_hat if rate is None else (self.t_hat - eta * rate).clamp(*self.range)
            if not self.backtracking or energy is None:
                break
            rises = self.exceeds_bound(energy, grad, tau, t_hat, eta, rate)
            if not rises.any():
                self.eta = (self.eta * _REGROWTH).clamp(max=self.largest_eta)
                break
            self.eta = torch.where(rises, self.eta / 2, self.eta)
        if self.past is not None:
            self.past.append((total, self.t_hat, tau))
        if self.tolerance > 0:
            distance = self.x.sub_(self.next).flatten(1).norm(dim=1) / self.x[0].numel() ** 0.5
            self.moved = torch.maximum(distance, (t_hat - self.t_hat).abs())
        self.x, self.next = self.next, self.x
        self.t_hat, self.step_size = t_hat, tau

    def exceeds_bound(
        self, energy: Tensor, grad: Tensor, tau: Tensor, t_hat: Tensor, eta: Tensor,
        rate: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Whether R at the new point lies above the quadratic that the step minimises [BeTe09].

        R(x⁺,t̂⁺) ≤ R + ⟨∇R, δ⟩ + ‖δ‖²/(2τ) + d·(rate·δ_t̂ + δ_t̂²/(2η)) makes R + D fall.
        """
        new, _ = self.prior.energy_and_grad(self.next, t_hat, buffers=self.trial_buffers)
        delta = (self.next - self.x).flatten(1).double()
        bound = energy + (grad.flatten(1) * delta).sum(1)
        bound = bound + delta.square().sum(1) / (2 * tau.double())
        if rate is not None:
            dt = (t_hat - self.t_hat).double()
            bound = bound + delta.shape[1] * (rate * dt + dt.square() / (2 * eta))
        rounding = torch.finfo(self.x.dtype).eps * energy.abs()
        return (new > bound + rounding) & (self.active > 0)

    def summary(self) -> tuple[Tensor | None, History | None]:
        """The energy at the end, and the history with it."""
        if self.past is None:
            return None, None
        if self.t_hat.isfinite().all():
            energy, _ = self.prior.energy_and_grad(self.x, self.t_hat, buffers=self.buffers)
            energy = energy + self.fidelity.value(self.x).to(energy)
        else:
            energy = torch.full_like(self.past[-1][0], torch.nan)
        energies, t_hats, sizes = zip(*self.past, strict=True)
        history = History(
            torch.stack([*energies, energy]),
            torch.stack([*t_hats, self.t_hat]),
            torch.stack(sizes),
        )
        return energy, history
