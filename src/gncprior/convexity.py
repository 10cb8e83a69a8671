r"""How convex a prior is: the smallest eigenvalue of its Hessian (paper, section 2, for learned energies).

The theorem's bound on t says nothing for images (for 96×96 pixels diam²/4 = 2304), so the convexity of
R_L(·,t) at large t is a matter of measurement.  The Lanczos method finds the smallest eigenvalue of
∇²_x R(x,t) from Hessian products alone.  The constant image, which the filters cannot see, is an
eigenvector to 0 and is left out.

Convexity at t_max can also be had by construction.  R(·,t) is convex if the last potentials are and
the inner ones are linear.  A spline Σ_l c_l β(x − μ_l) has second derivative Σ_l (Dc)_l β₂ with the second
differences Dc and β₂ ≥ 0, so Dc ≥ 0 is enough for the one and Dc = 0 for the other.  During training
:func:`draw_to_convex` goes a step towards this after each step of the optimizer, so that the rest of
the prior learns around it, and :func:`make_convex` settles what is left at the end.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gncprior.prior import Prior
from gncprior.splines import Splines, time_basis

MARGIN = 1e-2  # of the mean second difference: the least one that a convex potential is left with


@torch.no_grad()
def smallest_curvature(
    prior: Prior, x: Tensor, t_hat: float, *, steps: int = 80, seed: int = 0
) -> tuple[float, Tensor]:
    """The smallest eigenvalue of e^t̂ ∇²R(x,t) off the constant image, and its eigenvector; x is (C, H, W).

    With the factor e^t̂ = t it is dimensionless: 1 is the curvature of pure noise.  Lanczos values
    come down to the eigenvalue from above, so a negative one is proof of non-convexity.
    """
    image = x[None].to(prior.filters[0])
    low, high = prior.t_hat_range
    t = math.exp(min(max(t_hat, low), high))
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(image.numel(), generator=generator, dtype=torch.float64)
    v -= v.mean()
    v /= v.norm()
    basis: list[Tensor] = []
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(steps, image.numel() - 1)):
        basis.append(v)
        w = t * prior.hessian_product(image, t_hat, v.to(image).view_as(image)).flatten().double()
        diagonal.append(float(w @ basis[-1]))
        for _ in range(2):  # once is not enough against rounding
            known = torch.stack(basis)
            w -= known.T @ (known @ w)
            w -= w.mean()  # from any trace of it the method would find the constant image again
        norm = float(w.norm())
        if norm < 1e-7 * max(
            map(abs, diagonal)
        ):  # the space of what the start can reach is used up
            break
        beside.append(norm)
        v = w / norm
    n = len(diagonal)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for k in range(n - 1):
        tridiagonal[k, k + 1] = tridiagonal[k + 1, k] = beside[k]
    values, vectors = torch.linalg.eigh(tridiagonal)
    vector = (torch.stack(basis).T @ vectors[:, 0]).view_as(x)
    return float(values[0]), vector


@torch.no_grad()
def draw_to_convex(prior: Prior) -> None:
    """One gradient step of ½‖min(Dc, 0)‖² (last layer) and of ½‖Dc‖² (inner layers) in c at t_max.

    Its length 1/16 is that of the largest eigenvalue of DᵀD, so that it never goes too far.
    """
    for splines in prior._splines():
        second = _at_t_max(splines).diff(n=2)
        wrong = second.clamp(max=0) if splines is prior._splines()[-1] else second
        padded = torch.nn.functional.pad(wrong, (2, 2))
        _move_at_t_max(splines, -padded.diff(n=2) / 16)


@torch.no_grad()
def make_convex(prior: Prior) -> float:
    """Convexity at t_max for good; the largest change of a slope, as a part of the largest slope.

    Negative second differences become slightly positive ones in the last layer, and all of them zero
    in the inner ones; what changes is integrated from the middle of the grid outwards.
    """
    largest = 0.0
    for splines in prior._splines():
        c = _at_t_max(splines)
        second = c.diff(n=2)
        wanted = torch.zeros_like(second)
        if splines is prior._splines()[-1]:
            wanted = second.clamp(min=MARGIN * float(second.abs().mean()))
        slopes = torch.nn.functional.pad((wanted - second).cumsum(1), (1, 0))
        slopes -= slopes[:, [slopes.shape[1] // 2]]
        change = torch.nn.functional.pad(slopes.cumsum(1), (1, 0))
        change -= change[:, [change.shape[1] // 2]]
        _move_at_t_max(splines, change)
        largest = max(largest, float(slopes.abs().max() / c.diff().abs().max()))
    return largest


def _at_t_max(splines: Splines) -> Tensor:
    """The coefficients c of the potentials at t_max: (C, N_x+4), float64."""
    return torch.einsum("o,jol->jl", _basis(splines), splines.weight.double())


def _move_at_t_max(splines: Splines, change: Tensor) -> None:
    """The smallest change of the weights that adds ``change`` to c."""
    basis = _basis(splines)
    share = basis / basis.square().sum()
    splines.weight.add_((share[:, None] * change[:, None, :]).to(splines.weight))


def _basis(splines: Splines) -> Tensor:
    top = torch.tensor([splines.t_grid.high], dtype=torch.float64, device=splines.weight.device)
    return time_basis(top, splines.t_grid)[0]
