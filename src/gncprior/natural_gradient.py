r"""Natural-gradient steps for models that are nearly good already.

Where a model is close to its best, gradients of batches are mostly noise, and the loss is far steeper in some
directions than in others.  A step that moves every parameter by about the same length, as AdaBelief's,
then costs more in the steep directions than it gains in the flat ones.  For a squared error the covariance of the
gradients is nearly proportional to the curvature, and dividing by it (Amari 1998) makes all directions alike.

The covariance of a whole tensor is too large to be had.  Seen along each of its axes it is not: the
eigenvectors Q_1, Q_2, … of the second moments of gradients along axis 1, 2, … turn the tensor into
coordinates that are hardly correlated, and there the second moments v of single coordinates serve (George et
al. 2018).  With the mean gradient m in these coordinates and v̄, the mean of v,

    m ← β₁m + (1−β₁)g,    v ← β₂v + (1−β₂)g²,    θ ← θ − η√v̄ · Qᵀ[ m/(1−β₁ᵏ) / (v + λv̄) ] .

The factor √v̄ makes the step independent of the scale of the loss.  Q, v̄ and the first v come from gradients of
some batches at the start (:meth:`NaturalGradient.look`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gncprior.errors import GncpriorError


class NaturalGradient:
    """Steps on tensors from their ``grad``: :meth:`look` at some batches first, then :meth:`step`.

    Filters (outputs, inputs, height, width) are taken as matrices, whose second axis is all that one output sees.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        damping: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.995),
    ) -> None:
        self.damping, self.betas = damping, betas
        self.number = 0
        self._tensors = list(tensors)
        self._seen: list[list[Tensor]] = [[] for _ in tensors]
        self._coordinates: list[_Coordinates] = []

    def look(self) -> None:
        """Learn from the present gradients; nothing moves."""
        for seen, tensor in zip(self._seen, self._tensors, strict=True):
            seen.append(_gradient(tensor))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step along the present gradients."""
        if not self._coordinates:
            if not self._seen or not self._seen[0]:
                raise GncpriorError(
                    "A natural gradient needs gradients to look at before it steps."
                )
            self._coordinates = [_Coordinates(torch.stack(seen)) for seen in self._seen]
            self._seen = []
        self.number += 1
        beta1, beta2 = self.betas
        for tensor, at in zip(self._tensors, self._coordinates, strict=True):
            g = at.turn(_gradient(tensor))
            at.mean.lerp_(g, 1 - beta1)
            at.square.lerp_(g.square(), 1 - beta2)
            u = at.mean / (at.square + self.damping * at.usual)
            length = lr * at.usual**0.5 / (1 - beta1**self.number)
            tensor.sub_(at.turn_back(u).view_as(tensor), alpha=length)


class _Coordinates:
    """The axes' eigenvectors Q and, in their coordinates, m and v; from gradients (looks, …) of one tensor."""

    def __init__(self, gradients: Tensor) -> None:
        self.bases = [_eigenvectors(gradients, axis) for axis in range(1, gradients.dim())]
        self.square = torch.zeros_like(gradients[0])
        for g in gradients:
            self.square += self.turn(g).square() / len(gradients)
        self.mean = torch.zeros_like(self.square)
        self.usual = float(self.square.mean().clamp(min=torch.finfo(torch.float32).tiny))

    def turn(self, x: Tensor) -> Tensor:
        for axis, q in enumerate(self.bases):
            x = torch.tensordot(x, q, ([axis], [0])).movedim(-1, axis)
        return x

    def turn_back(self, x: Tensor) -> Tensor:
        for axis, q in enumerate(self.bases):
            x = torch.tensordot(x, q, ([axis], [1])).movedim(-1, axis)
        return x


def _gradient(tensor: Tensor) -> Tensor:
    """Its gradient, a copy; of filters as a matrix."""
    if tensor.grad is None:
        return torch.zeros_like(tensor.detach()).reshape(_shape(tensor))
    return tensor.grad.detach().clone().reshape(_shape(tensor))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return (len(tensor), tensor[0].numel()) if tensor.dim() == 4 else tuple(tensor.shape)


def _eigenvectors(gradients: Tensor, axis: int) -> Tensor:
    """Of the second moments of gradients (looks, …) along an axis, in the columns of a matrix."""
    rows = gradients.movedim(axis, 0).flatten(1).double()
    return torch.linalg.eigh(rows @ rows.T).eigenvectors.to(gradients)
