"""What the experiments share: which priors, which images, and what is seen of them.

Priors are those that are shipped as r1, r2, …, unless named.  Images are BSDS68, or those of a folder;
a quick experiment takes three small pictures that come with the package, so that it needs no data.
Observations are those of the protocol (:mod:`gncprior.evaluation`), made of whole images and cropped
afterwards, so that image k always has the same noise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gncprior import plots
from gncprior.checkpoints import load_prior, shipped
from gncprior.datasets import Dataset
from gncprior.errors import GncpriorError
from gncprior.evaluation import observe, open_images
from gncprior.fidelity import Denoising, Inpainting
from gncprior.images import read_image
from gncprior.inspection import dead_leaves
from gncprior.prior import Prior
from gncprior.unrolled import DENOISE, Schedules, load_schedules, schedules_path

SIGMA = 0.1  # of the paper's denoising
MISSING = 0.8  # of its inpainting
COLORS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.VERMILLION, plots.BLACK)
HARBOUR = Path(__file__).parents[1] / "pictures" / "harbour.png"

Progress = Callable[[int, int], None]  # (done, of how many)


def quiet(done: int, total: int) -> None:
    """The progress that nobody watches."""


def open_priors(names: Sequence[str] = ()) -> dict[str, Prior]:
    """Name, or file → grey prior; by default those shipped as r1, r2, …"""
    chosen = list(names) or [name for name in shipped() if re.fullmatch(r"r\d+", name)]
    if not chosen:
        raise GncpriorError("No prior is shipped with this version: name the file of one.")
    priors = {name: load_prior(name) for name in chosen}
    for name, prior in priors.items():
        if prior.architecture.channels != 1:
            raise GncpriorError(f"The experiments are on grey images, and {name} is for colour.")
    return priors


def label_of(name: str) -> str:
    """How a prior is called in files and figures: a file without its folder."""
    return Path(name).stem


def title(label: str) -> str:
    """r1 as the paper writes it, R_1; other names as they are."""
    number = re.fullmatch(r"r(\d+)", label)
    return f"$R_{{{number[1]}}}$" if number else label


def learned_schedules(name: str, prior: Prior, task: str, steps: int) -> Schedules | None:
    """The longest learned schedules of a prior with at most ``steps`` steps.

    None where there are none, or only those of another version of the prior.
    """
    for count in range(steps, 0, -1):
        path = schedules_path(name, task, count)
        if path.is_file():
            try:
                return load_schedules(path, prior)
            except GncpriorError:
                return None
    return None


# ---------------------------------------------------------------- images


def pictures(
    data: Path | None = None, limit: int | None = None, quick: bool = False, stride: int = 1
) -> Dataset:
    """The first ``limit`` of every ``stride``-th image; three small ones if it should be quick."""
    if limit is not None and limit < 1:
        raise GncpriorError(f"At least one image is needed, not {limit}.")
    images = _small_pictures() if quick else open_images(data)
    return Dataset(images.title, images.names[::stride][:limit], images.images[::stride][:limit])


def _small_pictures(size: int = 48) -> Dataset:
    """Two parts of the bundled picture and one of overlapping discs."""
    harbour = read_image(HARBOUR)
    leaves = np.round(255 * dead_leaves(size)).astype(np.uint8)
    parts = (harbour[60 : 60 + size, 20 : 20 + size], harbour[-size:, -size:], leaves)
    names = ("harbour, left", "harbour, right", "discs")
    return Dataset("3 small pictures", names, tuple(part[None].copy() for part in parts))


@dataclass(frozen=True)
class Batch:
    """Images of one size: x, and what is seen of them, z and for inpainting the mask, (B, C, H, W)."""

    index: tuple[int, ...]
    x: Tensor
    z: Tensor
    mask: Tensor | None

    def fidelity(self, level: float) -> Denoising | Inpainting:
        return Denoising(self.z, level) if self.mask is None else Inpainting(self.z, self.mask)


def batches(
    images: Dataset, task: str, level: float, *, crop: int = 0, size: int = 16, stride: int = 1
) -> Iterator[Batch]:
    """Observations in float32, at most ``size`` together; of the middle, crop × crop, where crop > 0.

    ``stride`` tells that of the protocol's images only every stride-th is among these.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for k, image in enumerate(images.images):
        shape = image.shape[1:]
        groups.setdefault(tuple(min(n, crop) if crop else n for n in shape), []).append(k)
    for group in groups.values():
        for start in range(0, len(group), size):
            index = group[start : start + size]
            parts = [_seen(images.images[k], k * stride, task, level, crop) for k in index]
            x, z = (torch.from_numpy(np.stack([p[i] for p in parts])).float() for i in (0, 1))
            mask = None
            if task != DENOISE:
                mask = torch.from_numpy(np.stack([p[2] for p in parts]))
            yield Batch(tuple(index), x, z, mask)


def _seen(
    image: np.ndarray, k: int, task: str, level: float, crop: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = image / 255.0
    z, mask = observe(x, k, task, level)
    if mask is None:
        mask = np.zeros(x.shape, dtype=bool)
    if not crop:
        return x, z, mask
    top, left = (max(n - crop, 0) // 2 for n in x.shape[1:])
    part = np.s_[:, top : top + crop, left : left + crop]
    return x[part], z[part], mask[part]
