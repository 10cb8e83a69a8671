r"""The prior: a one-parameter family of Fields-of-Experts energies (paper, section 3.1).

.. math:: R_L(x,t) = ⟨1, Φ_L(·,t) ∘ K_L ∘ … ∘ Φ_1(·,t) ∘ K_1 (x)⟩

K_1 has zero-mean filters, so that R_L does not see a constant added to the image; K_2 … K_L mix the
features.  Every φ_{lj} is a spline in its feature and in t̂ = log t.  Energies are per image, (B,) in
float64, and t̂ is always an argument: a number, or one value per image.

Everything is computed from the primitives of :mod:`gncprior.splines` and :mod:`gncprior.filters`, in
closed form: with u_l = K_l h_{l−1}, h_l = φ_l(u_l),

* ∇R: g_L = φ_L'(u_L), g_{l−1} = φ_{l−1}'(u_{l−1}) · K_lᵀ g_l, ∇R = K_1ᵀ g_1;
* ∂R/∂t̂ from the same sweep: Σ_l ⟨K_{l+1}ᵀ g_{l+1}, ∂_t̂φ_l(u_l)⟩;
* ∂²R/∂t̂² by propagating Taylor coefficients: ḣ = φ_t̂ + φ'u̇, ḧ = φ_t̂t̂ + 2φ'_t̂ u̇ + φ''u̇² + φ'ü.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from gncprior.buffers import Buffers
from gncprior.errors import GncpriorError
from gncprior.filters import (
    convolve,
    convolve_into,
    convolve_transpose,
    convolve_transpose_into,
    dct_filters,
    zero_mean,
)
from gncprior.native import kernels
from gncprior.splines import Collapsed, Grid, Splines, differentiate, evaluate, evaluate_into


@dataclass(frozen=True)
class Architecture:
    """All that fixes the shape of a prior; the defaults are the paper's, with 63 × 13 knots."""

    layers: int = 1
    channels: int = 1
    filters: int = 48
    first_size: int = 7
    inner_size: int = 3
    x_knots: int = 63
    x_range: float = 3.5
    t_knots: int = 13
    t_min: float = 1e-4
    t_max: float = 1.0
    scaled: bool = False  # the variant with φ_1(u/√(s²+t), t̂)

    def __post_init__(self) -> None:
        sizes = (self.layers, self.channels, self.filters, self.first_size, self.inner_size)
        if min(sizes) < 1 or min(self.x_knots, self.t_knots) < 2:
            raise GncpriorError(
                f"Layers, channels, filters, sizes and knots must be positive: {self}."
            )
        if not (0 < self.t_min < self.t_max < math.inf and self.x_range > 0):
            raise GncpriorError(f"The ranges of t and of the features must be proper: {self}.")

    @property
    def x_grid(self) -> Grid:
        return Grid(self.x_knots, -self.x_range, self.x_range)

    @property
    def t_grid(self) -> Grid:
        return Grid(self.t_knots, math.log(self.t_min), math.log(self.t_max))


class Prior(nn.Module):
    """R_L(x,t).  ``info`` is whatever its file says about it: recipe, scores."""

    def __init__(
        self, architecture: Architecture | None = None, info: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.architecture = a = architecture or Architecture()
        self.info = info or {}
        shapes = [(a.filters, a.channels, a.first_size, a.first_size)]
        shapes += [(a.filters, a.filters, a.inner_size, a.inner_size)] * (a.layers - 1)
        self.filters = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        self.splines = nn.ModuleList()
        for layer in range(a.layers):
            # once the first layer has taken the scale of the noise off, the features stay of order one
            spread = torch.ones(a.filters) if a.scaled and layer == 0 else None
            self.splines.append(Splines(a.filters, a.x_grid, a.t_grid, spread))

    # ------------------------------------------------------------ start

    @torch.no_grad()
    def start(self, gain: float = 5.0, spread: float = 0.04, seed: int = 0) -> Prior:
        """The paper's start: DCT filters, Kaiming-normal inner filters, identities, a quadratic last.

        ``gain`` is the norm of the first filters, which decides how much of the spline grid their
        responses use.  The quadratic is scaled, at every knot in t̂, such that R is about
        ½‖x‖²/(t + 0.01), the energy of noise on a nearly constant image.  ``spread`` is s_j of the
        scaled variant.
        """
        a = self.architecture
        generator = torch.Generator().manual_seed(seed)
        first = dct_filters((a.first_size, a.first_size), a.channels)[: a.filters]
        missing = a.filters - len(first)
        if missing:
            extra = zero_mean(torch.randn(missing, *first.shape[1:], generator=generator).double())
            first = torch.cat([first, extra / extra.flatten(1).norm(dim=1)[:, None, None, None]])
        self.filters[0].copy_(first * gain)
        for w in list(self.filters)[1:]:
            deviation = math.sqrt(2 / w[0].numel())
            w.copy_(torch.randn(w.shape, generator=generator) * deviation)
        for splines in self._splines():
            splines.start_identity()
        last = self._splines()[-1]
        last.start_quadratic()
        noise = torch.randn(1, a.channels, 32, 32, generator=generator).to(self.filters[0])
        h = noise
        for w in self.kernels():
            h = convolve(h, w)
        power = float(h.square().sum() / noise.square().sum())
        t = a.t_grid.centres().exp()
        scale = 1 / (power * (t + 0.01))
        first_spread = self._splines()[0].spread
        if first_spread is not None:  # the features are divided by √(s²+t)
            first_spread.fill_(spread)
            scale = scale * (spread**2 + t)
        last.weight.mul_(scale.to(last.weight)[:, None])
        return self

    # ------------------------------------------------------------ parts

    @property
    def t_hat_range(self) -> tuple[float, float]:
        grid = self.architecture.t_grid
        return grid.low, grid.high

    def _splines(self) -> list[Splines]:
        return [s for s in self.splines if isinstance(s, Splines)]

    def kernels(self) -> list[Tensor]:
        """The filters as they are used: those of K_1 with their means taken off."""
        return [zero_mean(self.filters[0]), *list(self.filters)[1:]]

    @torch.no_grad()
    def of_scaled(self, c: float) -> Self:
        """R(cx, t) as a function of x: a copy with the first filters times c."""
        prior = copy.deepcopy(self)
        prior.filters[0].mul_(c)
        return prior

    def times(self, t_hat: float | Tensor, images: int) -> Tensor:
        """t̂ as one value per image, clamped to the prior's range by the splines."""
        like = self.filters[0]
        t_hat = torch.as_tensor(t_hat, dtype=like.dtype, device=like.device)
        if t_hat.dim() > 1 or (t_hat.dim() == 1 and len(t_hat) not in (1, images)):
            raise GncpriorError(
                f"t̂ must be a number or one value per image: {tuple(t_hat.shape)} for {images} images."
            )
        return t_hat.expand(images)

    def collapse(self, t_hat: Tensor, derivatives: int = 0) -> list[Collapsed]:
        """All layers' splines at t̂ (B,)."""
        return [s.collapse(t_hat, derivatives) for s in self._splines()]

    def _check(self, x: Tensor) -> None:
        channels = self.architecture.channels
        if x.dim() != 4 or x.shape[1] != channels or x.numel() == 0:
            raise GncpriorError(
                f"The prior takes images shaped (batch, {channels}, height, width), not {tuple(x.shape)}."
            )
        like = self.filters[0]
        if x.dtype != like.dtype or x.device != like.device:
            raise GncpriorError(
                f"The image is {x.dtype} on {x.device} but the prior is {like.dtype} on {like.device}: "
                "convert one of them."
            )

    def _tracked(self, *tensors: Any) -> bool:
        """Whether autograd watches anything that goes in."""
        candidates = [*self.parameters(), *tensors]
        return torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad for t in candidates
        )

    # ------------------------------------------------------------ energy and gradients

    def energy(self, x: Tensor, t_hat: float | Tensor) -> Tensor:
        """R(x,t): (B,), float64."""
        self._check(x)
        layers = self.collapse(self.times(t_hat, len(x)))
        w = self.kernels()
        if len(w) == 1 and not self._tracked(x, t_hat) and kernels.serve(x, w[0]):
            phi = layers[0]
            return kernels.first_layer(x, w[0], phi.tables[0], phi.inverse_gamma, phi.tables)[0]
        h = x
        for k, phi in zip(w, layers, strict=True):
            h = evaluate(convolve(h, k), phi.tables[0], phi.inverse_gamma)
        return _total(h)

    def grad(
        self,
        x: Tensor,
        t_hat: float | Tensor,
        *,
        buffers: Buffers | None = None,
        half: bool = False,
    ) -> Tensor:
        """∇_x R(x,t), shaped like x.  With ``buffers`` the result is one of them, good until the next call.

        With ``half`` inner filters may multiply in bfloat16, where the processor has that: faster, and
        off by some thousandths.
        """
        if self._tracked(x, t_hat):
            return self._tracked_sweep(x, t_hat)[1]
        return self._sweep(x, t_hat, buffers, half=half)[1]

    def energy_and_grad(
        self,
        x: Tensor,
        t_hat: float | Tensor,
        *,
        buffers: Buffers | None = None,
        half: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """R and ∇_x R in one pass."""
        if self._tracked(x, t_hat):
            return self._tracked_sweep(x, t_hat)
        energy, grad, _ = self._sweep(x, t_hat, buffers, energy=True, half=half)
        assert energy is not None
        return energy, grad

    def joint_grad(
        self,
        x: Tensor,
        t_hat: float | Tensor,
        *,
        buffers: Buffers | None = None,
        half: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """R, ∇_x R and ∂R/∂t̂ in one pass, without a graph."""
        energy, grad, dt = self._sweep(x, t_hat, buffers, energy=True, time=True, half=half)
        assert energy is not None and dt is not None
        return energy, grad, dt

    def _tracked_sweep(self, x: Tensor, t_hat: float | Tensor) -> tuple[Tensor, Tensor]:
        """R and ∇R by the explicit formulas, which autograd can differentiate again."""
        self._check(x)
        layers = self.collapse(self.times(t_hat, len(x)))
        w = self.kernels()
        h, features = x, []
        for k, phi in zip(w, layers, strict=True):
            u = convolve(h, k)
            features.append(u)
            h = evaluate(u, phi.tables[0], phi.inverse_gamma)
        energy = _total(h)
        g: Tensor | None = None
        for k, phi, u in zip(reversed(w), reversed(layers), reversed(features), strict=True):
            slope = evaluate(u, phi.slope_tables(), phi.inverse_gamma)
            g = convolve_transpose(slope if g is None else slope * g, k)
        assert g is not None
        return energy, g

    @torch.no_grad()
    def _sweep(
        self, x: Tensor, t_hat: float | Tensor, buffers: Buffers | None,
        energy: bool = False, time: bool = False, half: bool = False,
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        """The same without a graph and in reused memory; ∂R/∂t̂ comes from the same adjoints."""
        self._check(x)
        x = x.contiguous()
        buffers = Buffers() if buffers is None else buffers
        layers = self.collapse(self.times(t_hat, len(x)), derivatives=int(time))
        w = self.kernels()
        grad = buffers.get("grad", x.shape, x)
        if len(w) == 1 and kernels.serve(x, w[0]):
            phi = layers[0]
            wanted = (phi.tables[:1] if energy else ()) + phi.tables[1:]
            sums = kernels.first_layer(x, w[0], phi.tables[0], phi.inverse_gamma, wanted, grad)
            return (sums[0] if energy else None), grad, (sums[-1] if time else None)
        shape = (len(x), self.architecture.filters, *x.shape[2:])
        h, last = x, len(w) - 1
        rates: list[Tensor] = []  # ∂_t̂ φ_l(u_l)
        slopes: list[Tensor] = []
        value: Tensor | None = None
        for i, (k, phi) in enumerate(zip(w, layers, strict=True)):
            u = convolve_into(h, k, buffers.get(f"features {i}", shape, x), half and i > 0)
            if time:
                rates.append(buffers.get(f"rates {i}", shape, x))
                evaluate_into(u, phi.tables[1], phi.inverse_gamma, rates[i])
            h = buffers.get("activations", shape, x)
            evaluate_into(u, phi.tables[0], phi.inverse_gamma, h if i < last or energy else None, u)
            slopes.append(u)  # φ' has taken the place of u
        value = _total(h) if energy else None
        dt = _total(rates[last]) if time else None
        g = slopes[last]
        for i in reversed(range(len(w))):
            to = grad if i == 0 else buffers.get("activations", shape, x)
            back = convolve_transpose_into(g, w[i], to, half and i > 0)
            if i:
                if dt is not None:
                    dt = dt + _total(rates[i - 1].mul_(back))
                g = slopes[i - 1].mul_(back)
        return value, grad, dt

    def t_derivatives(self, x: Tensor, t_hat: float | Tensor) -> tuple[Tensor, Tensor]:
        """∂R/∂t̂ and ∂²R/∂t̂², each (B,), by Taylor propagation; differentiable."""
        self._check(x)
        layers = self.collapse(self.times(t_hat, len(x)), derivatives=2)
        w = self.kernels()
        if len(w) == 1 and not self._tracked(x, t_hat) and kernels.serve(x, w[0]):
            phi = layers[0]
            sums = kernels.first_layer(x, w[0], phi.tables[0], phi.inverse_gamma, phi.tables[1:])
            return sums[0], sums[1]
        h, h1, h2 = x, None, None  # h and its t̂-derivatives; those of the image are zero
        for i, (k, phi) in enumerate(zip(w, layers, strict=True)):
            u = convolve(h, k)
            t0, t1, t2 = phi.tables
            inverse = phi.inverse_gamma
            f1, f2 = evaluate(u, t1, inverse), evaluate(u, t2, inverse)
            if h1 is not None and h2 is not None:
                u1, u2 = convolve(h1, k), convolve(h2, k)
                slopes = phi.slope_tables()
                slope = evaluate(u, slopes, inverse)
                f1 = f1 + slope * u1
                f2 = f2 + slope * u2
                f2 = f2 + 2 * evaluate(u, phi.slope_tables(1), inverse) * u1
                curvature = evaluate(u, differentiate(slopes, inverse), inverse)
                f2 = f2 + curvature * u1 * u1
            if i + 1 < len(w):
                h = evaluate(u, t0, inverse)
            h1, h2 = f1, f2
        assert h1 is not None and h2 is not None
        return _total(h1), _total(h2)

    def hessian_product(self, x: Tensor, t_hat: float | Tensor, v: Tensor) -> Tensor:
        """∇²_x R(x,t) v: the derivative of ∇R in the direction v."""
        self._check(x)
        if v.shape != x.shape:
            raise GncpriorError(
                f"The direction {tuple(v.shape)} must have the shape of x {tuple(x.shape)}."
            )
        layers = self.collapse(self.times(t_hat, len(x)))
        w = self.kernels()
        sweeps = []
        h, dh = x, v
        for i, (k, phi) in enumerate(zip(w, layers, strict=True)):
            u, du = convolve(h, k), convolve(dh, k)
            slopes = phi.slope_tables()
            slope = evaluate(u, slopes, phi.inverse_gamma)
            bend = evaluate(u, differentiate(slopes, phi.inverse_gamma), phi.inverse_gamma) * du
            sweeps.append((k, slope, bend))
            if i + 1 < len(w):
                h = evaluate(u, phi.tables[0], phi.inverse_gamma)
                dh = slope * du
        g: Tensor | None = None
        dg: Tensor | None = None
        for k, slope, bend in reversed(sweeps):
            if g is None or dg is None:
                g, dg = slope, bend
            else:
                g, dg = slope * g, bend * g + slope * dg
            g, dg = convolve_transpose(g, k), convolve_transpose(dg, k)
        assert dg is not None
        return dg


def _total(h: Tensor) -> Tensor:
    """The sum over channels and pixels, per image, in float64."""
    return h.flatten(1).sum(1, dtype=torch.float64)
