"""What the fast code must agree with: the definitions written out term by term, and error bounds."""

import math
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from gncprior.native import kernels
from gncprior.prior import Architecture, Prior
from gncprior.splines import Grid

BACK_ENDS = (*kernels.supported(), "torch")
KNOTS = (2, 5, 31, 62, 63, 64, 100)  # 63 is the largest grid that AVX-512 keeps in registers
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def as_at_the_start() -> Iterator[None]:
    """Kernels and threads are state of the process: a test may change them for itself only.

    One thread unless a test wants more: on small tensors more only wait for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    kernels.select(os.environ.get(kernels.ENVIRONMENT_VARIABLE, ""))
    torch.set_num_threads(threads)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)


# ---------------------------------------------------------------- splines


def bspline(x: Tensor, order: int = 0) -> Tensor:
    """The order-th derivative of β as a sum of truncated powers."""
    power = 4 - order
    total = torch.zeros_like(x)
    for j in range(6):
        d = x + 2.5 - j
        step = (d > 0).to(x)
        total = total + (-1) ** j * math.comb(5, j) * step * d**power / math.factorial(power)
    return torch.where(x.abs() < 2.5, total, 0.0)


def spline(x: Tensor, c: Tensor, grid: Grid, order: int = 0) -> Tensor:
    """The order-th derivative of Σ_l c_l β((x−μ_l)/γ), one function: c (N+4,), any shape of x.

    Beyond the grid: value, slope and curvature of the end, the curvature not below zero.
    """

    def inner(x: Tensor, order: int) -> Tensor:
        basis = bspline((x[..., None] - grid.centres()) / grid.gamma, order)
        return (basis * c).sum(-1) / grid.gamma**order

    end = x.clamp(grid.low, grid.high)
    value, slope, curvature = (inner(end, k) for k in range(3))
    curvature = curvature.clamp(min=0)
    d = x - end
    zero = torch.zeros_like(x)
    beyond = [
        value + slope * d + curvature * d**2 / 2,
        slope + curvature * d,
        curvature,
        zero,
        zero,
    ]
    return torch.where(d == 0, inner(end, order), beyond[order])


def splines(x: Tensor, c: Tensor, grid: Grid, order: int = 0) -> Tensor:
    """The same for every image and channel: x (B, C, …), c (B, C, N+4)."""
    maps = [
        [spline(x[b, j], c[b, j], grid, order) for j in range(x.shape[1])] for b in range(len(x))
    ]
    return torch.stack([torch.stack(row) for row in maps])


def spline_rounding(x: Tensor, c: Tensor, grid: Grid, order: int = 0) -> Tensor:
    """A bound on what float32 may lose in the order-th derivative of splines.

    |φ^(k)| ≤ (2/γ)^k max|c|, since φ^(k) is a spline of k-th differences.  The position z = x/γ +
    (N−1)/2 is known to N·eps (at most N, three roundings), and a position lost by δ costs δ·γ·|φ^(k+1)|;
    building the table and Horner's scheme are some 16 more roundings.  Beyond the grid φ grows like the
    square of the distance s in knots, φ' like s, and the position is known to eps·s.
    """
    s = ((x.double().abs() - grid.high) / grid.gamma).clamp(min=0)
    size = c.double().abs().amax() * (2 / grid.gamma) ** order
    return EPS * size * (2 * grid.knots + 16) * (1 + s) ** max(2 - order, 0)


def grid_points(grid: Grid, count: int = 50) -> Tensor:
    """Numbers inside and far outside of the grid, knots and half-knots among them."""
    reach = torch.linspace(1.7 * grid.low, 1.7 * grid.high, count, dtype=torch.float64)
    knots = grid.centres()
    half = knots + grid.gamma / 2
    far = torch.tensor([-1e4, -50.0, 50.0, 1e4], dtype=torch.float64)
    return torch.cat([reach, knots, half, far])


# ---------------------------------------------------------------- filters


def convolution(x: Tensor, w: Tensor) -> Tensor:
    """K x, tap by tap on an image padded by numpy; float64."""
    x64, w64 = x.double().numpy(), w.double().numpy()
    (kh, kw), (height, width) = w64.shape[2:], x64.shape[2:]
    before = (kh // 2, kw // 2)
    pad = [(0, 0), (0, 0), *((c, k - 1 - c) for c, k in zip(before, (kh, kw), strict=True))]
    padded = np.pad(x64, pad, mode="symmetric")
    out = np.zeros((len(x64), len(w64), height, width))
    for ky in range(kh):
        for kx in range(kw):
            shifted = padded[:, :, ky : ky + height, kx : kx + width]
            out += np.einsum("oi,bihw->bohw", w64[:, :, ky, kx], shifted)
    return torch.from_numpy(out)


# ---------------------------------------------------------------- priors

TINY = {"filters": 2, "first_size": 3, "inner_size": 2, "x_knots": 5, "t_knots": 3}


def random_prior(dtype: torch.dtype = torch.float64, seed: int = 0, **architecture) -> Prior:
    """A prior at its start with everything disturbed, so that nothing is special about it."""
    prior = Prior(Architecture(**architecture)).double().start(gain=1.0, seed=seed)
    with torch.no_grad():
        for i, p in enumerate(prior.parameters()):
            p += 0.3 * normal(*p.shape, seed=seed + i + 1)
        for i, s in enumerate(prior.buffers()):
            s += 0.1 + normal(*s.shape, seed=seed - i - 1).abs()
    return prior.to(dtype)
