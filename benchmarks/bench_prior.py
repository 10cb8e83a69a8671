"""∇R against matrix products, against torch's convolutions, and over the size of images."""

from __future__ import annotations

import multiprocessing
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import Job, Row, Setting, in_turn, main, ratio, seconds, spread
from torch import Tensor

from gncprior.buffers import Buffers
from gncprior.filters import reflected
from gncprior.prior import Architecture, Prior
from gncprior.splines import evaluate_into

T_HAT = -4.6  # log of σ² for σ = 0.1


def prior_of(layers: int) -> Prior:
    return Prior(Architecture(layers=layers)).start().requires_grad_(False)


def image(height: int, width: int) -> Tensor:
    return torch.rand(1, 1, height, width, generator=torch.Generator().manual_seed(0))


def gradient(prior: Prior, x: Tensor) -> Job:
    buffers = Buffers()
    return lambda: prior.grad(x, T_HAT, buffers=buffers)


def extend(x: Tensor, size: int) -> Tensor:
    rows, columns = (reflected(n, size) for n in x.shape[-2:])
    return x[..., rows, :][..., columns]


def fold(x: Tensor, shape: torch.Size, size: int) -> Tensor:
    rows, columns = (reflected(n, size) for n in shape[-2:])
    x = x.new_zeros(*x.shape[:-2], shape[-2], x.shape[-1]).index_add_(-2, rows, x)
    return x.new_zeros(shape).index_add_(-1, columns, x)


def by_torch(prior: Prior, x: Tensor, memory_format: torch.memory_format) -> Job:
    """∇R_1 by torch's convolutions, with our splines in between."""
    w = prior.kernels()[0].contiguous(memory_format=memory_format)
    (phi,) = prior.collapse(prior.times(T_HAT, len(x)))

    def job() -> Tensor:
        u = F.conv2d(extend(x, w.shape[-1]), w).contiguous(memory_format=memory_format)
        evaluate_into(u, phi.tables[0], phi.inverse_gamma, None, u)
        return fold(F.conv_transpose2d(u, w), x.shape, w.shape[-1])

    return job


def bare_convolutions(prior: Prior, x: Tensor) -> Job:
    """What ∇R_L must at least convolve, by torch in channels-last: K_1 … K_L and back."""
    last = torch.channels_last
    filters = [w.contiguous(memory_format=last) for w in prior.kernels()]
    padded = extend(x, filters[0].shape[-1])
    h = torch.rand(1, len(filters[0]), *x.shape[2:]).contiguous(memory_format=last)

    def job() -> None:
        F.conv2d(padded, filters[0])
        for w in filters[1:]:
            F.conv2d(h, w, padding=w.shape[-1] // 2)
        for w in reversed(filters[1:]):
            F.conv_transpose2d(h, w, padding=w.shape[-1] // 2)
        F.conv_transpose2d(h, filters[0])

    return job


def memory(field: str) -> int:
    """Bytes, as the kernel counts them for this process."""
    status = Path("/proc/self/status").read_text("utf-8")
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    if found is None:
        raise RuntimeError(f"The system does not tell {field}.")
    return 1024 * int(found[1])


def images_needed(side: int, threads: int) -> float:
    """Growth of the resident set at its peak during ∇R_1, in images; for a fresh process."""
    torch.set_num_threads(threads)
    prior = prior_of(1)
    gradient(prior, image(64, 64))()  # what is loaded at first use
    x = image(side, side)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    gradient(prior, x)()
    return (memory("VmHWM") - before) / (4 * x.numel())


def measure(setting: Setting) -> Iterator[Row]:
    with torch.no_grad():
        yield from times(setting)
    side = 512 if setting.quick else 2048
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        needed = pool.apply(images_needed, (side, setting.threads))
    yield Row(f"memory of ∇R_1 of {side}×{side}, in images", needed, needed, needed, at_most=3)
    with torch.no_grad():
        yield cost_per_pixel(setting)


def times(setting: Setting) -> Iterator[Row]:
    shape = (48, 32) if setting.quick else (481, 321)
    size = f"{shape[0]}×{shape[1]}"
    x = image(*shape)
    prior = prior_of(1)
    ours = gradient(prior, x)
    n = 256 if setting.quick else 2048
    a, b, c = torch.rand(n, n), torch.rand(n, n), torch.empty(n, n)
    flops = 4 * 48 * 49 * x.numel() / (2 * n**3)  # of ∇R_1, in matrix products
    mine, product = in_turn([ours, lambda: torch.mm(a, b, out=c)], setting.repeats)
    share = spread([flops * q / p for p, q in zip(mine, product, strict=True)])
    rate = 2e-9 * n**3 / statistics.median(product)
    note = f"{1e3 * statistics.median(mine):.3g} ms; sgemm {rate:.0f} GFLOP/s"
    yield Row(f"FLOP rate of ∇R_1 of {size} / sgemm's", *share, at_least=0.4, note=note)

    formats = [torch.contiguous_format, torch.channels_last]
    rivals = [by_torch(prior, x, f) for f in formats]
    for rival in rivals:
        torch.testing.assert_close(rival(), ours(), rtol=1e-3, atol=1e-3)
    rival = min(rivals, key=lambda job: min(seconds(job) for _ in range(3)))
    yield ratio(f"torch's convolutions / ∇R_1 of {size}", rival, ours, setting, at_least=5)

    prior = prior_of(3)
    ours, bare = gradient(prior, x), bare_convolutions(prior, x)
    yield ratio(f"∇R_3 of {size} / its bare convolutions", ours, bare, setting, at_most=1.3)
    prior = prior_of(2)
    ours, bare = gradient(prior, x), bare_convolutions(prior, x)
    yield ratio(f"∇R_2 of {size} / its bare convolutions", ours, bare, setting)


def cost_per_pixel(setting: Setting) -> Row:
    """The dearest size over the cheapest, every size on as many pixels in a sample."""
    sides = (64, 128, 256) if setting.quick else (512, 1024, 2048, 4096)
    prior = prior_of(1)
    jobs = [gradient(prior, image(side, side)) for side in sides]
    for job in jobs:
        job()
    costs = []
    for _ in range(max(3, setting.repeats // 3)):
        calls = [(sides[-1] // side) ** 2 for side in sides]
        costs.append([seconds(job, n) / s**2 for job, n, s in zip(jobs, calls, sides, strict=True)])
    middle = [statistics.median(column) for column in zip(*costs, strict=True)]
    _, low, high = spread([max(row) / min(row) for row in costs])
    note = "ns a pixel: " + ", ".join(f"{1e9 * m:.3g}" for m in middle)
    what = f"cost per pixel from {sides[0]}² to {sides[-1]}², dearest / cheapest"
    return Row(what, max(middle) / min(middle), low, high, at_most=1.15, note=note)


if __name__ == "__main__":
    main("prior", measure)
