"""Images to learn from: BSDS500, or any folder of pictures.

The test set BSDS68 is part of the ``val`` split of BSDS500.  So training takes ``train`` and ``test``
(400 images), validation takes ``val`` without BSDS68 (32 images), and whoever points training at a
folder with pictures of ``val``, by whatever name and in whatever format, is refused.

Images stay in memory as bytes.  Batch i is a pure function of (seed, i): it comes from a
counter-based generator with that key, so a run that goes on from step i needs no state of a loader.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gncprior.errors import GncpriorError
from gncprior.images import list_images, read_image

ENVIRONMENT_VARIABLE = "GNCPRIOR_DATA"
URL = "https://github.com/BIDS/BSDS500/archive/refs/heads/master.zip"
CHECKSUM = "md5:7bfe17302a219367694200a61ce8256c"
COUNTS = {"train": 200, "val": 100, "test": 200}
# Where the three splits stand below a given folder: a plain copy, the original archive, GitHub's.
LAYOUTS = (
    ".",
    "images",
    "data/images",
    "BSDS500",
    "BSDS500/data/images",
    "BSR/BSDS500/data/images",
    "BSDS500-master/BSDS500/data/images",
)
HELD_OUT = 32  # images of a user's folder kept for validation, at most
_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Dataset:
    """Images (C, H, W) of bytes, of any sizes, with their names."""

    title: str
    names: tuple[str, ...]
    images: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def channels(self) -> int:
        return int(self.images[0].shape[0])

    def digest(self) -> str:
        """SHA-256 over all pixels: the same images in the same order give the same batches."""
        digest = hashlib.sha256()
        for image in self.images:
            digest.update(str(image.shape).encode())
            digest.update(image.tobytes())
        return digest.hexdigest()

    def at_least(self, size: int) -> Dataset:
        """Without the images that are too small for patches of size × size."""
        keep = [k for k, image in enumerate(self.images) if min(image.shape[1:]) >= size]
        if not keep:
            raise GncpriorError(
                f"No image of {self.title} holds a patch of {size}×{size} pixels: use smaller patches."
            )
        names = tuple(self.names[k] for k in keep)
        return Dataset(self.title, names, tuple(self.images[k] for k in keep))

    def cropped(self, size: int) -> Dataset:
        """With the middle, size × size pixels at most, of every image."""

        def middle(image: np.ndarray) -> np.ndarray:
            top, left = (max(n - size, 0) // 2 for n in image.shape[1:])
            return np.ascontiguousarray(image[:, top : top + size, left : left + size])

        return Dataset(self.title, self.names, tuple(map(middle, self.images)))

    def tensor(self, k: int) -> Tensor:
        """Image k as (1, C, H, W) in [0, 1]."""
        return torch.from_numpy(self.images[k]).float().div_(255)[None]

    def batch(
        self,
        seed: int,
        i: int,
        *,
        count: int,
        size: int,
        t_hat_range: tuple[float, float],
        stratified: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Batch i: patches x in [0, 1] and normal noise n, both (count, C, size, size), and t̂ (count,).

        Images come in random order, each once before any comes again; positions are uniform, and
        patches are flipped and transposed at random.  t̂ is uniform on its range: one draw in each of
        ``count`` equal strata, in random order, or else independent draws.
        """
        rng = _generator(seed, i)
        x = np.empty((count, self.channels, size, size), dtype=np.uint8)
        where = rng.random((count, 2))
        symmetries = rng.integers(8, size=count)
        for k, index in enumerate(self.order(seed, i * count, count)):
            image = self.images[index]
            top, left = (
                int(u * (n - size + 1)) for u, n in zip(where[k], image.shape[1:], strict=True)
            )
            patch = image[:, top : top + size, left : left + size]
            if symmetries[k] & 1:
                patch = patch[:, ::-1]
            if symmetries[k] & 2:
                patch = patch[:, :, ::-1]
            if symmetries[k] & 4:
                patch = patch.transpose(0, 2, 1)
            x[k] = patch
        u = rng.random(count)
        if stratified:
            u = (rng.permutation(count) + u) / count
        low, high = t_hat_range
        t_hat = torch.from_numpy(low + (high - low) * u).float()
        # torch draws normal numbers three times as fast as numpy
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        noise = torch.randn(x.shape, generator=generator)
        return torch.from_numpy(np.divide(x, 255, dtype=np.float32)), noise, t_hat

    def order(self, seed: int, begin: int, count: int) -> list[int]:
        """Images number begin … begin+count−1 of the endless sequence of shuffled rounds."""
        rounds = range(begin // len(self), (begin + count - 1) // len(self) + 1)
        # keys of rounds are kept apart from those of batches by their highest bit
        order = np.concatenate([_generator(seed, 2**63 + r).permutation(len(self)) for r in rounds])
        first = begin - rounds[0] * len(self)
        return [int(k) for k in order[first : first + count]]


def _generator(seed: int, i: int) -> np.random.Generator:
    key = np.array([seed, i], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


# ---------------------------------------------------------------- folders


def open_dataset(folder: Path | str | None = None, channels: int = 1) -> tuple[Dataset, Dataset]:
    """Training and validation images.

    From BSDS500 where ``folder``, or else ``$GNCPRIOR_DATA``, holds it; from any other folder of
    images, some of which are held out for validation; from a download of BSDS500 where nothing is
    named.
    """
    folder = folder or os.environ.get(ENVIRONMENT_VARIABLE) or None
    root = find_bsds500(folder) if folder else download_bsds500()
    if root is not None:
        return bsds500(root, channels)
    assert folder is not None
    return own_folder(folder, channels)


def bsds500(root: Path, channels: int = 1) -> tuple[Dataset, Dataset]:
    """train + test, and val without BSDS68."""
    files = {split: list_images(root / split) for split in COUNTS}
    for split, count in COUNTS.items():
        if len(files[split]) != count:
            raise GncpriorError(
                f"{root / split} has {len(files[split])} images and BSDS500 has {count}: "
                "the copy is not complete."
            )
    kept = {Path(name).stem for name in bsds68_names().values()}
    validation = [file for file in files["val"] if file.stem not in kept]
    if len(validation) != len(files["val"]) - len(kept):
        raise GncpriorError(
            f"{root / 'val'} lacks images of BSDS68: the copy is not that of BSDS500."
        )
    training = _read("BSDS500 train+test", files["train"] + files["test"], channels)
    _refuse_validation_images(training, root)
    return training, _read("BSDS500 val without BSDS68", validation, channels)


def bsds68(folder: Path | str | None = None, channels: int = 1) -> Dataset:
    """The test set in the order of its list, from the val split of BSDS500."""
    folder = folder or os.environ.get(ENVIRONMENT_VARIABLE) or None
    root = find_bsds500(folder) if folder else download_bsds500()
    if root is None:
        raise GncpriorError(f"{folder} does not hold BSDS500 with its folders train, val and test.")
    return _read("BSDS68", [root / name for _, name in sorted(bsds68_names().items())], channels)


def own_folder(folder: Path | str, channels: int = 1) -> tuple[Dataset, Dataset]:
    """All images in and below a folder; one in ten, evenly spaced, is held out for validation."""
    folder = Path(folder)
    files = list_images(folder, recursive=True)
    if len(files) < 2:
        raise GncpriorError(
            f"{folder} has {len(files)} images, and learning needs two or more: one is held out."
        )
    number = max(1, min(HELD_OUT, len(files) // 10))
    held_out = {round((k + 0.5) * len(files) / number - 0.5) for k in range(number)}
    rest = (file for k, file in enumerate(files) if k not in held_out)
    training = _read(f"folder {folder.name}", rest, channels)
    kept = (files[k] for k in sorted(held_out))
    validation = _read(f"{number} held out of folder {folder.name}", kept, channels)
    for part in (training, validation):
        _refuse_validation_images(part, folder)
    return training, validation


def find_bsds500(folder: Path | str) -> Path | None:
    """The folder below ``folder`` that holds train, val and test; None if there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise GncpriorError(f"The folder of images {folder} does not exist.")
    for layout in LAYOUTS:
        if all((folder / layout / split).is_dir() for split in COUNTS):
            return folder / layout
    return None


def download_bsds500(url: str = URL, checksum: str = CHECKSUM, cache: Path | None = None) -> Path:
    """BSDS500 in the user's cache, downloaded and checked the first time."""
    import pooch

    cache = pooch.os_cache("gncprior") if cache is None else cache
    folder = cache / "BSDS500"
    if (root := find_bsds500(folder) if folder.is_dir() else None) is not None:
        return root
    try:
        archive = Path(pooch.retrieve(url, known_hash=checksum, path=cache, fname="BSDS500.zip"))
        partial = cache / "BSDS500.part"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        with zipfile.ZipFile(archive) as pack:
            pack.extractall(partial, [n for n in pack.namelist() if "/data/images/" in n])
        partial.rename(folder)  # only a whole copy gets the name
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        # pooch says ValueError of a wrong checksum; what requests says can fill a page
        why = "wrong checksum" if isinstance(error, ValueError) else " ".join(str(error).split())
        raise GncpriorError(
            f"BSDS500 could not be downloaded from {url} "
            f"({why if len(why) < 200 else type(error).__name__}): "
            f"name a folder that holds it with --data or ${ENVIRONMENT_VARIABLE}."
        ) from error
    archive.unlink()
    root = find_bsds500(folder)
    if root is None:
        raise GncpriorError(f"The archive {url} does not hold BSDS500.")
    return root


def _read(title: str, files: Iterable[Path], channels: int) -> Dataset:
    names, images = [], []
    for file in files:
        image = read_image(file, channels)
        image = image[None] if channels == 1 else image.transpose(2, 0, 1)
        names.append(file.name)
        images.append(np.ascontiguousarray(image))
    return Dataset(title, tuple(names), tuple(images))


# ---------------------------------------------------------------- what must not be learned from


@cache
def bsds68_names() -> dict[str, str]:
    """Name in BSDS68 → path in BSDS500, as in test001.png → val/101085.jpg."""
    lines = (_DATA / "BSDS68.txt").read_text("utf-8").splitlines()
    return {line.split()[0]: line.split()[1] for line in lines if line.strip()}


@cache
def _validation_prints() -> dict[str, np.ndarray]:
    lines = (_DATA / "BSDS500-val.txt").read_text("utf-8").splitlines()
    pairs = (line.split() for line in lines if line.strip())
    return {name: np.frombuffer(bytes.fromhex(bits), np.uint8) for name, bits in pairs}


def fingerprint(image: np.ndarray) -> np.ndarray:
    """256 bits of an image (C, H, W): where the brightness rises along the rows of a 17 × 16 thumbnail.

    Another file format or a change of a grey level flips a few bits at most; different photographs
    differ in 60 or more.
    """
    grey = Image.fromarray(image[0] if len(image) == 1 else image.mean(0).astype(np.uint8))
    small = np.asarray(grey.resize((17, 16), Image.Resampling.BOX)).astype(np.int16)
    return np.packbits(small[:, 1:] > small[:, :-1])


def _refuse_validation_images(dataset: Dataset, folder: Path) -> None:
    known = _validation_prints()
    prints = np.stack(list(known.values()))
    found: list[str] = []
    for name, image in zip(dataset.names, dataset.images, strict=True):
        distance = np.bitwise_count(prints ^ fingerprint(image)).sum(1)
        if distance.min() <= 20:
            found.append(name)
    if found:
        raise GncpriorError(
            f"{len(found)} images in {folder} belong to the val split of BSDS500 ({_some(found)}), which "
            "is kept for testing: learn from train and test."
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
