"""Memory that is used again: a fresh tensor of tens of megabytes costs more in page faults than in arithmetic."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Buffers:
    """Named tensors handed out again and again; their content is whatever the last user left.

    A loop makes one and passes it to what it calls.  Buffers only ever grow, so a loop over images
    of different sizes settles at the size of the largest.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """A contiguous tensor of this shape with the dtype and device of ``like``."""
        size = math.prod(shape)
        memory = self._memory.get(name)
        if (
            memory is None
            or memory.numel() < size
            or memory.dtype != like.dtype
            or memory.device != like.device
        ):
            memory = torch.empty(size, dtype=like.dtype, device=like.device)
            self._memory[name] = memory
        return memory[:size].view(shape)
