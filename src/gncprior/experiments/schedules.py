"""Figure `schedules`: energy and PSNR after every step, for three ways to choose t (paper, figure 4).

Denoising at σ = 0.1 by 30 steps: predefined (t̂ linear from log σ² to t̂_min), joint (from the same t̂) and
learned.  The energy is E(x_i) = R(x_i, t_min) + D(z, x_i), the one that graduated non-convexity is after,
whatever t̂ a scheme has come to, in nats per pixel.  Where a prior has no learned schedule of 30 steps,
its longest shorter one is drawn, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gncprior import plots
from gncprior.datasets import Dataset
from gncprior.experiments.common import (
    SIGMA,
    Batch,
    Progress,
    batches,
    label_of,
    learned_schedules,
    open_priors,
    pictures,
    quiet,
    title,
)
from gncprior.metrics import psnr
from gncprior.prior import Prior
from gncprior.schedules import linear, t_hat_from_sigma
from gncprior.solvers import State, solve_joint, solve_scheduled
from gncprior.unrolled import DENOISE, Schedules

NAME = "schedules"
STEPS = 30
CROP = 128
SCHEMES = {"predefined": plots.BLUE, "joint": plots.VERMILLION, "learned": plots.GREEN}


def run(
    out: Path,
    quick: bool = False,
    *,
    priors: Sequence[str] = (),
    data: Path | None = None,
    limit: int | None = None,
    crop: int = CROP,
    progress: Progress = quiet,
) -> list[Path]:
    """Compute, save and draw; of every image the middle, crop × crop (0: all of it)."""
    images = pictures(data, limit, quick)
    models = open_priors(priors)
    arrays: dict[str, np.ndarray] = {
        "priors": np.array([label_of(name) for name in models]),
        "images": np.array(len(images)),
        "title": np.array(images.title),
        "crop": np.array(crop),
        "sigma": np.array(SIGMA),
    }
    for number, (name, prior) in enumerate(models.items()):

        def watch(done: int, total: int, number: int = number) -> None:
            progress(number * total + done, len(models) * total)

        learned = learned_schedules(name, prior, DENOISE, STEPS)
        facts = measure(prior, images, learned, crop=crop, progress=watch)
        arrays |= {f"{label_of(name)}.{key}": value for key, value in facts.items()}
    saved = plots.save_data(out, NAME, arrays)
    return [saved, *draw(plots.load_data(saved), out)]


# ---------------------------------------------------------------- numbers


def measure(
    prior: Prior,
    images: Dataset,
    learned: Schedules | None,
    *,
    crop: int = 0,
    steps: int = STEPS,
    progress: Progress = quiet,
) -> dict[str, np.ndarray]:
    """For every scheme energy (per pixel), psnr and t_hat, each (I+1, images): after 0 … I steps."""
    schemes = [scheme for scheme in SCHEMES if scheme != "learned" or learned is not None]
    parts: dict[str, list[np.ndarray]] = {}
    order: list[int] = []
    for batch in batches(images, DENOISE, SIGMA, crop=crop, size=4):
        for scheme in schemes:
            for key, values in trace(prior, batch, scheme, learned, steps).items():
                parts.setdefault(f"{scheme}.{key}", []).append(values)
        order += batch.index
        progress(len(order), len(images))
    back = np.argsort(order)
    return {key: np.concatenate(values, axis=1)[:, back] for key, values in parts.items()}


@torch.no_grad()
def trace(
    prior: Prior, batch: Batch, scheme: str, learned: Schedules | None, steps: int = STEPS
) -> dict[str, np.ndarray]:
    """Energy at t_min per pixel, PSNR and t̂ along the steps of one scheme, each (I+1, B)."""
    low, high = prior.t_hat_range
    t_hat0 = min(max(t_hat_from_sigma(SIGMA), low), high)
    fidelity = batch.fidelity(SIGMA)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def look(x: Tensor, t_hat: Tensor) -> None:
        energy = (prior.energy(x, low) + fidelity.value(x)) / x[0].numel()
        seen.append((energy, psnr(x, batch.x, data_range=1.0), t_hat.clone()))

    def watch(state: State) -> None:
        look(state.x, state.t_hat)

    schedule, etas, energy = linear(t_hat0, low, steps), None, prior
    if scheme == "learned":
        assert learned is not None
        (schedule, etas), energy = learned.at(SIGMA), learned.prior_at(prior, SIGMA)
    look(batch.z, schedule[:1].float().expand(len(batch.z)))
    if scheme == "joint":
        solve_joint(prior, fidelity, batch.z, t_hat0, max_iter=steps, callback=watch)
    else:
        solve_scheduled(energy, fidelity, batch.z, schedule, etas=etas, callback=watch)
    columns = zip(("energy", "psnr", "t_hat"), zip(*seen, strict=True), strict=True)
    return {key: torch.stack(values).double().numpy() for key, values in columns}


# ---------------------------------------------------------------- the picture


def draw(data: dict[str, np.ndarray], out: Path) -> list[Path]:
    """A row for every prior: energy on the left, PSNR on the right, means over the images."""
    labels = [str(label) for label in data["priors"]]
    with plots.figure(8.5, 2.5 * len(labels) + 0.5) as fig:
        rows = fig.subplots(len(labels), 2, squeeze=False, sharex=True)
        for label, (left, right) in zip(labels, rows, strict=True):
            if right is not rows[0, 1]:
                right.sharey(rows[0, 1])
            known = [s for s in SCHEMES if f"{label}.{s}.energy" in data]
            for scheme in known:
                energy, score = (data[f"{label}.{scheme}.{key}"] for key in ("energy", "psnr"))
                step = np.arange(len(energy))
                name = scheme if len(step) == STEPS + 1 else f"{scheme}, $I={len(step) - 1}$"
                style = {"color": SCHEMES[scheme], "label": name}
                left.plot(step, energy.mean(1), **style)
                mean = score.mean(1)
                right.plot(step, mean, **style)
                best = int(mean.argmax())
                right.plot(best, mean[best], "o", markersize=4, color=SCHEMES[scheme])
            if "learned" not in known:
                left.plot([], [], " ", label="(no learned schedule)")
            left.set(title=title(label), ylabel="energy at $t_{min}$\n(nats / pixel)")
            right.set(title=title(label), ylabel="PSNR (dB)")
            left.legend(frameon=False)
        for ax in rows[-1]:
            ax.set_xlabel("step")
        crop = int(data["crop"])
        part = f", middle {crop}×{crop}" if crop else ""
        what = f"{int(data['images'])} images of {data['title']}{part}"
        fig.suptitle(rf"Denoising at $\sigma={float(data['sigma']):g}$, {what}; dots: highest PSNR")
        return plots.save_figure(fig, out, NAME)
