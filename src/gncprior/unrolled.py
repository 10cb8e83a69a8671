r"""The learned scheme: a fixed number of steps whose smoothing and step sizes come from data.

.. math:: x_i = \mathrm{prox}_{η_iD}(x_{i-1} − η_i∇R(x_{i-1},\hat t_i)),\qquad i = 1 … I,\quad x_0 = z

(paper, section 4.3; its indices are off by one: 2I parameters mean I steps.)  A schedule belongs to a
prior, a task and a level: the σ of the noise, or the share of missing pixels.  :class:`Schedules`
holds those of several levels and answers for every level: between two of them t̂_i and log η_i are
interpolated (in log σ, or in the share), and beyond the last noise level they are rescaled,

    t̂_i ← t̂_i + log(σ²/σ_end²),    η_i ← η_i σ²/σ_end²,

as if the image were scaled such that its noise became that of σ_end.

How schedules are learned is the matter of :mod:`gncprior.unrolled_learning`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gncprior.checkpoints import SUFFIX, WEIGHTS, read_tensors, write_tensors
from gncprior.errors import GncpriorError
from gncprior.fidelity import Fidelity
from gncprior.solvers import Energy, solve_scheduled

DENOISE, INPAINT = "denoise", "inpaint"


@dataclass(frozen=True)
class Schedules:
    """t̂_i and η_i, each (S, I), for the S levels of a task, ascending.  ``info`` is the file's header."""

    task: str
    levels: Tensor  # (S,)
    t_hats: Tensor
    etas: Tensor
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.task not in (DENOISE, INPAINT):
            raise GncpriorError(f"A schedule is for {DENOISE} or {INPAINT}, not {self.task!r}.")
        count = len(self.levels)
        if self.t_hats.shape != self.etas.shape or self.t_hats.shape[:1] != (count,) or count == 0:
            raise GncpriorError("A schedule needs a t̂ and an η for every level and step.")
        rising = bool((self.levels.diff() > 0).all()) and float(self.levels[0]) > 0
        if not rising or not bool((self.etas > 0).all()) or not bool(self.t_hats.isfinite().all()):
            raise GncpriorError("A schedule needs ascending levels, positive η and finite t̂.")

    @property
    def steps(self) -> int:
        """I."""
        return self.t_hats.shape[1]

    def at(self, level: float) -> tuple[Tensor, Tensor]:
        """t̂_i and η_i for a noise level σ > 0, or a share of missing pixels, in float64."""
        if not 0 < level < math.inf:
            what = "noise level" if self.task == DENOISE else "share of missing pixels"
            raise GncpriorError(f"The {what} must be positive and finite, not {level}.")
        levels, t_hats, log_etas = (
            self.levels.double(),
            self.t_hats.double(),
            self.etas.double().log(),
        )
        if self.task == DENOISE:
            levels, level = levels.log(), math.log(level)
        inside = min(max(level, float(levels[0])), float(levels[-1]))
        if len(levels) == 1:
            t_hat, log_eta = t_hats[0], log_etas[0]
        else:
            right = int(torch.searchsorted(levels, inside).clamp(1, len(levels) - 1))
            share = (inside - levels[right - 1]) / (levels[right] - levels[right - 1])
            t_hat = torch.lerp(t_hats[right - 1], t_hats[right], share)
            log_eta = torch.lerp(log_etas[right - 1], log_etas[right], share)
        if self.task == DENOISE:
            shift = 2 * (level - inside)  # log(σ²/σ_end²)
            t_hat, log_eta = t_hat + shift, log_eta + shift
        return t_hat, log_eta.exp()

    def save(self, path: Path | str) -> None:
        header = {**self.info, "kind": "schedules", "task": self.task, "steps": self.steps}
        tensors = {"levels": self.levels, "t_hats": self.t_hats, "etas": self.etas}
        write_tensors(path, tensors, header)


def unroll(
    prior: Energy, fidelity: Fidelity, x0: Tensor, schedule: tuple[Tensor, Tensor]
) -> Tensor:
    """x_I of the scheme above; t̂ beyond the prior's range is clamped."""
    t_hats, etas = schedule
    return solve_scheduled(prior, fidelity, x0, t_hats, etas=etas).x


# ---------------------------------------------------------------- files


def fingerprint(prior: nn.Module) -> str:
    """SHA-256 over the parameters, to tell whose schedule it is."""
    digest = hashlib.sha256()
    for name, tensor in sorted(prior.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def schedules_path(prior: str | Path, task: str, steps: int) -> Path:
    """Where the schedules of a prior (a shipped one's name, or a file) are: beside it."""
    path = Path(prior)
    folder = path.parent if path.suffix == SUFFIX else WEIGHTS
    return folder / f"{path.stem}-{task}-{steps}{SUFFIX}"


def load_schedules(path: Path | str, prior: nn.Module | None = None) -> Schedules:
    """Read schedules; where the prior is given, it must be the one they were learned for."""
    tensors, header = read_tensors(path)
    if header.get("kind") != "schedules" or set(tensors) != {"levels", "t_hats", "etas"}:
        raise GncpriorError(f"{path} holds {header.get('kind', 'something')!r} and not schedules.")
    if prior is not None and header.get("prior_sha256") != fingerprint(prior):
        raise GncpriorError(
            f"{path} was learned for another version of the prior: run `gncprior learn-schedule` again."
        )
    return Schedules(str(header.get("task")), **tensors, info=header)
