"""Damaged picture files: whole ones of every format, cut off, with bits flipped, with headers edited."""

import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import ExifTags, Image

from gncprior.picture_files import Picture, encode

SIZE = (9, 11)
KINDS = [("u1", 1), ("u1", 3), ("u1", 4), ("u2", 1), ("f4", 1), ("u2", 2), ("u2", 3), ("u2", 4)]


def _exif() -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Make] = "a camera"
    exif[ExifTags.IFD.Exif] = {ExifTags.Base.ISOSpeedRatings: 400}
    exif[ExifTags.IFD.GPSInfo] = {ExifTags.GPS.GPSLatitudeRef: "N"}
    return exif.tobytes()


EXIF = _exif()


def whole_files(seed: int = 0) -> dict[str, bytes]:
    """A small file of every supported format, depth and number of channels."""
    rng = np.random.default_rng(seed)
    files = {}
    for kind in ("PNG", "JPEG", "WEBP", "BMP", "PPM", "TIFF", "NPY"):
        for dtype, channels in KINDS:
            shape = SIZE if channels == 1 else (*SIZE, channels)
            page = rng.random(shape) if dtype == "f4" else rng.integers(0, 255, shape)
            file = io.BytesIO()
            encode(file, Picture((page.astype(dtype),), metadata={"exif": EXIF}), kind)
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
        if name.startswith("PNG") and rng.random() < 0.5:
            _mend_checksums(broken)
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


def _mend_checksums(data: bytearray) -> None:
    """Of all chunks of a PNG file, so that what is wrong inside them gets past the first check."""
    place = 8
    while place + 12 <= len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        end = place + 8 + length
        if end + 4 > len(data):
            return
        data[end : end + 4] = struct.pack(">I", zlib.crc32(data[place + 4 : end]))
        place = end + 4
