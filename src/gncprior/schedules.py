"""Schedules: sequences of the smoothing parameter, and the one place that relates t, t̂ and σ.

Noise of standard deviation σ smooths the density of images by a Gaussian of variance t = σ²; the
learned priors are parametrised by its logarithm,

    t = σ²,    t̂ = log t = 2 log σ,    t ∈ T = [t_min, t_max].

A schedule is a plain 1-D tensor of t̂. Nothing else is needed to describe how graduated
non-convexity moves from a smooth energy (large t) to the one that is wanted (t_min).

Each conversion takes a number or a tensor and returns the same kind.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from gncprior.errors import GncpriorError

T_MIN = 1e-4
T_MAX = 1.0

Value = TypeVar("Value", float, Tensor)


def _log(value: Value, name: str) -> Value:
    if isinstance(value, Tensor):
        if not bool((value > 0).all()):
            raise GncpriorError(f"{name} must be positive everywhere")
        return value.log()
    if not value > 0:
        raise GncpriorError(f"{name} must be positive, not {value}")
    return math.log(value)


def _exp(value: Value) -> Value:
    return value.exp() if isinstance(value, Tensor) else math.exp(value)


def t_hat_from_t(t: Value) -> Value:
    """t̂ = log t."""
    return _log(t, "t")


def t_from_t_hat(t_hat: Value) -> Value:
    """t = exp t̂."""
    return _exp(t_hat)


def t_hat_from_sigma(sigma: Value) -> Value:
    """t̂ = 2 log σ."""
    return 2 * _log(sigma, "sigma")


def sigma_from_t_hat(t_hat: Value) -> Value:
    """σ = exp(t̂/2)."""
    return _exp(t_hat / 2)


def linear(
    t_hat_start: float,
    t_hat_end: float,
    steps: int,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Tensor:
    """`steps` equidistant values of t̂, both ends included: log-spaced values of t.

    One step is the start alone.
    """
    if steps < 1:
        raise GncpriorError(f"a schedule needs at least one step, not {steps}")
    if not (math.isfinite(t_hat_start) and math.isfinite(t_hat_end)):
        raise GncpriorError(f"a schedule from {t_hat_start} to {t_hat_end} is not finite")
    return torch.linspace(t_hat_start, t_hat_end, steps, dtype=dtype, device=device)
