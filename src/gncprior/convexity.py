r"""How convex a prior is: the smallest eigenvalue of its Hessian (paper, section 2, for learned energies).

The theorem's bound on t says nothing for images (for 96×96 pixels diam²/4 = 2304), so the convexity of
R_L(·,t) at large t is a matter of measurement.  The Lanczos method finds the smallest eigenvalue of
∇²_x R(x,t) from Hessian products alone.  The constant image, which the filters cannot see, is an
eigenvector to 0 and is left out.

R(·,t_max) is convex if the last potentials are convex and all functions before them are affine.
Learned ones come close to that, but for ripples that score matching hardly sees: they change the
gradient by little and its slope by much.  :func:`make_convex` takes them off after training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gncprior.prior import Prior
from gncprior.splines import time_basis


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
def make_convex(prior: Prior) -> float:
    """Move R(·,t_max) to the nearest convex energy of its kind; returns how far the slopes moved, relatively.

    At t̂_max the slopes c_{l+1} − c_l of the last potentials' coefficients become their closest
    non-decreasing sequence, which makes a B-spline convex; those of all functions before become
    their mean.  The change is laid on the knots in t̂ in proportion to β_o(t̂_max), so that it fades
    over the last four of them.
    """
    *inner, last = prior._splines()
    basis = time_basis(torch.tensor([last.t_grid.high], dtype=torch.float64), last.t_grid)[0]
    share = (basis / basis.square().sum())[None, :, None]
    moved = 0.0
    for splines in (*inner, last):
        c = torch.einsum("o,jol->jl", basis, splines.weight.double())
        slopes = c.diff()
        if splines is last:
            wanted = torch.stack([_non_decreasing(row) for row in slopes])
        else:
            wanted = slopes.mean(1, keepdim=True).expand_as(slopes)
        middle = c.shape[1] // 2  # where the value stays
        new = torch.cat([torch.zeros_like(c[:, :1]), wanted.cumsum(1)], dim=1)
        new += (c - new)[:, middle : middle + 1]
        splines.weight += ((new - c)[:, None, :] * share).to(splines.weight)
        moved = max(moved, float((wanted - slopes).norm() / slopes.norm()))
    return moved


def _non_decreasing(values: Tensor) -> Tensor:
    """The closest non-decreasing sequence, by pooling neighbours that are out of order."""
    pools: list[tuple[float, int]] = []  # mean and length
    for value in values.tolist():
        mean, length = value, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean = (before * count + mean * length) / (count + length)
            length += count
        pools.append((mean, length))
    return torch.cat([torch.full((length,), mean, dtype=values.dtype) for mean, length in pools])
