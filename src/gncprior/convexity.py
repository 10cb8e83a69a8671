r"""How convex a prior is: the smallest eigenvalue of its Hessian (paper, section 2, for learned energies).

The theorem's bound on t says nothing for images (for 96×96 pixels diam²/4 = 2304), so the convexity of
R_L(·,t) at large t is a matter of measurement.  The Lanczos method finds the smallest eigenvalue of
∇²_x R(x,t) from Hessian products alone.  Constant images, which the filters cannot see, are
eigenvectors to 0 and are left out.

Convexity at t_max can also be had by construction: R(·,t) is convex if the last potentials are parabolas
that open upwards and the inner functions are lines.  That is where the paper sees them tend, and at t_max,
where noise outweighs the image, it costs little.  :func:`settle_at_t_max` keeps them there, step by
step of training, so that the rest of the prior learns around it.

The slope in t̂ at the very end of its range is what training sees least of.  With last potentials a u² + …
there and inner functions that stand still, ∂_t̂R = const + Σ ȧ u²; and where ȧ/a is between −1, as for pure noise
(R = ‖x‖²/2t), and −½, R rises towards t_max the more, the less noise a picture has.  So it should:
minimisation over t̂ starts there.  :func:`steady_at_t_max` sees to it after training.
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
    """The smallest eigenvalue of e^t̂ ∇²R(x,t) off the constant images, and its eigenvector; x is (C, H, W).

    With the factor e^t̂ = t it is dimensionless: 1 is the curvature of pure noise.  Lanczos values
    come down to the eigenvalue from above, so a negative one is proof of non-convexity.
    """
    image = x[None].to(prior.filters[0])
    low, high = prior.t_hat_range
    t = math.exp(min(max(t_hat, low), high))
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(image.numel(), generator=generator, dtype=torch.float64)
    v = _off_constants(v, len(x))
    v /= v.norm()
    basis: list[Tensor] = []
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(steps, image.numel() - len(x))):
        basis.append(v)
        w = t * prior.hessian_product(image, t_hat, v.to(image).view_as(image)).flatten().double()
        diagonal.append(float(w @ basis[-1]))
        for _ in range(2):  # once is not enough against rounding
            known = torch.stack(basis)
            w -= known.T @ (known @ w)
            w = _off_constants(w, len(x))  # from any trace of them the method would find them again
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


def _off_constants(v: Tensor, channels: int) -> Tensor:
    """What is orthogonal to every image that is constant in each channel."""
    v = v.view(channels, -1)
    return (v - v.mean(1, keepdim=True)).flatten()


@torch.no_grad()
def flat_curvature(
    prior: Prior, t_hats: Tensor, products: int = 30, waves: Tensor | None = None, size: int = 16
) -> tuple[Tensor, Tensor]:
    """The eigenvalue of ∇²R at a flat image that is largest in size, for every t̂ (B,), and its eigenvectors.

    It is found by the power method in as many Hessian products, from ``waves`` where given: those of a
    call before, if the prior has changed little since.  A grey level added to the image changes nothing.
    """
    like = prior.filters[0]
    shape = (len(t_hats), prior.architecture.channels, size, size)
    if waves is None:
        waves = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)
    flat, values = torch.zeros_like(waves), torch.zeros(len(t_hats))
    for _ in range(products):
        waves = waves / waves.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        bent = prior.hessian_product(flat, t_hats.to(like), waves)
        values, waves = (bent * waves).flatten(1).sum(1, dtype=torch.float64), bent
    return values.abs(), waves


@torch.no_grad()
def settle_at_t_max(prior: Prior) -> None:
    """Replace, at t_max, inner functions by the closest lines and last potentials by the closest parabolas.

    Closest in the coefficients c = Σ_o w_o β_o(t̂_max); the weights change as little as that takes.
    Parabolas of negative curvature become lines.
    """
    for splines in prior._splines():
        last = splines is prior._splines()[-1]
        top = torch.tensor([splines.t_grid.high], dtype=torch.float64)
        basis = time_basis(top, splines.t_grid)[0].to(splines.weight.device)
        c = torch.einsum("o,jol->jl", basis, splines.weight.double())
        wanted = _closest(c, splines.x_grid.centres().to(c), degree=2 if last else 1)
        share = basis / basis.square().sum()
        splines.weight.add_((share[:, None] * (wanted - c)[:, None, :]).to(splines.weight))


@torch.no_grad()
def steady_at_t_max(prior: Prior) -> None:
    """At t_max, where :func:`settle_at_t_max` was, let inner functions stand still and parabolas fall with t̂.

    ∂_t̂φ becomes 0 in the inner layers and in the last one −ρ a u², with the learned ρ clamped to [½, 1].
    Only the two weights beyond t_max change, so nothing does for t̂ below t̂_max by 1½ knots or more.
    """
    for splines in prior._splines():
        last = splines is prior._splines()[-1]
        top = torch.tensor([splines.t_grid.high], dtype=torch.float64)
        value, slope = (
            time_basis(top, splines.t_grid, order)[0].to(splines.weight.device) for order in (0, 1)
        )
        c, now = (torch.einsum("o,jol->jl", b, splines.weight.double()) for b in (value, slope))
        wanted = torch.zeros_like(now)
        if last:
            mu = splines.x_grid.centres().to(c)
            powers = mu[:, None] ** torch.arange(3, device=mu.device)
            (a, rate) = (torch.linalg.lstsq(powers, f.T).solution[2] for f in (c, now))
            rho = (-rate / a.clamp_min(1e-12)).clamp(0.5, 1.0)
            wanted = -(rho * a)[:, None] * mu**2
        system = torch.stack([value[-2:], slope[-2:]])  # the value stays, the slope is as wanted
        change = torch.linalg.solve(system, torch.tensor([0.0, 1.0]).to(system))
        splines.weight[:, -2:] += (change[:, None] * (wanted - now)[:, None, :]).to(splines.weight)


def _closest(c: Tensor, mu: Tensor, degree: int) -> Tensor:
    """The polynomials in μ closest to each row of c, without a negative square."""
    powers, _ = torch.linalg.qr(mu[:, None] ** torch.arange(degree + 1, device=mu.device))
    parts = c @ powers
    if degree == 2:  # the third column is μ² made orthogonal to the others
        sign = torch.sign(powers[-1, 2])
        parts[:, 2] = sign * (sign * parts[:, 2]).clamp(min=0)
    return parts @ powers.T
