"""Damaged picture files: whole ones of every format, cut off, with bits flipped, with headers edited."""

import io
import struct
from collections.abc import Iterator

import numpy as np

from gncprior.picture_files import Picture, encode

SIZE = (9, 11)


def whole_files(seed: int = 0) -> dict[str, bytes]:
    """A small file of every supported format, depth and number of channels."""
    rng = np.random.default_rng(seed)
    files = {}
    for kind in ("PNG", "JPEG", "WEBP", "BMP", "PPM", "TIFF", "NPY"):
        for dtype, channels in [("u1", 1), ("u1", 3), ("u1", 4), ("u2", 1), ("f4", 1), ("u2", 3)]:
            shape = SIZE if channels == 1 else (*SIZE, channels)
            page = rng.random(shape) if dtype == "f4" else rng.integers(0, 255, shape)
            file = io.BytesIO()
            encode(file, Picture((page.astype(dtype),)), kind)
            files[f"{kind} {dtype} {channels}"] = file.getvalue()
    pages = tuple(rng.integers(0, 255, SIZE).astype("u1") for _ in range(3))
    file = io.BytesIO()
    encode(file, Picture(pages), "TIFF")
    files["TIFF of 3 pages"] = file.getvalue()
    return files


def mutants(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Files with one to four things wrong, the same for the same seed."""
    rng = np.random.default_rng(seed)
    files = list(whole_files(seed).items())
    for k in range(count):
        name, data = files[k % len(files)]
        broken = bytearray(data)
        for _ in range(int(rng.integers(1, 5))):
            _damage(broken, rng)
        yield f"{name}, seed {seed}, number {k}", bytes(broken)


def _damage(data: bytearray, rng: np.random.Generator) -> None:
    place = int(rng.integers(0, max(len(data), 1)))
    header = int(rng.integers(0, min(max(len(data), 1), 160)))
    match int(rng.integers(0, 6)):
        case 0:
            del data[place:]
        case 1 if data:
            data[place] ^= 1 << int(rng.integers(0, 8))
        case 2 if data:
            data[header] = int(rng.integers(0, 256))
        case 3:  # a number in the header becomes absurd
            data[header : header + 4] = struct.pack(">I", int(rng.choice([0, 1, 2**31, 2**32 - 1])))
        case 4:  # a part is repeated
            data[place:place] = data[place : place + int(rng.integers(1, 40))]
        case 5:  # a part is missing
            del data[place : place + int(rng.integers(1, 40))]
