r"""Data terms D(z, x): how well an image x explains what was observed (paper, section 4).

A solver needs of a data term its proximal map, and its value where energies are wanted:

.. math:: \mathrm{prox}_{τD}(v) = \arg\min_x\; τ D(z,x) + ½‖x − v‖²

Any object with these two methods serves (:class:`Fidelity`).  The ones here are separable:

* denoising, D = Σ_p (x_p − z_p)²/(2σ_p²):  prox = (v + τz/σ²)/(1 + τ/σ²);
* inpainting, D = 0 if x = z where observed, else ∞:  prox = z where observed, v elsewhere
  (the paper prints the two cases swapped);
* noisy inpainting: denoising with σ_p = ∞ where nothing was observed.

A mask is True where a pixel is unknown.  τ is a number or one value per image.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from gncprior.errors import GncpriorError


class Fidelity(Protocol):
    """What a solver needs; ``prox`` must leave v alone."""

    def value(self, x: Tensor) -> Tensor:
        """D(z, x): one value per image, (B,)."""
        ...

    def prox(self, v: Tensor, tau: float | Tensor) -> Tensor:
        """The minimiser of τD(z, x) + ½‖x − v‖², shaped like v."""
        ...


class Denoising:
    """D = Σ (x − z)²/(2σ²): Gaussian noise of standard deviation σ.

    ``sigma`` is a number, one value per image (B,), or a map that broadcasts against z.
    """

    def __init__(self, z: Tensor, sigma: float | Tensor) -> None:
        self.z = _observation(z)
        self.precision = 1 / _noise_level(sigma, z).square()  # 1/σ²

    def start(self) -> Tensor:
        """x_0 = z."""
        return self.z

    def value(self, x: Tensor) -> Tensor:
        return _total((x - self.z).square() * self.precision) / 2

    def grad(self, x: Tensor) -> Tensor:
        """∇D = (x − z)/σ²."""
        return (x - self.z) * self.precision

    def prox(self, v: Tensor, tau: float | Tensor) -> Tensor:
        return self.prox_(v.clone(), tau)

    def prox_(self, v: Tensor, tau: float | Tensor) -> Tensor:
        """The same written over v, for loops."""
        a = _per_image(tau, v) * self.precision
        return v.lerp_(self.z, a / (1 + a))

    def prox_adjoint(self, x: Tensor, tau: float | Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """For x = prox_{τD}(v): (∂x/∂v)ᵀw, and ⟨∂x/∂τ, w⟩ per image."""
        w = w / (1 + _per_image(tau, w) * self.precision)
        return w, _total(self.precision * (self.z - x) * w)


class NoisyInpainting(Denoising):
    """Pixels are observed with noise of standard deviation σ, or not at all (mask True)."""

    def __init__(self, z: Tensor, mask: Tensor, sigma: float | Tensor) -> None:
        mask = _mask(mask, z)
        super().__init__(z.masked_fill(mask, 0), sigma)
        self.precision = torch.where(mask, 0, self.precision)


class Inpainting:
    """D = 0 where x agrees with the observed pixels exactly, ∞ otherwise."""

    def __init__(self, z: Tensor, mask: Tensor) -> None:
        self.mask = _mask(mask, z)
        self.z = _observation(z.masked_fill(self.mask, 0))

    def start(self) -> Tensor:
        """x_0: what is observed, and its mean in every channel elsewhere.

        For a prior that does not see a constant added to the image, it is x_0 = z of the image with its
        mean taken off, and what comes out moves along with whatever is added to z.
        """
        mean = self.z.sum((2, 3), keepdim=True) / (~self.mask).sum((2, 3), keepdim=True).clamp(1)
        return torch.where(self.mask, mean, self.z)

    def value(self, x: Tensor) -> Tensor:
        agrees = (self.mask | (x == self.z)).flatten(1).all(1)
        return torch.where(agrees, 0.0, math.inf).double()

    def prox(self, v: Tensor, tau: float | Tensor) -> Tensor:
        return self.prox_(v.clone(), tau)

    def prox_(self, v: Tensor, tau: float | Tensor) -> Tensor:  # noqa: ARG002  (a projection)
        """The same written over v, for loops; observed pixels are those of z, bit for bit."""
        return torch.where(self.mask, v, self.z, out=v)

    def prox_adjoint(self, x: Tensor, tau: float | Tensor, w: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """For x = prox_{τD}(v): (∂x/∂v)ᵀw, and ⟨∂x/∂τ, w⟩ per image, which is 0."""
        return w * self.mask, torch.zeros(len(w), dtype=torch.float64, device=w.device)


# ---------------------------------------------------------------- what may go in


def _total(x: Tensor) -> Tensor:
    return x.flatten(1).sum(1, dtype=torch.float64)


def _per_image(tau: float | Tensor, v: Tensor) -> Tensor:
    tau = torch.as_tensor(tau, dtype=v.dtype, device=v.device)
    return tau.view(-1, 1, 1, 1) if tau.dim() == 1 else tau


def _observation(z: Tensor) -> Tensor:
    if z.dim() != 4 or z.numel() == 0:
        raise GncpriorError(
            "An observation must be shaped (batch, channels, height, width) and hold pixels, "
            f"not {tuple(z.shape)}."
        )
    if not z.is_floating_point():
        raise GncpriorError(f"An observation must be floating-point, not {z.dtype}: convert it.")
    if not bool(z.isfinite().all()):
        b, c, row, column = (~z.isfinite()).nonzero()[0].tolist()
        raise GncpriorError(
            f"The pixel at row {row}, column {column} (image {b}, channel {c}) is "
            f"{float(z[b, c, row, column])}: mark such pixels as unknown by a mask, or replace them."
        )
    return z


def _noise_level(sigma: float | Tensor, z: Tensor) -> Tensor:
    """σ broadcastable against z."""
    sigma = torch.as_tensor(sigma, dtype=z.dtype, device=z.device)
    if not bool(((sigma > 0) & sigma.isfinite()).all()):
        value = f", not {float(sigma)}" if sigma.dim() == 0 else " everywhere"
        raise GncpriorError(f"The noise level sigma must be positive and finite{value}.")
    if sigma.dim() == 1 and len(sigma) in (1, len(z)):
        return sigma.view(-1, 1, 1, 1)
    if sigma.dim() == 1 or not _broadcasts(sigma, z):
        raise GncpriorError(
            "The noise level sigma must be a number, one value per image or a map that fits "
            f"{tuple(z.shape)}, not {tuple(sigma.shape)}."
        )
    return sigma


def _mask(mask: Tensor, z: Tensor) -> Tensor:
    """The mask in the shape of z."""
    if mask.dtype != torch.bool:
        raise GncpriorError(f"A mask must be boolean, True where unknown, not {mask.dtype}.")
    if mask.shape[-2:] != z.shape[-2:] or not _broadcasts(mask, z):
        raise GncpriorError(
            f"A mask of shape {tuple(mask.shape)} does not fit an image of shape {tuple(z.shape)}."
        )
    mask = mask.expand_as(z)
    if z.numel() and bool(mask.flatten(1).all(1).any()):
        raise GncpriorError(
            "The mask marks every pixel of an image as unknown: nothing is observed."
        )
    return mask


def _broadcasts(a: Tensor, z: Tensor) -> bool:
    """Whether a fits z: a number, (H, W), or four axes of which some may be 1."""
    sizes = zip(reversed(a.shape), reversed(z.shape), strict=False)
    return a.dim() in (0, 2, 4) and all(n in (1, m) for n, m in sizes)
