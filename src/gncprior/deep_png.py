"""PNG with 16 bits a channel and more than one channel, which Pillow reads with 8 bits and does not write.

Reading leaves the work to Pillow's decoder, which undoes filters and interlacing and keeps within the
size that was announced; the checksums of the pixels, which it passes over, are checked here.  It can
take the higher byte of every number, or the lower one (by the name that it has for numbers of the other
byte order), so two passes give all 16 bits; grey with alpha has the layout of four bytes and needs one.

Writing is a few lines of zlib.  Every row is filtered by "average", the difference from the mean of
the bytes to the left and above, which of the five filters gave the smallest files of photographs.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

# What Pillow calls the layout of such a file → the layouts to take it for, one after the other.
_LAYOUTS = {
    "RGB;16B": ("RGB;16B", "RGB;16L"),
    "RGBA;16B": ("RGBA;16B", "RGBA;16L"),
    "LA;16B": ("RGBA",),
}
_CHANNELS = {"RGB;16B": 3, "RGBA;16B": 4, "LA;16B": 2}
_COLOUR_TYPES = {2: 4, 3: 2, 4: 6}
_AVERAGE = 3  # the number of the filter
_BAND = 2**20  # pixels at a time
_PIECE = 2**20  # bytes


def layout(image: Image.Image) -> str | None:
    """What an open file of this kind is called; None for all others."""
    names = {str(tile.args) for tile in getattr(image, "tile", ())}
    (name,) = names if len(names) == 1 else ("",)
    return name if image.format == "PNG" and name in _LAYOUTS else None


def read(file: BinaryIO, name: str) -> np.ndarray:
    """The pixels of a file of this layout, (H, W, channels) of uint16; its size was judged before."""
    _check(file)
    passes = _LAYOUTS[name]
    pixels: np.ndarray | None = None
    for k, taken_for in enumerate(passes):
        file.seek(0)
        with Image.open(file, formats=["PNG"]) as image:
            image.tile = [tile._replace(args=taken_for) for tile in image.tile]
            if pixels is None:
                pixels = np.zeros((image.height, image.width, _CHANNELS[name]), np.uint16)
            for rows in _bands(image.height, image.width):
                part = np.asarray(image.crop((0, rows.start, image.width, rows.stop)))
                if len(passes) == 1:
                    pixels[rows] = part.view(">u2")
                else:
                    pixels[rows] |= np.left_shift(part, 8 * (1 - k), dtype=np.uint16)
    assert pixels is not None
    return pixels


def _check(file: BinaryIO) -> None:
    """Compare all checksums; a file that ends before its last chunk is damaged as well."""
    file.seek(8)
    kind = b""
    while kind != b"IEND":
        length, kind = struct.unpack(">I4s", file.read(8))
        checksum = zlib.crc32(kind)
        while length > 0 and (part := file.read(min(length, _PIECE))):
            checksum, length = zlib.crc32(part, checksum), length - len(part)
        if file.read(4) != struct.pack(">I", checksum):
            raise ValueError("a checksum is wrong")


def write(file: BinaryIO, page: np.ndarray, metadata: dict[str, Any]) -> None:
    """A page (H, W, 2, 3 or 4) of uint16 with dpi, colour profile and EXIF."""
    height, width, channels = page.shape
    file.write(b"\x89PNG\r\n\x1a\n")
    head = struct.pack(">IIBBBBB", width, height, 16, _COLOUR_TYPES[channels], 0, 0, 0)
    _chunk(file, b"IHDR", head)
    if profile := metadata.get("icc_profile"):
        _chunk(file, b"iCCP", b"ICC Profile\0\0" + zlib.compress(profile))
    if dpi := metadata.get("dpi"):
        across, down = (int(d / 0.0254 + 0.5) for d in dpi)
        _chunk(file, b"pHYs", struct.pack(">IIB", across, down, 1))  # per metre
    if exif := metadata.get("exif"):
        _chunk(file, b"eXIf", exif.removeprefix(b"Exif\0\0"))
    packer = zlib.compressobj(strategy=zlib.Z_FILTERED)
    above = np.zeros((1, 2 * width * channels), np.uint8)
    for rows in _bands(height, width):
        lines = np.ascontiguousarray(page[rows], ">u2").view(np.uint8).reshape(-1, above.size)
        lines = np.concatenate([above, lines])
        above = lines[-1:]
        _chunk(file, b"IDAT", packer.compress(_filtered(lines, 2 * channels)))
    _chunk(file, b"IDAT", packer.flush())
    _chunk(file, b"IEND", b"")


def _filtered(lines: np.ndarray, pixel: int) -> bytes:
    """All lines but the first, which is only above, as differences, each after the filter's number."""
    left = np.zeros_like(lines[1:])
    left[:, pixel:] = lines[1:, :-pixel]
    # (left + above) // 2 in bytes, without the carry that they have no room for
    mean = (left & lines[:-1]) + ((left ^ lines[:-1]) >> 1)
    return np.insert(lines[1:] - mean, 0, _AVERAGE, axis=1).tobytes()


def _chunk(file: BinaryIO, kind: bytes, content: bytes) -> None:
    file.write(struct.pack(">I", len(content)) + kind + content)
    file.write(struct.pack(">I", zlib.crc32(kind + content)))


def _bands(height: int, width: int) -> Iterator[slice]:
    step = max(_BAND // width, 1)
    for start in range(0, height, step):
        yield slice(start, min(start + step, height))
