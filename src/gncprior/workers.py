"""The processes of a run and the signals they get: one process, or those that ``torchrun`` started.

The processes see the same batches and hold the same weights; all that they exchange is one sum of
vectors a step.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from gncprior.errors import GncpriorError


class Workers:
    """The processes that share a batch: one, or those that ``torchrun`` started."""

    def __init__(self, device: str) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if device == "cuda" and self.size > 1:
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        try:
            self.device = torch.device(device)
            torch.zeros(1, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise GncpriorError(f"The device {device!r} cannot be used here: take cpu.") from error

    def __enter__(self) -> Self:
        if self.size > 1:
            # Imported later, by torch's optimizers for one, this binds the group to the defaults of
            # its functions; the group's threads then outlive it and may abort the process at its end.
            importlib.import_module("torch.distributed.nn.functional")
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        return self

    def __exit__(self, *_: object) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def slice(self, count: int) -> range:
        """This process's part of ``count`` images."""
        if count < self.size:
            raise GncpriorError(f"A batch of {count} cannot be shared by {self.size} processes.")
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def sum(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Give all processes the values of the first."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)


@contextmanager
def signals() -> Iterator[list[int]]:
    """The signals that asked to stop; a second Ctrl-C does not wait."""
    received: list[int] = []

    def receive(number: int, _frame: object) -> None:
        if number in received:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
