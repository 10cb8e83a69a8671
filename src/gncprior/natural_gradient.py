r"""Natural-gradient steps for models that are nearly good already.

Where a model is close to its best, gradients of batches are mostly noise, and the loss is far steeper in some
directions than in others.  A step that moves every parameter by about the same length, as AdaBelief's,
then costs more in the steep directions than it gains in the flat ones.  Dividing by the curvature makes all
directions alike (Amari 1998).

Of a squared error Σ_b ‖r_b‖²/u_b with residuals r_b = x_b(θ) − x̂_b the curvature is the Gauss–Newton matrix
H = Σ_b 2J_bᵀJ_b/u_b.  Back-propagation of random numbers ε_b with variance u_b/2 in the place of the residuals
gives vectors s = Σ_b 2J_bᵀε_b/u_b, and their second moments E ssᵀ are H.  (Those of the gradients themselves are
not: residuals of neighbouring pixels hang together, and hardly ever look like what would make images blow up.)

The matrix of a whole tensor is too large to be had.  Seen along each of its axes it is not: the eigenvectors
Q_1, Q_2, … of the second moments of s along axis 1, 2, … turn the tensor into coordinates that are hardly
correlated, and there the second moments v of single coordinates serve (George et al. 2018).  What is left of the
correlation is steepest in few directions, which the s_1 … s_N themselves span.  With the mean gradient m and
with v̄, the mean of v over a tensor, all in these coordinates,

    m ← β₁m + (1−β₁)g,    F = diag(v + λv̄) + ρ/N Σ_k s_k s_kᵀ,    θ ← θ − η Qᵀ F⁻¹ m/(1−β₁ᵏ),

where F⁻¹ takes a system of N equations (Woodbury).  η is dimensionless: 1 were a Newton step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gncprior.errors import GncpriorError

LONGEST = 3.0  # times the median length of what was looked at


class NaturalGradient:
    """Steps on tensors from their ``grad``: :meth:`look` at random vectors s first, then :meth:`step`.

    ``dampings`` are the λ of the tensors, ``share`` is ρ and ``keep`` the largest N.  Looks after the first step
    move v by 1 − β₂.  Filters (outputs, inputs, height, width) are taken as matrices, whose second axis is all
    that one output sees.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        dampings: Sequence[float],
        share: float = 0.1,
        keep: int = 320,
        betas: tuple[float, float] = (0.9, 0.998),
    ) -> None:
        self.share, self.keep, self.betas = share, keep, betas
        self.number = 0
        self._tensors, self._dampings = list(tensors), list(dampings)
        self._sizes = [t.numel() for t in tensors]
        self._bases: list[list[Tensor]] = []  # Q of every axis of every tensor
        self._seen: list[
            Tensor
        ] = []  # s_k, all tensors in one vector, in the coordinates of Q once that is known
        self._square = self._mean = torch.zeros(0)  # v and m
        self._usual = 0.0  # the median length of s
        self._metric: tuple[Tensor, Tensor, Tensor] | None = None

    @torch.no_grad()
    def look(self) -> None:
        """Learn from the present ``grad``, one s; nothing moves.  What is not finite is passed over."""
        s = self._gradient()
        if not bool(s.isfinite().all()):
            return
        if self._bases:
            s = self._turn(s)
            s *= min(1.0, LONGEST * self._usual / max(float(s.norm()), 1e-30))
            self._square.lerp_(s.square(), 1 - self.betas[1])
            self._metric = None
        self._seen = [*self._seen[-self.keep + 1 :], s] if self._bases else [*self._seen, s]

    @torch.no_grad()
    def length(self) -> float:
        """Of the present gradients in units of what was seen: ‖Qg/d‖, d² = v + λv̄."""
        root, _, _ = self._prepared()
        return float((self._turn(self._gradient()) / root).norm())

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step along the present gradients."""
        root, seen, inverse = self._prepared()
        self.number += 1
        self._mean.lerp_(self._turn(self._gradient()), 1 - self.betas[0])
        y = self._mean / root
        y -= seen.T @ (inverse @ (seen @ y))
        length = lr / (1 - self.betas[0] ** self.number)
        for tensor, u in zip(
            self._tensors, self._turn(y / root, back=True).split(self._sizes), strict=True
        ):
            tensor.sub_(u.view_as(tensor), alpha=length)

    def _begin(self) -> None:
        """Q, v and the usual length from all that was seen."""
        if not self._seen:
            raise GncpriorError("A natural gradient needs something to look at before it steps.")
        seen = torch.stack(self._seen)
        lengths = seen.norm(dim=1)
        self._usual = float(lengths.median())
        seen *= (LONGEST * self._usual / lengths.clamp(min=1e-30)).clamp(max=1)[:, None]
        for tensor, part in zip(self._tensors, seen.split(self._sizes, 1), strict=True):
            vectors = part.reshape(len(part), *_shape(tensor))
            self._bases.append([_eigenvectors(vectors, axis) for axis in range(1, vectors.dim())])
        turned = [self._turn(s) for s in seen]
        self._square = torch.stack(turned).square().mean(0)
        self._mean = torch.zeros_like(self._square)
        self._seen = turned[-self.keep :]

    def _prepared(self) -> tuple[Tensor, Tensor, Tensor]:
        if not self._bases:
            self._begin()
        if self._metric is None:
            self._metric = self._prepare()
        return self._metric

    def _prepare(self) -> tuple[Tensor, Tensor, Tensor]:
        """d = √(v + λv̄), the rows s_k/d, and the matrix of F⁻¹ = d⁻¹(1 − SᵀMS)d⁻¹, M = ρ/N (1 + ρ/N SSᵀ)⁻¹."""
        parts = zip(self._square.split(self._sizes), self._dampings, strict=True)
        tiny = torch.finfo(self._square.dtype).tiny
        root = torch.cat([v + damping * v.mean() + tiny for v, damping in parts]).sqrt()
        seen = torch.stack(self._seen) / root
        weight = self.share / len(seen)
        system = weight * (seen @ seen.T).double() + torch.eye(len(seen), dtype=torch.float64)
        return root, seen, (weight * torch.linalg.inv(system)).to(seen)

    def _gradient(self) -> Tensor:
        """All gradients in one vector."""
        grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in self._tensors]
        return torch.cat([g.detach().flatten() for g in grads])

    def _turn(self, x: Tensor, back: bool = False) -> Tensor:
        """Into the coordinates of Q, or back."""
        parts = []
        for tensor, bases, part in zip(
            self._tensors, self._bases, x.split(self._sizes), strict=True
        ):
            y = part.view(_shape(tensor))
            for axis, q in enumerate(bases):
                y = torch.tensordot(y, q, ([axis], [int(back)])).movedim(-1, axis)
            parts.append(y.flatten())
        return torch.cat(parts)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return (len(tensor), tensor[0].numel()) if tensor.dim() == 4 else tuple(tensor.shape)


def _eigenvectors(vectors: Tensor, axis: int) -> Tensor:
    """Of the second moments of vectors (N, …) along an axis, in the columns of a matrix."""
    rows = vectors.movedim(axis, 0).flatten(1).double()
    return torch.linalg.eigh(rows @ rows.T).eigenvectors.to(vectors)
