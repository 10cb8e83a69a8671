"""Picture files: PNG, JPEG, WebP, BMP, PGM/PPM, TIFF of 8, 16 bits and floats with many pages, and npy.

A file is read as it is, page by page, (H, W) or (H, W, channels) of uint8, uint16 or floats, together
with its resolution, colour profile and EXIF.  What has to be converted (palettes, CMYK, a depth that
the other format lacks) is said in ``notices``.  What kind a file is is told by its content, and its
dimensions are judged before it is decoded, so that a small file cannot ask for all memory.

A file appears under its name only when it is complete.  Whatever is wrong is said in one sentence.
"""

from __future__ import annotations

import io
import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from gncprior import deep_png
from gncprior.errors import GncpriorError

FORMATS = {
    ".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".bmp": "BMP", ".pgm": "PPM",
    ".ppm": "PPM", ".tif": "TIFF", ".tiff": "TIFF", ".npy": "NPY",
}  # fmt: skip
SUFFIX_OF = {name: suffix for suffix, name in reversed(FORMATS.items())}
MOST_PIXELS = 178_000_000  # of all pages; what Pillow, too, is willing to decode
MOST_PAGES = 10_000
_PLAIN_MODES = {"L", "LA", "RGB", "RGBA", "F"}
_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_CHANNELS = (1, 2, 3, 4)
_JPEG_EXIF = 65533  # bytes
_CLASSIC_TIFF = 2**32 - 2**25  # bytes of pixels; more need the larger numbers of a BigTIFF


@dataclass(frozen=True)
class Picture:
    """The pages of a file, what it says about them, and what was changed in reading or writing."""

    pages: tuple[np.ndarray, ...]
    kind: str = "PNG"
    metadata: dict[str, Any] = field(default_factory=dict)  # dpi, icc_profile, exif
    notices: tuple[str, ...] = ()


# ---------------------------------------------------------------- reading


def read_picture(source: Path | str | bytes, name: str | None = None) -> Picture:
    """A file by its path, or its content as bytes (then ``name`` is what errors call it)."""
    name = name or ("the input" if isinstance(source, bytes) else str(source))
    try:
        with _opened(source) as file, _quiet():
            start = file.read(8)
            file.seek(0)
            if not start:
                raise GncpriorError(f"{name} is empty.")
            if start.startswith(b"\x93NUMPY"):
                picture = _read_npy(file, name)
            elif start.startswith(_TIFF_STARTS):
                picture = _read_tiff(file, name)
            else:
                picture = _read_pillow(file, name)
    except GncpriorError:
        raise
    except FileNotFoundError:
        raise GncpriorError(f"There is no picture {name}.") from None
    except (PermissionError, IsADirectoryError) as error:
        raise GncpriorError(f"Cannot read {name}: {error.strerror}.") from None
    except Exception as error:  # decoders fail in every way there is
        raise GncpriorError(
            f"Cannot read {name} as a picture: it is damaged or of an unknown kind."
        ) from error
    for page in picture.pages:
        if page.size == 0:
            raise GncpriorError(f"{name} has no pixels.")
    return picture


@contextmanager
def _opened(source: Path | str | bytes) -> Iterator[BinaryIO]:
    if isinstance(source, bytes):
        yield io.BytesIO(source)
    else:
        with Path(source).open("rb") as file:
            yield file


@contextmanager
def _quiet() -> Iterator[None]:
    """What the decoders would log about damage, an error will say."""
    loggers = [logging.getLogger(name) for name in ("PIL", "tifffile")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _check_size(pixels: int, name: str) -> None:
    if pixels > MOST_PIXELS:
        raise GncpriorError(
            f"{name} says it has {pixels / 1e6:.0f} megapixels, and more than {MOST_PIXELS // 10**6} "
            "are not decoded: cut it into parts."
        )


_PNG_BITS = {"LA": 16, "RGB": 24, "RGBA": 32, "I": 16, "I;16": 16}  # of a pixel, others 1 or more


def _check_promise(size: int, file: BinaryIO, name: str) -> None:
    """No deflated byte holds more than 1032 others; Pillow would fill what is missing with zeros."""
    here, end = file.tell(), file.seek(0, os.SEEK_END)
    file.seek(here)
    if size > 1032 * end:
        raise GncpriorError(f"{name} is cut off: its header promises more than it holds.")


def _pixels(shape: tuple[int, ...]) -> int:
    """Of an array, whose last axis may be channels."""
    coloured = len(shape) > 2 and shape[-1] in _CHANNELS
    return math.prod(shape[:-1] if coloured else shape)


def _read_pillow(file: BinaryIO, name: str) -> Picture:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the dimensions are judged here, the rest is not for users
        kinds = sorted(set(FORMATS.values()) - {"NPY"})
        with Image.open(file, formats=kinds) as image:
            pixels = image.width * image.height
            _check_size(pixels, name)
            if image.format == "PNG":
                _check_promise(pixels * _PNG_BITS.get(image.mode, 1) // 8, file, name)
            count = getattr(image, "n_frames", 1)
            notices: list[str] = []
            if count > 1 and image.format != "TIFF":
                notices.append(f"{name} is animated: only its first picture is taken")
                count = 1
            if count > MOST_PAGES:
                raise GncpriorError(f"{name} has more than {MOST_PAGES} pages: split it.")
            metadata = {
                key: value
                for key in ("dpi", "icc_profile", "exif")
                if (value := image.info.get(key))
            }
            if "exif" in metadata:  # WebP has the block without the word before it
                metadata["exif"] = b"Exif\0\0" + metadata["exif"].removeprefix(b"Exif\0\0")
            pages, total = [], 0
            for k in range(count):
                image.seek(k)
                total += image.width * image.height
                _check_size(total, name)
                pages.append(_page(image, file, name, notices, metadata))
            return Picture(tuple(pages), image.format or "PNG", metadata, tuple(notices))


def _page(
    image: Image.Image, file: BinaryIO, name: str, notices: list[str], metadata: dict[str, Any]
) -> np.ndarray:
    """The pixels of an open file, converted where arrays have no such thing."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return np.asarray(image).astype(np.uint16)
    if image.mode == "I":
        raise GncpriorError(f"{name} has integers of 32 bits and no known range: use 16 bits.")
    if (layout := deep_png.layout(image)) is not None:
        return deep_png.read(file, layout)
    if image.mode in _PLAIN_MODES:
        return np.array(image)
    transparent = "transparency" in image.info or image.mode in ("PA", "RGBa", "La")
    target = "L" if image.mode == "1" else "RGBA" if transparent else "RGB"
    notices.append(f"{name} was converted from {_words(image.mode)} to {target}")
    if image.mode == "CMYK":
        metadata.pop("icc_profile", None)  # it speaks of inks
    return np.array(image.convert(target))


def _words(mode: str) -> str:
    return {"1": "black and white", "P": "a palette", "PA": "a palette"}.get(mode, mode)


def _read_npy(file: BinaryIO, name: str) -> Picture:
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    shape, _, dtype = read[version](file)
    if dtype.hasobject or dtype.kind not in "uf" or dtype.name not in _DTYPES:
        raise GncpriorError(f"{name} holds {dtype}: save it as {', '.join(sorted(_DTYPES))}.")
    _check_size(_pixels(shape), name)
    here, end = file.tell(), file.seek(0, os.SEEK_END)
    if end - here < math.prod(shape) * dtype.itemsize:
        raise GncpriorError(f"{name} is cut off: its header promises more than it holds.")
    file.seek(0)
    array = np.lib.format.read_array(file, allow_pickle=False)
    return Picture(_pages_of(array.astype(array.dtype.newbyteorder("="), copy=False), name), "NPY")


_DTYPES = {"uint8", "uint16", "float16", "float32", "float64"}


def _pages_of(array: np.ndarray, name: str) -> tuple[np.ndarray, ...]:
    """(H, W), (H, W, ≤ 4 channels), or a stack of either."""
    if array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in _CHANNELS):
        return (array,)
    if array.ndim == 3 or (array.ndim == 4 and array.shape[-1] in _CHANNELS):
        return tuple(array)
    raise GncpriorError(
        f"{name} has the shape {array.shape}: a picture is (H, W) or (H, W, channels), or a stack."
    )


def _read_tiff(file: BinaryIO, name: str) -> Picture:
    """By tifffile, which knows every depth; by Pillow where that is missing or lacks a compression."""
    try:
        import tifffile
    except ImportError:
        return _with_exif(_read_pillow(file, name), file, name)
    try:
        with tifffile.TiffFile(file) as tiff:
            picture = _tiff_pages(tiff, name)
    except (GncpriorError, MemoryError):
        raise
    except Exception:  # noqa: BLE001  (as above)
        file.seek(0)
        picture = _read_pillow(file, name)
    return _with_exif(picture, file, name)


def _with_exif(picture: Picture, file: BinaryIO, name: str) -> Picture:
    """The picture of a TIFF file with the EXIF among its tags."""
    from gncprior import exif

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            block = exif.from_tiff(file)
    except Exception:  # noqa: BLE001  (as above; the pixels are whole)
        return replace(picture, notices=(*picture.notices, f"{name} has EXIF that cannot be read"))
    return replace(picture, metadata=picture.metadata | {"exif": block}) if block else picture


def _tiff_pages(tiff: Any, name: str) -> Picture:
    pages: list[np.ndarray] = []
    offsets: set[int] = set()
    metadata: dict[str, Any] = {}
    total = 0
    size = tiff.filehandle.size
    for page in tiff.pages:
        if page.offset in offsets or len(pages) == MOST_PAGES:
            raise GncpriorError(f"{name} has pages without end: it is damaged.")
        offsets.add(page.offset)
        total += _pixels(page.shape)
        _check_size(total, name)
        if (
            page.photometric not in (0, 1, 2)
            or page.dtype is None
            or page.dtype.name not in _DTYPES
        ):
            raise ValueError("a palette, inks, or numbers without range: Pillow may convert them")
        if page.compression == 1 and math.prod(page.shape) * page.dtype.itemsize > size:
            raise GncpriorError(f"{name} is cut off: its header promises more than it holds.")
        array = page.asarray()
        if page.photometric == 0:  # white is zero
            array = (np.iinfo(array.dtype).max if array.dtype.kind == "u" else 1) - array
        if page.planarconfig == 2 and array.ndim == 3:
            array = np.moveaxis(array, 0, -1)
        pages += _pages_of(array, name)
        if not metadata:
            metadata = _tiff_metadata(page)
    return Picture(tuple(pages), "TIFF", metadata)


def _tiff_metadata(page: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    resolution = page.get_resolution(unit=2)  # per inch
    if "XResolution" in page.tags and min(resolution) > 0:
        found["dpi"] = tuple(float(r) for r in resolution)
    if page.iccprofile:
        found["icc_profile"] = bytes(page.iccprofile)
    return found


# ---------------------------------------------------------------- writing


def format_of(path: Path | str) -> str:
    """The format that a name stands for."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        known = ", ".join(FORMATS)
        raise GncpriorError(f"{path} does not end in a known format: choose one of {known}.")
    return FORMATS[suffix]


def write_picture(path: Path | str, picture: Picture) -> tuple[str, ...]:
    """Write a file in the format of its name, all of it or nothing; what had to be changed."""
    path = Path(path)
    kind = format_of(path)
    partial = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("w+b") as file:
                notices = encode(file, picture, kind, str(path))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise GncpriorError(
            f"Cannot write {path}: {why}; make room or choose another place."
        ) from error
    return notices


def encode(
    file: BinaryIO, picture: Picture, kind: str, name: str = "the output"
) -> tuple[str, ...]:
    """The picture as a file of this format; returns notices."""
    if kind == "NPY":
        same = len({page.shape for page in picture.pages}) == 1
        if not same:
            raise GncpriorError(f"{name} cannot hold pages of different sizes: write a TIFF.")
        pages = picture.pages
        np.lib.format.write_array(file, pages[0] if len(pages) == 1 else np.stack(pages))
        return ()
    notices: list[str] = []
    if kind == "TIFF" and _write_tiff(file, picture, name, notices):
        return tuple(notices)
    if len(picture.pages) > 1 and kind != "TIFF":
        raise GncpriorError(f"{name} cannot hold {len(picture.pages)} pages: write a TIFF.")
    fitted = [_fit(page, kind, name, notices) for page in picture.pages]
    if fitted[0].dtype == np.uint16 and fitted[0].ndim == 3:
        deep_png.write(file, fitted[0], picture.metadata)
        return tuple(notices)
    images = [Image.fromarray(page) for page in fitted]
    options: dict[str, Any] = dict(picture.metadata)
    if kind == "JPEG":
        options |= {"quality": 95, "subsampling": 0}
        if len(options.get("exif", b"")) > _JPEG_EXIF:
            notices.append(f"{name} is without EXIF, of which there is more than JPEG can hold")
            del options["exif"]
    elif kind == "WEBP":
        options |= {"lossless": True}
    elif kind in ("BMP", "PPM"):
        options = {}
    elif kind == "TIFF":
        options |= {"save_all": len(images) > 1, "append_images": images[1:]}
    images[0].save(file, kind, **options)
    return tuple(dict.fromkeys(notices))


def _fit(page: np.ndarray, kind: str, name: str, notices: list[str]) -> np.ndarray:
    """A page as this format can hold it."""
    if page.ndim == 3 and page.shape[2] == 1:
        page = page[..., 0]
    if page.ndim == 3 and page.shape[2] in (2, 4) and kind in ("JPEG", "PPM", "BMP"):
        notices.append(f"{name} is without transparency, which {kind} does not know")
        page = page[..., :-1]
        page = page[..., 0] if page.shape[2] == 1 else page
    if page.ndim == 3 and page.shape[2] == 2 and kind == "WEBP":
        page = page[..., [0, 0, 0, 1]]
    deep = kind == "PNG" or (page.ndim == 2 and kind in ("PPM", "TIFF"))
    if page.dtype == np.uint8 or (page.dtype == np.uint16 and deep):
        return np.ascontiguousarray(page)
    if page.dtype == np.float32 and page.ndim == 2 and kind == "TIFF":
        return np.ascontiguousarray(page)
    notices.append(f"{name} has {16 if deep else 8} bits a channel, as {kind} files have")
    share = page / 65535.0 if page.dtype == np.uint16 else np.clip(page.astype(np.float64), 0, 1)
    top, dtype = (65535, np.uint16) if deep else (255, np.uint8)
    return np.ascontiguousarray(np.rint(share * top).astype(dtype))


def _write_tiff(file: BinaryIO, picture: Picture, name: str, notices: list[str]) -> bool:
    """By tifffile, any depth; False where it is missing."""
    try:
        import tifffile
    except ImportError:
        return False
    options: dict[str, Any] = {"metadata": None, "software": False}
    if dpi := picture.metadata.get("dpi"):
        options |= {"resolution": tuple(float(d) for d in dpi), "resolutionunit": "INCH"}
    if profile := picture.metadata.get("icc_profile"):
        options["iccprofile"] = profile
    big = sum(page.nbytes for page in picture.pages) > _CLASSIC_TIFF
    with tifffile.TiffWriter(file, bigtiff=big, byteorder="<") as writer:
        for page in picture.pages:
            colours = page.shape[2] if page.ndim == 3 else 1
            alpha = ["unassalpha"] if colours in (2, 4) else None
            writer.write(
                page,
                photometric="rgb" if colours > 2 else "minisblack",
                planarconfig="contig" if colours > 1 else None,
                extrasamples=alpha,
                **options,
            )
    if block := picture.metadata.get("exif"):
        from gncprior import exif

        try:
            exif.into_tiff(file, block)
        except Exception:  # noqa: BLE001  (what cameras write breaks parsers in every way)
            notices.append(f"{name} is without EXIF, which is damaged or of too large a file")
    return True


def with_pages(picture: Picture, pages: list[np.ndarray]) -> Picture:
    """The same file with other pixels."""
    return replace(picture, pages=tuple(pages))


def side_by_side(
    pages: tuple[np.ndarray, ...], data_range: float | None = None, gap: int = 4
) -> np.ndarray:
    """Pages of one height as one picture of bytes, white between them; unknown values are black."""
    bytes_ = [_bytes(page, data_range) for page in pages]
    colour = max(page.shape[2] if page.ndim == 3 else 1 for page in bytes_) > 1
    parts = [page if page.ndim == 3 else page[..., None].repeat(3, 2) for page in bytes_]
    white = np.full((parts[0].shape[0], gap, 3), 255, np.uint8)
    joined = np.concatenate([piece for part in parts for piece in (part, white)][:-1], axis=1)
    return joined if colour else joined[..., 0]


def _bytes(page: np.ndarray, data_range: float | None) -> np.ndarray:
    """Without alpha, on the scale 0 … 255."""
    if page.ndim == 3 and page.shape[2] != 3:
        page = page[..., :3] if page.shape[2] == 4 else page[..., 0]
    if page.dtype == np.uint8:
        return page
    top = 65535.0 if page.dtype == np.uint16 else data_range or 1.0
    share = np.nan_to_num(page.astype(np.float64) / top)
    return np.rint(np.clip(share, 0, 1) * 255).astype(np.uint8)
