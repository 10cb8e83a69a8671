"""The adjoint test ⟨Kx, y⟩ = ⟨x, Kᵀy⟩, for our operators and for anyone's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def dot_test(
    forward: Callable[[Tensor], Tensor],
    adjoint: Callable[[Tensor], Tensor],
    x_shape: Sequence[int],
    y_shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> float:
    """|⟨Kx, y⟩ − ⟨x, Kᵀy⟩| / (‖Kx‖‖y‖ + ‖x‖‖Kᵀy‖) for one random pair x, y.

    About the rounding error of ``dtype`` if ``adjoint`` is the transpose of ``forward``, and far
    above it if it is not.  The sums are taken in float64.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tuple(x_shape), dtype=dtype, generator=generator)
    y = torch.randn(tuple(y_shape), dtype=dtype, generator=generator)
    kx, kty = forward(x).double(), adjoint(y).double()
    if kx.shape != y.shape or kty.shape != x.shape:
        raise ValueError(
            f"The operator maps {tuple(x.shape)} to {tuple(kx.shape)} "
            f"and back {tuple(y.shape)} to {tuple(kty.shape)}."
        )
    x, y = x.double(), y.double()
    size = kx.norm() * y.norm() + x.norm() * kty.norm()
    difference = (kx * y).sum() - (x * kty).sum()
    return float(difference.abs() / size) if size > 0 else float(difference.abs())
