r"""Back-propagation through the unrolled steps, written out.

Of x_i = prox_{η_iD}(w_i), w_i = x_{i−1} − η_i g_i, g_i = ∇R(x_{i−1},t̂_i), and a loss with v = ∂loss/∂x_i,
the prox turns v into w̄ = (∂prox/∂w)ᵀv, and

    ∂loss/∂η_i = ⟨v, ∂prox/∂η⟩ − ⟨w̄, g_i⟩,
    ∂loss/∂t̂_i = −η_i ⟨w̄, ∂_t̂∇R⟩,
    ∂loss/∂θ = Σ_i −η_i ∂_θ⟨∇R, w̄⟩,
    ∂loss/∂x_{i−1} = w̄ − η_i ∇²R w̄,

with the answers of :mod:`gncprior.sensitivities`.  Only the images x_i and g_i are kept, so memory does
not depend on the features of all steps: R_3 with 30 steps takes little more than R_3 with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gncprior.buffers import Buffers
from gncprior.datasets import Dataset
from gncprior.fidelity import Denoising, Fidelity, Inpainting
from gncprior.prior import Prior
from gncprior.sensitivities import gradient_adjoint
from gncprior.unrolled import DENOISE


class SmoothFidelity(Fidelity, Protocol):
    """A data term whose prox can be differentiated."""

    def prox_adjoint(self, x: Tensor, tau: float | Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """For x = prox_{τD}(v): (∂x/∂v)ᵀw, and ⟨∂x/∂τ, w⟩ per image."""
        ...


@dataclass(frozen=True)
class Problem:
    """Images x̂ and what was seen of them."""

    target: Tensor
    fidelity: SmoothFidelity
    x0: Tensor


def make_problem(task: str, level: float, x: Tensor, generator: torch.Generator) -> Problem:
    """Degrade images: noise of standard deviation ``level``, or that share of pixels missing."""
    if task == DENOISE:
        z = x + level * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return Problem(x, Denoising(z, level), z)
    mask = torch.rand(x.shape, generator=generator, dtype=x.dtype) < level
    fidelity = Inpainting(x, mask)
    return Problem(x, fidelity, fidelity.start())


def crops(
    dataset: Dataset,
    task: str,
    level: float,
    *,
    count: int,
    size: int,
    seed: int = 0,
    chunk: int = 8,
) -> list[Problem]:
    """The fixed set to learn from: ``count`` crops of size × size, a few at a time to stay in cache."""
    x, _, _ = dataset.at_least(size).batch(seed, 0, count=count, size=size, t_hat_range=(0.0, 0.0))
    generator = torch.Generator().manual_seed(seed)
    return [make_problem(task, level, part, generator) for part in x.split(chunk)]


# ---------------------------------------------------------------- the loss and its gradient


@torch.no_grad()
def squared_error(
    prior: Prior, problem: Problem, t_hats: Tensor, etas: Tensor, buffers: Buffers,
    *, weights: Tensor | None = None, residual: Tensor | None = None, parameters: bool = False,
    half: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """‖x_I − x̂‖² of every image (B,), and its derivatives in t̂ and η, each (I, B), in float64.

    t̂ and η are (I,), or (I, B) for one schedule per image.  ``weights`` (B,) multiply the errors before
    they are differentiated; with ``parameters`` the derivatives of their sum in all parameters of the
    prior are added to ``grad``.  A ``residual`` is differentiated in the place of x_I − x̂, for which see
    :mod:`gncprior.natural_gradient`.  With ``half`` inner filters may multiply in bfloat16.
    """
    x, fidelity = problem.x0, problem.fidelity
    shape = (len(t_hats), len(x))
    times = t_hats.to(x).view(len(t_hats), -1).expand(shape)
    sizes = etas.to(x).view(len(etas), -1).expand(shape)
    points, slopes = [x], []
    for t_hat, eta in zip(times, sizes, strict=True):
        slopes.append(prior.grad(x, t_hat, buffers=buffers, half=half).clone())
        x = fidelity.prox(torch.addcmul(x, slopes[-1], _spread(eta), value=-1), eta)
        points.append(x)
    v = x - problem.target
    errors = _total(v * v)
    v = v if residual is None else residual
    v = 2 * v if weights is None else 2 * v * _spread(weights.to(v))
    dt_hats = torch.zeros(shape, dtype=torch.float64)
    detas = torch.zeros_like(dt_hats)
    for i in reversed(range(len(times))):
        v, detas[i] = fidelity.prox_adjoint(points[i + 1], sizes[i], v)
        detas[i] -= _total(v * slopes[i])
        # the derivatives of ⟨∇R, −ηv⟩
        v_eta = v * -_spread(sizes[i])
        hv, dt_hats[i] = gradient_adjoint(
            prior, points[i], times[i], v_eta, buffers=buffers, parameters=parameters, half=half
        )
        v = v + hv
    return errors, dt_hats, detas


def _spread(per_image: Tensor) -> Tensor:
    return per_image.view(-1, 1, 1, 1)


def _total(x: Tensor) -> Tensor:
    return x.flatten(1).sum(1, dtype=torch.float64)
