r"""AdaBelief, the cosine schedule and the averaging of weights.

AdaBelief (Zhuang et al. 2020) divides the mean gradient by how far gradients stray from that mean:

    m ← β₁m + (1−β₁)g,   s ← β₂s + (1−β₂)(g−m)² + ε,
    θ ← θ − η · m/(1−β₁ᵏ) / (√(s/(1−β₂ᵏ)) + ε)

The parts of a spline hang together, but AdaBelief gives each of its coefficients a step of about the same
length, most of it noise from one coefficient to the next.  The step may therefore pass through the
smoother S = (1 + κDᵀD)⁻¹, D the second differences, along each of the last two axes: S is positive, so a
descent direction remains one, ripples shrink by up to 1 + 16κ, and straight lines pass as they are.

Steps go over all tensors of a group at once: a prior has few and small ones, and their loop in
Python would cost more than the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gncprior.prior import Prior


class AdaBelief(torch.optim.Optimizer):
    """AdaBelief over parameter groups, each with its own ``lr``.

    A group may bring ``scales``, a tensor for each parameter that multiplies its rate (by
    broadcasting), for parameters whose parts live on different scales, and ``smoothers``, two matrices
    that the step of all parameters is multiplied by, along the last axis but one and the last.

    ``weight_decay`` is decoupled: θ ← (1 − η·decay)θ before the step.  All parameters of a group
    have gradients, or none.  The number k of steps taken stands in the group as ``step``, the
    moments m and s in the state of a parameter as ``mean`` and ``spread``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-16,
        weight_decay: float = 0.0,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= b < 1 for b in betas)):
            raise ValueError(
                "AdaBelief needs lr, eps and weight_decay ≥ 0 and betas in [0, 1), "
                f"not {lr}, {eps}, {weight_decay}, {betas}."
            )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"step": 0, "scales": None, "smoothers": None}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step with the gradients as they stand; the closure's value, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            if len(params) < len(group["params"]):
                raise ValueError("Some parameters of a group have gradients and some have none.")
            self._step_group(group, params)
        return loss

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        group["step"] += 1
        (beta1, beta2), eps, lr, k = group["betas"], group["eps"], group["lr"], group["step"]
        for p in params:
            if not self.state[p]:
                self.state[p] = {"mean": torch.zeros_like(p), "spread": torch.zeros_like(p)}
        grads = [p.grad for p in params if p.grad is not None]
        means = [self.state[p]["mean"] for p in params]
        spreads = [self.state[p]["spread"] for p in params]

        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(means, grads, 1 - beta1)
        strays = torch._foreach_sub(grads, means)
        torch._foreach_mul_(spreads, beta2)
        torch._foreach_addcmul_(spreads, strays, strays, 1 - beta2)
        torch._foreach_add_(spreads, eps)
        roots = torch._foreach_sqrt(spreads)
        torch._foreach_div_(roots, math.sqrt(1 - beta2**k))
        torch._foreach_add_(roots, eps)
        length = -lr / (1 - beta1**k)
        if group["smoothers"] is None:
            if group["scales"] is not None:
                torch._foreach_div_(roots, group["scales"])
            torch._foreach_addcdiv_(params, means, roots, length)
            return
        across, along = group["smoothers"]
        steps = [across @ u @ along for u in torch._foreach_div(means, roots)]
        if group["scales"] is not None:
            torch._foreach_mul_(steps, group["scales"])
        torch._foreach_add_(params, steps, alpha=length)


def smoother(size: int, strength: float) -> Tensor:
    """S = (1 + κDᵀD)⁻¹ for ``size`` coefficients in a row and strength κ ≥ 0."""
    second = torch.eye(size, dtype=torch.float64).diff(n=2, dim=0)
    return torch.linalg.inv(
        torch.eye(size, dtype=torch.float64) + strength * second.T @ second
    ).float()


def prior_groups(
    prior: Prior, t_rates: bool, smoothing: float, t_smoothing: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameter groups of a prior: its filters, and its potentials with ``scales`` and ``smoothers``.

    With ``t_rates`` the rates of the last potentials fall with t: their curvature falls as 1/(t + 0.01), and
    what is a small step at small t would be noise at large t.  ``smoothing`` and ``t_smoothing`` are the
    strengths κ over the knots and over those in log t.
    """
    weights = [s.weight for s in prior._splines()]
    splines: dict[str, Any] = {"params": weights}
    if t_rates:
        t = prior.architecture.t_grid.centres().exp()
        scales = [torch.ones_like(w) for w in weights]
        scales[-1] *= (1 / (1 + 100 * t)).to(scales[-1])[:, None]
        splines["scales"] = scales
    if smoothing or t_smoothing:
        pairs = zip(weights[-1].shape[1:], (t_smoothing, smoothing), strict=True)
        splines["smoothers"] = [smoother(n, strength).to(weights[-1]) for n, strength in pairs]
    return {"params": list(prior.filters)}, splines


def cosine(step: int, steps: int, end: float, warmup: int = 0) -> float:
    """The factor of the learning rate at ``step``: up to 1 over ``warmup`` steps, then along a cosine to ``end``.

    The first step after the warm-up has factor 1, the last of all has ``end``.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    fraction = min((step - warmup) / max(steps - 1 - warmup, 1), 1.0)
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * fraction))


class Average:
    """The exponential moving average θ̄ ← θ̄ + (1−d)(θ−θ̄) of tensors.

    At update k = 0, 1, … the decay d is min(decay, (1+k)/(10+k)), so that early weights are
    forgotten as soon as there are better ones.
    """

    def __init__(self, tensors: Sequence[Tensor], decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"The decay of an average is in [0, 1), not {decay}.")
        self.decay = decay
        self.updates = 0
        self._source = list(tensors)
        self.tensors = [t.detach().clone() for t in tensors]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the present values."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.tensors, self._source, 1 - decay)
        self.updates += 1

    @torch.no_grad()
    def copy_to(self, tensors: Sequence[Tensor]) -> None:
        """Write the averages into other tensors."""
        torch._foreach_copy_(list(tensors), self.tensors)
