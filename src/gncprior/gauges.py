"""The gauges of a training run: its loss and speed, and how well the prior denoises in one step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from gncprior.buffers import Buffers
from gncprior.datasets import Dataset
from gncprior.metrics import psnr
from gncprior.prior import Prior

SIGMAS = (5, 15, 25, 50)  # of validation, in grey levels of 255


class Meter:
    """The mean terms of the loss and the throughput since they were read last."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._restart()

    def _restart(self) -> None:
        self._sums, self._steps, self._begin = np.zeros(3), 0, time.monotonic()

    def add(self, terms: np.ndarray) -> None:
        self._sums += terms
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that does not count."""
        begin = time.monotonic()
        yield
        self._begin += time.monotonic() - begin

    def read(self) -> dict[str, float]:
        """Nothing if no step was taken."""
        if not self._steps:
            return {}
        x, t, boundary = (self._sums / self._steps).tolist()
        rate = self._steps * self._batch / (time.monotonic() - self._begin)
        self._restart()
        return {
            "loss": x + t + boundary,
            "x": x,
            "t": t,
            "boundary": boundary,
            "patches_per_second": rate,
        }


@torch.no_grad()
def one_step_psnr(
    prior: Prior, images: Dataset, sigmas: Sequence[float] = SIGMAS
) -> dict[str, float]:
    """The mean PSNR of one-step denoising x = z − σ²∇R(z, log σ²), z = x + noise of σ/255, in dB."""
    buffers, like = Buffers(), prior.filters[0]
    totals = dict.fromkeys(sigmas, 0.0)
    for k in range(len(images)):
        x = images.tensor(k).to(like)
        noise = torch.from_numpy(np.random.default_rng(k).standard_normal(x.shape)).to(like)
        for level in sigmas:
            sigma = level / 255
            z = x + sigma * noise
            restored = z.sub_(prior.grad(z, 2 * math.log(sigma), buffers=buffers), alpha=sigma**2)
            totals[level] += float(psnr(restored, x, data_range=1.0))
    return {f"psnr_{level:g}": total / len(images) for level, total in totals.items()}
