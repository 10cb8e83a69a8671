"""EXIF in TIFF files, where it is not a block of its own but lies among the tags of a page.

A TIFF file is a chain of directories, one a page; an entry is a tag, its type, a count and the value or
where it is.  EXIF is some of the tags of the first page, and two directories of their own (of the
camera's settings and of the place) that tags point to.  Everywhere else the same directories travel as
one block, a small TIFF file without pixels: that block is what these functions give and take.
"""

from __future__ import annotations

import os
import struct
from typing import Any, BinaryIO

from PIL import ExifTags, Image, TiffImagePlugin

# The tags of a page that speak of the picture and not of how it is stored.
DESCRIPTIVE = (
    ExifTags.Base.ImageDescription,
    ExifTags.Base.Make,
    ExifTags.Base.Model,
    ExifTags.Base.Orientation,
    ExifTags.Base.Software,
    ExifTags.Base.DateTime,
    ExifTags.Base.Artist,
    ExifTags.Base.HostComputer,
    ExifTags.Base.Copyright,
)
_ENTRY = 12  # bytes


def from_tiff(file: BinaryIO) -> bytes | None:
    """The EXIF of the first page as a block; None where there is none."""
    file.seek(0)
    head = file.read(16)
    exif = Image.Exif()
    exif.endian = "<" if head.startswith(b"II") else ">"
    exif.bigtiff = b"+" in head[2:4]
    number, place = ("Q", head[8:]) if exif.bigtiff else ("I", head[4:8])
    exif.load_from_fp(file, *struct.unpack(exif.endian + number, place))
    block = Image.Exif()
    block.update(_content(exif))
    return block.tobytes() if len(block) else None


def into_tiff(file: BinaryIO, block: bytes) -> None:
    """Add a block to the first page of a complete little-endian TIFF file (not a BigTIFF).

    The tags and a new directory of the page are appended, and the file is made to begin there; whatever
    is wrong is found before.
    """
    exif = Image.Exif()
    exif.load(block)
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    for tag, value in _content(exif).items():
        tags[tag] = value
    file.seek(0)
    if file.read(4) != b"II*\0":
        raise ValueError("a BigTIFF, or a file of the other byte order")
    old, following = _directory(file, *struct.unpack("<I", file.read(4)))
    here = _end(file)
    file.write(tags.tobytes(here))
    new, _ = _directory(file, here)
    entries = sorted({**new, **old}.items())  # ascending, as readers expect
    place = _end(file)
    file.write(struct.pack("<H", len(entries)) + b"".join(e for _, e in entries) + following)
    file.seek(4)
    file.write(struct.pack("<I", place))


def _content(exif: Image.Exif) -> dict[int, Any]:
    """Tag → value, or a directory."""
    found: dict[int, Any] = {tag: exif[tag] for tag in DESCRIPTIVE if tag in exif}
    for pointer in (ExifTags.IFD.Exif, ExifTags.IFD.GPSInfo):
        if directory := dict(exif.get_ifd(pointer)):
            if ExifTags.IFD.Interop in directory:
                directory[ExifTags.IFD.Interop] = exif.get_ifd(ExifTags.IFD.Interop)
            found[pointer] = directory
    return found


def _directory(file: BinaryIO, place: int) -> tuple[dict[int, bytes], bytes]:
    """The entries of a directory by their tags, and where the next one is."""
    file.seek(place)
    (count,) = struct.unpack("<H", file.read(2))
    entries = [file.read(_ENTRY) for _ in range(count)]
    return {struct.unpack("<H", e[:2])[0]: e for e in entries}, file.read(4)


def _end(file: BinaryIO) -> int:
    """Go to the end of the file, at an even place."""
    if file.seek(0, os.SEEK_END) % 2:
        file.write(b"\0")
    return file.tell()
