r"""The learned scheme: a fixed number of steps whose smoothing and step sizes come from data.

.. math:: x_i = \mathrm{prox}_{η_iD}(x_{i-1} − η_i∇R(x_{i-1},\hat t_i)),\qquad i = 1 … I,\quad x_0 = z

(paper, section 4.3; its indices are off by one: 2I parameters mean I steps.)  A schedule belongs to a
prior, a task and a level: the σ of the noise, or the share of missing pixels.  :class:`Schedules`
holds those of several levels and answers for every level: between two of them t̂_i and log η_i are
interpolated (in log σ, or in the share), and beyond the last noise level images are scaled such that their noise
is that of σ_end:

    R(x, t̂_i) ← R(cx, t̂_i),    η_i ← η_i/c²,    c = σ_end/σ.

A model that was fine-tuned for all levels at once has such scales for its levels too.  Where they are in inverse
proportion to σ, all levels are one problem with one noise level.

How schedules are learned is the matter of :mod:`gncprior.unrolled_learning`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from gncprior.checkpoints import SUFFIX, WEIGHTS, read_tensors, write_tensors
from gncprior.errors import GncpriorError
from gncprior.fidelity import Fidelity
from gncprior.solvers import Energy, solve_scheduled

DENOISE, INPAINT = "denoise", "inpaint"


class Scalable(Protocol):
    """An energy that can be made one of the scaled image."""

    def of_scaled(self, c: float) -> Self:
        """R(cx, t) as a function of x."""
        ...


R = TypeVar("R", bound=Scalable)


@dataclass(frozen=True)
class Schedules:
    """t̂_i and η_i, each (S, I), for the S levels of a task, ascending.

    ``info`` is the file's header; ``scales`` are the c of R(cx, t̂), ones where there are none.
    """

    task: str
    levels: Tensor  # (S,)
    t_hats: Tensor
    etas: Tensor
    info: dict[str, Any] = field(default_factory=dict)
    scales: Tensor | None = None  # (S,)

    def __post_init__(self) -> None:
        if self.task not in (DENOISE, INPAINT):
            raise GncpriorError(f"A schedule is for {DENOISE} or {INPAINT}, not {self.task!r}.")
        count = len(self.levels)
        if self.t_hats.shape != self.etas.shape or self.t_hats.shape[:1] != (count,) or count == 0:
            raise GncpriorError("A schedule needs a t̂ and an η for every level and step.")
        rising = bool((self.levels.diff() > 0).all()) and float(self.levels[0]) > 0
        if not rising or not bool((self.etas > 0).all()) or not bool(self.t_hats.isfinite().all()):
            raise GncpriorError("A schedule needs ascending levels, positive η and finite t̂.")
        c = self.scales
        if c is not None and (c.shape != (count,) or not bool(((c > 0) & c.isfinite()).all())):
            raise GncpriorError("A schedule that scales images needs one positive scale per level.")

    @property
    def steps(self) -> int:
        """I."""
        return self.t_hats.shape[1]

    def at(self, level: float) -> tuple[Tensor, Tensor]:
        """t̂_i and η_i for a noise level σ > 0, or a share of missing pixels, in float64.

        They go with the prior of :meth:`prior_at`.
        """
        t_hats = self._between(self.t_hats, level)
        etas = self._between(self.etas.double().log(), level).exp()
        return t_hats, etas / self._beyond(level) ** 2

    def scale(self, level: float) -> float:
        """c of a level: by how much the prior sees the image larger."""
        c = self._beyond(level)
        if self.scales is not None:
            c *= float(self._between(self.scales.double().log(), level).exp())
        return c

    def prior_at(self, prior: R, level: float) -> R:
        """R(cx, t̂) with the c of a level; the prior itself where that is 1."""
        c = self.scale(level)
        return prior if c == 1 else prior.of_scaled(c)

    def unscaled(self, level: float) -> tuple[Tensor, Tensor]:
        """t̂_i and η_i for R(x, t̂) itself, which are about as good: noise of t in cx is noise of t/c² in x."""
        t_hats, etas = self.at(level)
        return t_hats - 2 * math.log(self.scale(level)), etas

    def _beyond(self, level: float) -> float:
        """σ_end/σ beyond the last level, else 1."""
        if self.task != DENOISE:
            return 1.0
        return min(max(level, float(self.levels[0])), float(self.levels[-1])) / level

    def _between(self, values: Tensor, level: float) -> Tensor:
        """Values (S, …) of the levels, interpolated; the last one beyond the ends."""
        if not 0 < level < math.inf:
            what = "noise level" if self.task == DENOISE else "share of missing pixels"
            raise GncpriorError(f"The {what} must be positive and finite, not {level}.")
        levels, values = self.levels.double(), values.double()
        if self.task == DENOISE:
            levels, level = levels.log(), math.log(level)
        if len(levels) == 1:
            return values[0]
        right = int(torch.searchsorted(levels, level).clamp(1, len(levels) - 1))
        share = (level - levels[right - 1]) / (levels[right] - levels[right - 1])
        return torch.lerp(values[right - 1], values[right], share.clamp(0, 1))

    def save(self, path: Path | str) -> None:
        header = {**self.info, "kind": "schedules", "task": self.task, "steps": self.steps}
        tensors = {"levels": self.levels, "t_hats": self.t_hats, "etas": self.etas}
        if self.scales is not None:
            tensors["scales"] = self.scales
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
    names = {"levels", "t_hats", "etas"}
    if header.get("kind") != "schedules" or set(tensors) - {"scales"} != names:
        raise GncpriorError(f"{path} holds {header.get('kind', 'something')!r} and not schedules.")
    if prior is not None and header.get("prior_sha256") != fingerprint(prior):
        raise GncpriorError(
            f"{path} was learned for another version of the prior: run `gncprior learn-schedule` again."
        )
    return Schedules(str(header.get("task")), **tensors, info=header)
