"""Graduated non-convexity in closed form: smoothed Gaussian mixtures (section 2 of the paper).

A Gaussian mixture p = Σ_i w_i N(x_i, Σ_i) whose samples are degraded by noise of variance t has the
density p * N(0, t Id), again a mixture, and the energy

    F(x, t) = −log Σ_i w_i N(x; x_i, Σ_i + t Id).

With S_i = Σ_i + t Id, u_i = S_i⁻¹ (x − x_i), ℓ_i = log w_i − ½ log|2π S_i| − ½⟨x − x_i, u_i⟩ and the
posterior weights r = softmax(ℓ), everything follows from averages over the components:

    F        = −logsumexp ℓ
    ∇F       = E_r[u]
    ∇²F      = E_r[S⁻¹] − Cov_r[u]
    ∂F/∂t    = −E_r[a]                  a_i = ∂ℓ_i/∂t   = ½|u_i|² − ½ tr S_i⁻¹
    ∂²F/∂t²  = −E_r[b] − Var_r[a]       b_i = ∂²ℓ_i/∂t² = ½ tr S_i⁻² − ⟨u_i, S_i⁻¹ u_i⟩

Smoothing makes F convex. By Prékopa and Leindler it stays convex once it is, so there is one
threshold t̃; three answers to where it lies are given below. Algorithm 1, the GNC flow, then follows
the minimiser of F(·, t) from a convex start down to t_min.

(The paper prints N without the ½ in the exponent; here N is the normal density.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gncprior import schedules
from gncprior.errors import GncpriorError


class _Terms(NamedTuple):
    """Per-component terms, component axis first so that long batches stay contiguous."""

    log: Tensor  # ℓ_i, (n, ...)
    u: Tensor  # u_i in the eigenbasis of Σ_i, (n, ..., d)
    s: Tensor  # eigenvalues of S_i, broadcastable to (n, ..., d)


class GaussianMixture:
    """p = Σ_i w_i N(x_i, Σ_i) in dimension d and its smoothed energy F(x, t).

    weights (n,) on the unit simplex; means (n, d); covariances (n, d, d), or (n,) for σ_i² Id.
    A zero covariance is a Dirac: its energy exists for t > 0 only.

    Every function of (x, t) takes x of shape (..., d) and t a number or a tensor, which is broadcast
    against the leading axes of x. The result has the dtype of x, but all arithmetic is in float64:
    which component rules is decided by differences of the squares |x − x_i|², and in float32 these
    are lost a thousand diameters away.
    """

    def __init__(self, weights: Tensor, means: Tensor, covariances: Tensor) -> None:
        if means.ndim != 2 or not means.is_floating_point():
            raise GncpriorError("means must be a floating-point tensor of shape (n, d)")
        n, d = means.shape
        if weights.shape != (n,):
            raise GncpriorError(f"weights must have shape ({n},), not {tuple(weights.shape)}")
        if not bool((weights >= 0).all()) or abs(float(weights.double().sum()) - 1) > 1e-5:
            raise GncpriorError("weights must be non-negative and sum to one")
        if covariances.shape not in ((n,), (n, d, d)):
            raise GncpriorError(
                f"covariances must have shape ({n}, {d}, {d}) or ({n},), "
                f"not {tuple(covariances.shape)}"
            )
        if not bool(means.isfinite().all() and covariances.isfinite().all()):
            raise GncpriorError("means and covariances must be finite")
        self.weights = weights.double() / weights.double().sum()
        self.means = means.double()
        # Eigenvalues λ of Σ_i (n, d) and eigenvectors (n, d, d); None stands for unit vectors.
        self.variances, self.basis = _diagonalise(covariances.double(), d)

    @property
    def dim(self) -> int:
        """The dimension d."""
        return self.means.shape[1]

    @property
    def covariances(self) -> Tensor:
        """Σ_i = Q_i diag(λ_i) Q_iᵀ, (n, d, d)."""
        if self.basis is None:
            return torch.diag_embed(self.variances)
        return torch.einsum("iaj,ij,ibj->iab", self.basis, self.variances, self.basis)

    def diameter(self) -> float:
        """The largest distance between two means."""
        return float(torch.cdist(self.means, self.means, compute_mode=_EXACT_DISTANCES).max())

    # -- the energy and its derivatives

    def energy(self, x: Tensor, t: float | Tensor) -> Tensor:
        """F(x, t), one value per point."""
        return -self._terms(x, t).log.logsumexp(0).to(x.dtype)

    def grad(self, x: Tensor, t: float | Tensor) -> Tensor:
        """∇F(x, t), like x."""
        terms = self._terms(x, t)
        return self._mean(terms.log.softmax(0), terms.u).to(x.dtype)

    def energy_and_grad(self, x: Tensor, t: float | Tensor) -> tuple[Tensor, Tensor]:
        """F and ∇F in one pass."""
        terms = self._terms(x, t)
        g = self._mean(terms.log.softmax(0), terms.u)
        return -terms.log.logsumexp(0).to(x.dtype), g.to(x.dtype)

    def hessian(self, x: Tensor, t: float | Tensor) -> Tensor:
        """∇²F(x, t), (..., d, d)."""
        terms = self._terms(x, t)
        r = terms.log.softmax(0)
        # Covariances are centred before they are squared: far away or at tiny t the products of
        # uncentred terms would cancel. √r goes inside: where r vanishes u may be huge.
        c = r.sqrt().unsqueeze(-1) * (self._rotate(terms.u) - self._mean(r, terms.u))
        weighted = r.unsqueeze(-1) / terms.s
        if self.basis is None:
            mean = torch.diag_embed(weighted.sum(0))
        else:
            mean = torch.einsum("iaj,i...j,ibj->...ab", self.basis, weighted, self.basis)
        return (mean - torch.einsum("i...a,i...b->...ab", c, c)).to(x.dtype)

    def dt(self, x: Tensor, t: float | Tensor) -> Tensor:
        """∂F/∂t, one value per point."""
        terms = self._terms(x, t)
        a = (terms.u.square() - 1 / terms.s).sum(-1) / 2
        return -(terms.log.softmax(0) * a).sum(0).to(x.dtype)

    def dt2(self, x: Tensor, t: float | Tensor) -> Tensor:
        """∂²F/∂t², one value per point."""
        terms = self._terms(x, t)
        r = terms.log.softmax(0)
        a = (terms.u.square() - 1 / terms.s).sum(-1) / 2
        b = (1 / (2 * terms.s.square()) - terms.u.square() / terms.s).sum(-1)
        c = r.sqrt() * (a - (r * a).sum(0))
        return (-(r * b).sum(0) - c.square().sum(0)).to(x.dtype)

    def sample(
        self, count: int, t: float | Tensor = 0.0, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw y = x + √t n with x ~ p, n ~ N(0, Id): (count, d) in float64.

        t = 0 draws from p itself; t may also be one value per sample.
        """
        i = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        t = torch.as_tensor(t, dtype=torch.float64, device=i.device).unsqueeze(-1)
        if not bool((t >= 0).all()):
            raise GncpriorError("t must not be negative")
        n = torch.randn(count, self.dim, dtype=torch.float64, device=i.device, generator=generator)
        y = (self.variances[i] + t).sqrt() * n
        if self.basis is not None:
            y = torch.einsum("kab,kb->ka", self.basis[i], y)
        return self.means[i] + y

    # -- inside

    def _terms(self, x: Tensor, t: float | Tensor) -> _Terms:
        if x.ndim == 0 or x.shape[-1] != self.dim:
            raise GncpriorError(f"x must have shape (..., {self.dim}), not {tuple(x.shape)}")
        if not x.is_floating_point():
            raise GncpriorError(f"x must be floating-point, not {x.dtype}")
        t = torch.as_tensor(t, dtype=torch.float64, device=x.device)
        if not bool((t >= 0).all()):
            raise GncpriorError("t must not be negative")
        if not bool((self.variances.min() + t > 0).all()):
            raise GncpriorError("the energy of a singular covariance (a Dirac) needs t > 0")
        batch = max(x.ndim - 1, t.ndim)
        x = x.double().reshape((1,) * (batch + 1 - x.ndim) + x.shape)
        t = t.reshape((1,) * (batch - t.ndim) + t.shape)

        def lift(v: Tensor) -> Tensor:
            """(n, ...) → (n, 1, ..., 1, ...), one new axis for each axis of the batch."""
            return v.reshape(v.shape[:1] + (1,) * batch + v.shape[1:])

        s = lift(self.variances) + t.unsqueeze(-1)
        z = x - lift(self.means)
        if self.basis is not None:
            z = torch.einsum("iab,i...a->i...b", self.basis, z)
        u = z / s
        log_normaliser = lift(self.weights.log()) - (2 * math.pi * s).log().sum(-1) / 2
        return _Terms(log_normaliser - (z * u).sum(-1) / 2, u, s)

    def _rotate(self, v: Tensor) -> Tensor:
        """Q_i v_i: from the eigenbasis of each component to the common coordinates."""
        return v if self.basis is None else torch.einsum("iab,i...b->i...a", self.basis, v)

    def _mean(self, r: Tensor, v: Tensor) -> Tensor:
        """E_r[Q v]: average over the components of vectors given in their eigenbases."""
        return self._rotate(r.unsqueeze(-1) * v).sum(0)


_EXACT_DISTANCES = "donot_use_mm_for_euclid_dist"  # the faster formula cancels for close points


def _diagonalise(covariances: Tensor, d: int) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues (n, d) and eigenvectors of Σ_i, once: then Σ_i + t Id is cheap for every t."""
    if covariances.ndim == 1:
        variances, basis = covariances.unsqueeze(-1).expand(-1, d), None
    else:
        diagonal = covariances.diagonal(dim1=-2, dim2=-1)
        scale = diagonal.abs().max()
        if float((covariances - covariances.mT).abs().max()) > 1e-6 * float(scale):
            raise GncpriorError("covariances must be symmetric")
        if torch.equal(covariances, torch.diag_embed(diagonal)):
            variances, basis = diagonal, None
        else:
            variances, basis = torch.linalg.eigh(covariances)
            # A singular matrix comes back with eigenvalues of the order of the rounding error.
            rounding = variances.abs() <= 1e-7 * scale
            variances = torch.where(rounding & (variances < 0), 0.0, variances)
    if not bool((variances >= 0).all()):
        raise GncpriorError("covariances must be positive semi-definite")
    return variances, basis


def empirical(points: Tensor) -> GaussianMixture:
    """The empirical measure of a data set, p = 1/n Σ_i δ_{x_i}; points (n, d)."""
    if points.ndim != 2 or len(points) == 0:
        raise GncpriorError("points must have shape (n, d) with n ≥ 1")
    n = len(points)
    return GaussianMixture(points.new_full((n,), 1 / n), points, points.new_zeros(n))


def example_1d() -> GaussianMixture:
    """The five components of the paper's 1-D example, shown on x ∈ [−3, 3], t ∈ [1e-4, 1]."""
    w = torch.tensor([5, 15, 15, 60, 5], dtype=torch.float64) / 100
    mu = torch.tensor([-1, -0.5, 0, 0.5, 1], dtype=torch.float64)
    variance = torch.tensor([10, 1, 5, 1, 10], dtype=torch.float64) / 100
    return GaussianMixture(w, mu.unsqueeze(-1), variance)


# -- from which t on is F(·, t) convex?


def paper_bound(mixture: GaussianMixture, diameter: float | None = None) -> float:
    """The theorem: F(·, t) is convex on a set X that holds all means if t ≥ diam(X)².

    `diameter` is that of X; without it X is as small as the means allow.
    """
    least = mixture.diameter()
    if diameter is None:
        return least**2
    if diameter < least:
        raise GncpriorError(f"the means are {least:g} apart: X cannot have diameter {diameter:g}")
    return diameter**2


def sharp_bound(mixture: GaussianMixture) -> float:
    """For equal covariances F(·, t) is convex on all of R^d if t + λ_min(Σ) ≥ diam²/4.

    With S_i = S the Hessian is S⁻¹ − S⁻¹ Cov_r[x_i] S⁻¹, and by Popoviciu's inequality a variance
    is at most diam²/4. Two equal components attain it, so the constant cannot be improved. For
    unequal covariances no bound in terms of the diameter exists: two centred Gaussians of
    different variance have diameter zero and an energy that is not convex.
    """
    covariances = mixture.variances if mixture.basis is None else mixture.covariances
    difference = float((covariances - covariances[:1]).abs().max())
    if difference > 1e-9 * float(mixture.variances.max()):
        raise GncpriorError("the sharp bound holds for equal covariances only")
    return max(0.0, mixture.diameter() ** 2 / 4 - float(mixture.variances.min()))


def smallest_curvature(mixture: GaussianMixture, points: Tensor, t: float | Tensor) -> Tensor:
    """min over the points (N, d) of λ_min(∇²F(x, t)), for every entry of t."""
    t = torch.as_tensor(t, dtype=torch.float64)
    hessian = mixture.hessian(points, t.unsqueeze(-1))
    curvature = hessian[..., 0, 0] if mixture.dim == 1 else torch.linalg.eigvalsh(hessian)[..., 0]
    return curvature.amin(-1)


def convexity_threshold(mixture: GaussianMixture, points: Tensor, *, rtol: float = 1e-9) -> float:
    """The t̃ from which on F(·, t) is convex at all points (N, d), found numerically.

    The search comes down from t = max |x − x_i|², which the theorem says is convex at the points.
    Returns 0 if F is convex at every t met. (Coming up would mislead: at tiny t the ridges between
    minima are too narrow for any set of points.)
    """
    distances = torch.cdist(points.double(), mixture.means, compute_mode=_EXACT_DISTANCES)
    t_high = float(distances.max()) ** 2
    return _threshold(lambda t: float(smallest_curvature(mixture, points, t)) >= 0, t_high, rtol)


def _threshold(holds: Callable[[float], bool], t_high: float, rtol: float) -> float:
    """Smallest t ≤ t_high where a property holds that holds at t_high and, once true, stays true.

    Halves t until the property is lost, then bisects in t̂; 0 if it is not lost by 1e-12 t_high.
    """
    t_low = t_high
    while holds(t_low):
        t_low /= 2
        if t_low <= 1e-12 * t_high:
            return 0.0
    low, high = schedules.t_hat_from_t(t_low), schedules.t_hat_from_t(min(2 * t_low, t_high))
    while high - low > rtol:
        middle = (low + high) / 2
        if holds(schedules.t_from_t_hat(middle)):
            high = middle
        else:
            low = middle
    return schedules.t_from_t_hat(high)


# -- minima in one dimension


def count_minima_1d(mixture: GaussianMixture, t: float, *, grid: int = 4001) -> int:
    """The number of local minimisers of F(·, t); `grid` points must separate them."""
    left, _ = _sign_changes(_slope(mixture, t), _scan(mixture, t, grid))
    return len(left)


def minima_1d(mixture: GaussianMixture, t: float, *, grid: int = 4001) -> Tensor:
    """All local minimisers of F(·, t), ascending; `grid` points must separate them."""
    return _zeros(_slope(mixture, t), _scan(mixture, t, grid))


def maxima_1d(mixture: GaussianMixture, t: float, *, grid: int = 4001) -> Tensor:
    """All local maximisers of F(·, t), ascending: the borders between the basins."""
    slope = _slope(mixture, t)
    return _zeros(lambda x: -slope(x), _scan(mixture, t, grid))


def global_minimum_1d(mixture: GaussianMixture, t: float) -> tuple[float, float]:
    """The global minimiser x* of F(·, t) and F(x*, t)."""
    x = minima_1d(mixture, t)
    energies = mixture.energy(x.unsqueeze(-1), t)
    best = int(energies.argmin())
    return float(x[best]), float(energies[best])


def basin_1d(mixture: GaussianMixture, x: float, t: float) -> tuple[float, float]:
    """The interval around x between the neighbouring maximisers of F(·, t).

    Gradient flow from inside ends in the one minimiser that the interval holds.
    """
    borders = [-math.inf, *maxima_1d(mixture, t).tolist(), math.inf]
    low = max(b for b in borders if b <= x)
    return low, min(b for b in borders if b > x)


def unimodality_threshold_1d(mixture: GaussianMixture, *, rtol: float = 1e-9) -> float:
    """The t from which on F(·, t) has a single minimiser; smoothing in 1-D never adds one."""
    t_high = paper_bound(mixture)
    if t_high == 0:  # all means in one point, which is the minimiser
        return 0.0
    return _threshold(lambda t: count_minima_1d(mixture, t) == 1, t_high, rtol)


def _slope(mixture: GaussianMixture, t: float) -> Callable[[Tensor], Tensor]:
    """F'(·, t) as a function of plain numbers (N,)."""
    if mixture.dim != 1:
        raise GncpriorError(f"minima are counted in dimension 1, not {mixture.dim}")
    return lambda x: mixture.grad(x.unsqueeze(-1), t).squeeze(-1)


def _scan(mixture: GaussianMixture, t: float, grid: int) -> Tensor:
    """A grid over all critical points of F(·, t).

    F' = E_r[(x − x_i)/s_i] is negative left of all means and positive right of them, so they lie
    between the outermost means. The margin keeps the ends off points where F' rounds to zero.
    """
    margin = (float(mixture.variances.max()) + t) ** 0.5
    low, high = float(mixture.means.min()) - margin, float(mixture.means.max()) + margin
    return torch.linspace(low, high, grid, dtype=torch.float64)


def _sign_changes(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The intervals of the grid x on which f changes from negative to non-negative."""
    negative = f(x) < 0
    change = negative[:-1] & ~negative[1:]
    return x[:-1][change], x[1:][change]


def _zeros(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The zeros of f on the grid x where f changes from negative to positive, by bisection."""
    left, right = _sign_changes(f, x)
    for _ in range(60):
        middle = (left + right) / 2
        negative = f(middle) < 0
        left, right = torch.where(negative, middle, left), torch.where(negative, right, middle)
    return (left + right) / 2


# -- Algorithm 1

_CHUNK = 1 << 15  # entries of one working array of the flow: a dozen of them stay in cache


def gnc_flow(
    mixture: GaussianMixture,
    x_0: Tensor,
    t_0: float | Tensor,
    steps: int | Tensor,
    *,
    t_min: float = schedules.T_MIN,
    eta: float = 1.0,
) -> Tensor:
    """Algorithm 1, the graduated non-convexity flow, from all starts x_0 (N, d):

        x_{i+1} = x_i − η t_i ∇F(x_i, t_i),    i = 0 … I−1,

    along t_0 > t_1 > … > t_I = t_min, equidistant in t̂. As in the paper the last step is taken at
    t_{I−1}: t_min is where the sequence would arrive next. By Tweedie's identity η = 1 replaces x_i
    by the mean of all clean points that x_i may be a noisy version of.

    t_0 and I = `steps` may be tensors; they are broadcast against each other to a grid (...) and
    the result has shape (..., N, d). A number for each gives (N, d). The starts may differ over
    the grid: x_0 is then (..., N, d) itself.
    """
    if x_0.ndim < 2:
        raise GncpriorError(f"x_0 must have shape (..., N, d), not {tuple(x_0.shape)}")
    t_hat_min = schedules.t_hat_from_t(t_min)
    t_hat_0 = schedules.t_hat_from_t(torch.as_tensor(t_0, dtype=torch.float64))
    n_steps = torch.as_tensor(steps)
    if n_steps.is_floating_point() or not bool((n_steps >= 0).all()):
        raise GncpriorError("the number of steps must be a whole number, zero or more")
    grid = torch.broadcast_shapes(t_hat_0.shape, n_steps.shape, x_0.shape[:-2])
    t_hat_0, n_steps = t_hat_0.expand(grid).flatten(), n_steps.expand(grid).flatten()
    starts = x_0.shape[-2:]
    x = x_0.expand(*grid, *starts).reshape(len(n_steps), *starts).clone()
    # Runs of similar length go together, the longest first, so that those still running are
    # always the head of a chunk.
    order = n_steps.argsort(descending=True)
    for runs in order.split(max(1, _CHUNK // max(1, starts.numel() * len(mixture.means)))):
        lengths, t_hat_start, running = n_steps[runs], t_hat_0[runs], x[runs]
        for i in range(int(lengths[0])):
            head = slice(int((lengths > i).sum()))
            t_hat = t_hat_start[head] + (t_hat_min - t_hat_start[head]) * (
                i / lengths[head].double()
            )
            t = schedules.t_from_t_hat(t_hat).unsqueeze(-1)
            running[head] -= eta * t.unsqueeze(-1) * mixture.grad(running[head], t)
        x[runs] = running
    return x.reshape(*grid, *starts)


def attainment_rate_1d(
    mixture: GaussianMixture,
    starts: Tensor,
    t_0: float | Tensor,
    steps: int | Tensor,
    basin: tuple[float, float],
    *,
    t_min: float = schedules.T_MIN,
) -> Tensor:
    """The share of the ascending starts (N,) whose flow (η = 1) ends in a basin, over a grid.

    The flow keeps the order of its starts: t F'' = 1 − Var[x | y]/t ≤ 1, so that x − t F'(x, t)
    never decreases. Hence it suffices to count the starts that end left of each border, and to
    look closely only where the border falls: every √N-th start, then those between two of them.
    """
    n = len(starts)
    stride = max(1, math.isqrt(n))

    def flow(x_0: Tensor) -> Tensor:
        return gnc_flow(mixture, x_0.unsqueeze(-1), t_0, steps, t_min=t_min).squeeze(-1)

    coarse = flow(starts[::stride])

    def count_left_of(border: float) -> Tensor:
        # The last coarse start that ends left of the border, −stride if there is none.
        last = ((coarse < border).sum(-1, keepdim=True) - 1) * stride
        between = last + torch.arange(1, stride, device=starts.device)
        exists = (between >= 0) & (between < n)
        ends = flow(starts[between.clamp(0, n - 1)])
        count = last.squeeze(-1) + 1 + ((ends < border) & exists).sum(-1)
        return torch.where(last.squeeze(-1) < 0, 0, count)

    low, high = basin
    return (count_left_of(high) - count_left_of(low)).double() / n
