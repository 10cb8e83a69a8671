r"""Spline functions of a feature and of the smoothing parameter (paper, appendix B).

.. math:: φ(x,\hat t) = \sum_l \sum_o w_{lo}\, β((x-μ_x^l)/γ_x)\, β((\hat t-μ_t^o)/γ_t)

with β the centred quartic B-spline.  There are N_x knots μ_x on [−r, r] and N_t on [t̂_min, t̂_max],
and two ghost knots beyond each end, so that β sums to one on the whole grid: (N_t+4)·(N_x+4) weights.

t̂ is constant in an image, so the t̂ direction is collapsed first, to 1-D coefficients c per image and
channel (and likewise for ∂/∂t̂, ∂²/∂t̂²).  Between the half-knots the 1-D spline is a quartic; the
coefficients of its pieces form a *table* (…, 5, N_x+2), row 1+i for |x−μ_i| ≤ γ/2, with
φ = Σ_k a_k s^k and s = (x−μ_i)/γ.  Row 0 and row N_x+1 continue the function beyond the end knots by
value, slope and curvature (clipped to ≥ 0, so that an energy never falls off far away).

Two primitives suffice, and they are closed under differentiation:

* ``evaluate(x, T)``: the value of the piecewise polynomial.  ∂/∂x is ``evaluate(x, DT)`` with
  (DT)_k = (k+1) T_{k+1}/γ, ∂/∂T is ``scatter``;
* ``scatter(x, g)``: the moments Σ g s^k of every row, the transpose of evaluate in T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gncprior.native import kernels

ORDER = 5  # coefficients of a quartic
GHOSTS = 2  # knots beyond each end

# β(s − m) on |s| ≤ ½ as a polynomial in s: row k holds the coefficients of s^k, column 2 + m
BASIS = (
    (1 / 384, 19 / 96, 115 / 192, 19 / 96, 1 / 384),
    (-1 / 48, -11 / 24, 0.0, 11 / 24, 1 / 48),
    (1 / 16, 1 / 4, -5 / 8, 1 / 4, 1 / 16),
    (-1 / 12, 1 / 6, 0.0, -1 / 6, 1 / 12),
    (1 / 24, -1 / 6, 1 / 4, -1 / 6, 1 / 24),
)


def quartic(x: Tensor) -> Tensor:
    """The centred quartic B-spline β as the paper prints it: the definition that all else must match."""
    a = x.abs()
    inner = a + 0.5
    middle, outer = 1.5 - a, 2.5 - a
    one = 11 + 12 * inner - 6 * inner**2 - 12 * inner**3 + 6 * inner**4
    two = 1 + 4 * middle + 6 * middle**2 + 4 * middle**3 - 4 * middle**4
    pieces = torch.where(a < 0.5, one, torch.where(a < 1.5, two, outer**4))
    return torch.where(a < 2.5, pieces, torch.zeros_like(x)) / 24


@dataclass(frozen=True)
class Grid:
    """``knots`` equidistant knots on [low, high]."""

    knots: int
    low: float
    high: float

    def __post_init__(self) -> None:
        if self.knots < 2 or not self.low < self.high:
            raise ValueError(f"A grid needs two knots or more on an interval, not {self}.")

    @property
    def gamma(self) -> float:
        """The distance of neighbouring knots."""
        return (self.high - self.low) / (self.knots - 1)

    @property
    def weights(self) -> int:
        """Knots and ghost knots."""
        return self.knots + 2 * GHOSTS

    def centres(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """μ of every weight, ghost knots included."""
        i = torch.arange(-GHOSTS, self.knots + GHOSTS, dtype=torch.float64)
        return (self.low + i * self.gamma).to(dtype)


# ---------------------------------------------------------------- tables


def tables_of(c: Tensor, clip: Tensor | None = None) -> Tensor:
    """Tables (…, 5, N+2) of the splines with coefficients c (…, N+4).

    The curvature of the two tails is set to zero where it is negative, or, for a derivative in t̂ of
    another table, where the curvature of that table (``clip``) is.
    """
    knots = c.shape[-1] - 2 * GHOSTS
    basis = torch.tensor(BASIS, dtype=c.dtype, device=c.device)
    # tap by tap rather than as a matrix product: for one image that would start torch's threads,
    # whose waiting afterwards costs more than the product
    rows = c[..., None, :knots] * basis[:, :1]
    for m in range(1, ORDER):
        rows = rows + c[..., None, m : m + knots] * basis[:, m : m + 1]
    tails = rows[..., :: knots - 1]  # of which value, slope and curvature are kept
    curvature = (tails if clip is None else clip[..., :: knots + 1])[..., 2:3, :]
    cubic = torch.zeros_like(tails[..., 3:, :])
    tails = torch.cat([tails[..., :2, :], tails[..., 2:3, :] * (curvature > 0), cubic], dim=-2)
    return torch.cat([tails[..., :1], rows, tails[..., 1:]], dim=-1)


def differentiate(tables: Tensor, inverse_gamma: Tensor) -> Tensor:
    """D: the tables of ∂φ/∂x."""
    k = torch.arange(1, ORDER, dtype=tables.dtype, device=tables.device)[:, None]
    slope = tables[..., 1:, :] * k * inverse_gamma[..., None, None]
    return torch.cat([slope, torch.zeros_like(slope[..., :1, :])], dim=-2)


def differentiate_transpose(moments: Tensor, inverse_gamma: Tensor) -> Tensor:
    """Dᵀ: turns moments that belong to φ' into moments that belong to φ."""
    k = torch.arange(1, ORDER, dtype=moments.dtype, device=moments.device)[:, None]
    shifted = moments[..., :-1, :] * k * inverse_gamma.to(moments.dtype)[..., None, None]
    return torch.cat([torch.zeros_like(shifted[..., :1, :]), shifted], dim=-2)


def _euler_factors(knots: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """k of every coefficient and, as v/γ = s + middle, the middle of every row."""
    i = torch.arange(-1, knots + 1, dtype=like.dtype, device=like.device).clamp(0, knots - 1)
    return torch.arange(ORDER, dtype=like.dtype, device=like.device)[:, None], i - (knots - 1) / 2


def euler(tables: Tensor) -> Tensor:
    """The tables of v·∂φ/∂v, v the argument of the function: a quartic again."""
    k, middle = _euler_factors(tables.shape[-1] - 2, tables)
    derivative = torch.cat(
        [tables[..., 1:, :] * k[1:], torch.zeros_like(tables[..., :1, :])], dim=-2
    )
    return tables * k + derivative * middle


def euler_transpose(moments: Tensor) -> Tensor:
    """Turns moments that belong to v·∂φ/∂v into moments that belong to φ."""
    k, middle = _euler_factors(moments.shape[-1] - 2, moments)
    out = moments * k
    out[..., 1:, :] += moments[..., :-1, :] * k[1:] * middle
    return out


# ---------------------------------------------------------------- the two primitives


def _places(x: Tensor, inverse_gamma: Tensor, knots: int) -> tuple[Tensor, Tensor]:
    """Rows (integers) and positions s of x (B, C, P)."""
    z = x * inverse_gamma[..., None] + (knots - 1) / 2
    nearest = torch.nan_to_num(z.detach()).clamp(0, knots - 1).round()
    row = nearest.long() + 1
    row = torch.where(z < 0, 0, torch.where(z > knots - 1, knots + 1, row))
    return row, z - nearest


def _evaluate_reference(x: Tensor, tables: Tensor, inverse_gamma: Tensor) -> Tensor:
    flat = x.flatten(2)
    row, s = _places(flat, inverse_gamma, tables.shape[-1] - 2)
    value = torch.zeros_like(flat)
    for k in reversed(range(ORDER)):
        value = value * s + tables[..., k, :].gather(-1, row)
    return value.view_as(x)


def _scatter_reference(x: Tensor, g: Tensor, inverse_gamma: Tensor, knots: int) -> Tensor:
    flat, g = x.flatten(2), g.flatten(2)
    row, s = _places(flat, inverse_gamma, knots)
    moments = []
    for _ in range(ORDER):
        zero = torch.zeros(*flat.shape[:2], knots + 2, dtype=flat.dtype, device=flat.device)
        moments.append(zero.scatter_add(-1, row, g))
        g = g * s
    return torch.stack(moments, dim=-2)


def _over_pixels(x: Tensor) -> Tensor:
    return x.flatten(2).sum(-1)


class _Evaluate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tables: Tensor, inverse_gamma: Tensor) -> Tensor:
        ctx.save_for_backward(x, tables, inverse_gamma)
        if kernels.serve(x, tables, inverse_gamma):
            out = kernels.empty_like(x)
            kernels.evaluate(x, tables, inverse_gamma, (out, None, None))
            return out
        return _evaluate_reference(x, tables, inverse_gamma)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, tables, inverse_gamma = ctx.saved_tensors
        dx = dt = dscale = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            dx = g * evaluate(x, differentiate(tables, inverse_gamma), inverse_gamma)
        if ctx.needs_input_grad[1]:
            dt = scatter(x, g, inverse_gamma, tables.shape[-1] - 2)
        if ctx.needs_input_grad[2]:
            assert dx is not None
            dscale = _over_pixels(dx * x) / inverse_gamma
        return dx, dt, dscale


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, inverse_gamma: Tensor, knots: int) -> Tensor:
        ctx.save_for_backward(x, g, inverse_gamma)
        if kernels.serve(x, g, inverse_gamma):
            return kernels.scatter(x, g, inverse_gamma, knots).to(x.dtype)
        return _scatter_reference(x, g, inverse_gamma, knots)

    @staticmethod
    def backward(ctx: Any, tables: Tensor) -> tuple[Tensor | None, ...]:
        x, g, inverse_gamma = ctx.saved_tensors
        dx = dg = dscale = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            dx = g * evaluate(x, differentiate(tables, inverse_gamma), inverse_gamma)
        if ctx.needs_input_grad[1]:
            dg = evaluate(x, tables, inverse_gamma)
        if ctx.needs_input_grad[2]:
            assert dx is not None
            dscale = _over_pixels(dx * x) / inverse_gamma
        return dx, dg, dscale, None


def evaluate(x: Tensor, tables: Tensor, inverse_gamma: Tensor) -> Tensor:
    """φ(x) for x (B, C, …), tables (B, C, 5, N+2) and 1/γ (B, C); differentiable in all three, twice and more."""
    out: Tensor = _Evaluate.apply(x, tables, inverse_gamma)
    return out


def scatter(x: Tensor, g: Tensor, inverse_gamma: Tensor, knots: int) -> Tensor:
    """The moments Σ_p g_p s_p^k of every row, shaped like the tables: the transpose of :func:`evaluate`."""
    out: Tensor = _Scatter.apply(x, g, inverse_gamma, knots)
    return out


def soft_histogram(
    x: Tensor, inverse_gamma: Tensor, knots: int, weight: Tensor | None = None
) -> Tensor:
    """H with Σ_p φ(x_p) = ⟨T, H⟩ for every table T: all sums of splines of x in one array (float64).

    With a weight for every pixel it is :func:`scatter` to full precision: Σ_p weight_p φ(x_p) = ⟨T, H⟩.
    """
    if kernels.serve(x, inverse_gamma):
        return kernels.scatter(x, weight, inverse_gamma, knots)
    ones = torch.ones_like(x, dtype=torch.float64)
    return scatter(
        x.double(), ones if weight is None else weight.double(), inverse_gamma.double(), knots
    )


def evaluate_into(
    x: Tensor, tables: Tensor, inverse_gamma: Tensor, *outputs: Tensor | None
) -> None:
    """Write φ, φ', φ'' of x into up to three given tensors (None: not wanted), in one pass, without a graph.

    An output may be x itself.
    """
    wanted = (*outputs, None, None, None)[:3]
    with torch.no_grad():
        if kernels.serve(x, tables, inverse_gamma):
            kernels.evaluate(x, tables, inverse_gamma, wanted)
            return
        results = []
        for out in wanted:
            results.append(None if out is None else _evaluate_reference(x, tables, inverse_gamma))
            tables = differentiate(tables, inverse_gamma)
        for out, result in zip(wanted, results, strict=True):
            if out is not None and result is not None:
                out.copy_(result)


# ---------------------------------------------------------------- functions of x and t̂


@dataclass(frozen=True)
class Collapsed:
    """The splines of a layer at given t̂: tables of φ and, on request, of ∂φ/∂t̂ and ∂²φ/∂t̂²."""

    tables: tuple[Tensor, ...]  # each (B, C, 5, N+2)
    inverse_gamma: Tensor  # (B, C)

    @property
    def knots(self) -> int:
        return self.tables[0].shape[-1] - 2

    def slope_tables(self, order: int = 0) -> Tensor:
        """Tables of ∂/∂x of the order-th t̂-derivative."""
        return differentiate(self.tables[order], self.inverse_gamma)


def time_window(t_hat: Tensor, grid: Grid, order: int) -> tuple[Tensor, Tensor]:
    """The five weights around t̂ that count, by index, and their β or its order-th derivative: (B, 5) each.

    t̂ outside the grid counts as its nearest end, so derivatives vanish there.
    """
    inside = t_hat.clamp(grid.low, grid.high)
    z = (inside - grid.low) / grid.gamma
    nearest = z.detach().round().clamp(0, grid.knots - 1)
    s = z - nearest
    basis = torch.tensor(BASIS, dtype=t_hat.dtype, device=t_hat.device)
    powers = torch.arange(ORDER, device=t_hat.device)
    for _ in range(order):
        basis = torch.cat([basis[1:] * powers[1:, None], torch.zeros_like(basis[:1])]) / grid.gamma
    value = torch.zeros(len(t_hat), ORDER, dtype=t_hat.dtype, device=t_hat.device)
    for k in reversed(range(ORDER)):
        value = value * s[:, None] + basis[k]
    if order:
        value = value * ((t_hat >= grid.low) & (t_hat <= grid.high))[:, None]
    return nearest.long()[:, None] + powers, value


def time_basis(t_hat: Tensor, grid: Grid, order: int = 0) -> Tensor:
    """β((t̂−μ_o)/γ_t) for all o, or its order-th derivative in t̂: (B,) → (B, N_t+4)."""
    index, value = time_window(t_hat, grid, order)
    dense = torch.zeros(len(t_hat), grid.weights, dtype=t_hat.dtype, device=t_hat.device)
    return dense.scatter(1, index, value)


class Splines(nn.Module):
    """The functions φ_j(x, t̂) of one layer, j = 1 … C.

    ``spread``, when given, is the s_j of the scaled variant φ_j(x/√(s_j²+t), t̂), which keeps the same
    relative resolution at every t; it is not the paper's model.
    """

    spread: Tensor | None

    def __init__(
        self, channels: int, x_grid: Grid, t_grid: Grid, spread: Tensor | None = None
    ) -> None:
        super().__init__()
        self.x_grid, self.t_grid = x_grid, t_grid
        self.weight = nn.Parameter(torch.zeros(channels, t_grid.weights, x_grid.weights))
        self.register_buffer("spread", spread)

    @torch.no_grad()
    def start_constant(self, value: float = 1.0) -> None:
        self.weight.fill_(value)

    @torch.no_grad()
    def start_identity(self) -> None:
        self.weight.copy_(self.x_grid.centres().to(self.weight).expand_as(self.weight))

    @torch.no_grad()
    def start_quadratic(self) -> None:
        """½x² exactly: w = ½(μ² − 5γ²/12)."""
        mu = self.x_grid.centres()
        quadratic = 0.5 * (mu**2 - 5 * self.x_grid.gamma**2 / 12)
        self.weight.copy_(quadratic.to(self.weight).expand_as(self.weight))

    def _coefficients(self, t_hat: Tensor, order: int) -> Tensor:
        """Σ_o w_lo β_o(t̂), or its order-th derivative: (B, C, N_x+4)."""
        if torch.is_grad_enabled() and (self.weight.requires_grad or t_hat.requires_grad):
            basis = time_basis(t_hat, self.t_grid, order)
            return torch.einsum("bo,jol->bjl", basis, self.weight)
        # without a graph five terms and not a matrix product, for the reason given in tables_of
        index, value = time_window(t_hat, self.t_grid, order)
        terms = [self.weight.index_select(1, index[:, m]) * value[:, m, None] for m in range(ORDER)]
        return torch.stack(terms).sum(0).transpose(0, 1)

    def collapse(self, t_hat: Tensor, derivatives: int = 0) -> Collapsed:
        """Tables at t̂ (B,) of φ and of its first ``derivatives`` (at most 2) derivatives in t̂."""
        coefficients = [self._coefficients(t_hat, order) for order in range(derivatives + 1)]
        tables = [tables_of(coefficients[0])]
        tables += [tables_of(c, clip=tables[0]) for c in coefficients[1:]]
        inverse, rho = self.scales(t_hat)
        if rho is not None and derivatives:
            e0 = euler(tables[0])
            if derivatives > 1:
                tables[2] = (
                    tables[2]
                    - rho * euler(tables[1])
                    - 0.5 * rho * (1 - rho) * e0
                    + 0.25 * rho**2 * euler(e0)
                )
            tables[1] = tables[1] - 0.5 * rho * e0
        return Collapsed(tuple(tables), inverse)

    def scales(self, t_hat: Tensor) -> tuple[Tensor, Tensor | None]:
        """1/γ at t̂ (B,) of every function and, for the scaled variant, ρ = t/(s²+t): (B, C), (B, C, 1, 1).

        v = x/√(s²+t) gives v̇ = −½ρv, and ρ̇ = ρ(1−ρ); outside the grid v does not change, so ρ = 0.
        """
        inverse = torch.full(
            (len(t_hat), self.weight.shape[0]), 1 / self.x_grid.gamma,
            dtype=self.weight.dtype, device=self.weight.device,
        )  # fmt: skip
        if self.spread is None:
            return inverse, None
        low, high = self.t_grid.low, self.t_grid.high
        t = t_hat.clamp(low, high).exp()[:, None]
        total = self.spread**2 + t
        rho = t / total * ((t_hat >= low) & (t_hat <= high))[:, None]
        return inverse * total.rsqrt(), rho[..., None, None]
