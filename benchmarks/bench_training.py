"""A step of training by written-out sweeps against the plain formula with a graph of graphs on torch alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from measure import Job, Row, Setting, main, ratio

from gncprior.native import kernels
from gncprior.prior import Architecture, Prior
from gncprior.score_matching import ScoreMatching, loss_by_autograd


def jobs(layers: int, batch: int, patch: int, half: bool) -> tuple[Job, Job]:
    """Loss and gradient of all parameters, by us and by autograd; same batch, same t̂ term.

    With ``half``, as in `--recipe deep`, our inner filters multiply in bfloat16 where they can.
    """
    prior = Prior(Architecture(layers=layers)).start()
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.rand(2, batch, 1, patch, patch, generator=generator)
    t_hat = torch.linspace(*prior.t_hat_range, batch)
    objective = ScoreMatching(prior, half=half)

    def plain() -> None:
        for p in prior.parameters():
            p.grad = None
        kernels.select("torch")
        sum(loss_by_autograd(prior, x, noise, t_hat)).backward()
        kernels.select("")

    return lambda: objective(x, noise, t_hat), plain


def measure(setting: Setting) -> Iterator[Row]:
    batch, patch = (2, 16) if setting.quick else (16, 48)
    few = Setting(setting.quick, max(3, setting.repeats // 3), setting.threads)
    for layers, half, target in (
        (1, False, 10.0),
        (2, False, None),
        (2, True, None),
        (3, False, 4.0),
        (3, True, 4.0),
    ):
        ours, plain = jobs(layers, batch, patch, half)
        what = f"autograd / our step of R_{layers}, {batch} patches of {patch}²"
        what += ", bfloat16" if half else ""
        yield ratio(what, plain, ours, few, at_least=target)


if __name__ == "__main__":
    main("training", measure)
