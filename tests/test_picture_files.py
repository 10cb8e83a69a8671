"""Picture files: what comes back is what was written, and damage is one sentence."""

import io
import os
import struct
import sys
import time

import numpy as np
import pytest
from fuzz import outcome
from mutants import mutants, whole_files
from PIL import Image

from gncprior import GncpriorError
from gncprior.picture_files import Picture, encode, read_picture, write_picture

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (6, 9)).astype(np.uint8)
DEEP = RNG.integers(0, 65536, (6, 9)).astype(np.uint16)
COLOUR = RNG.integers(0, 256, (6, 9, 3)).astype(np.uint8)
ALPHA = RNG.integers(0, 256, (6, 9, 4)).astype(np.uint8)


def through(page: np.ndarray, path) -> tuple[np.ndarray, tuple[str, ...]]:
    notices = write_picture(path, Picture((page,)))
    (back,) = read_picture(path).pages
    return back, notices


@pytest.mark.parametrize(
    ("suffix", "pages"),
    [
        ("png", [GREY, DEEP, COLOUR, ALPHA, ALPHA[..., :2]]),
        ("webp", [COLOUR, ALPHA]),
        ("bmp", [GREY, COLOUR]),
        ("ppm", [COLOUR]),
        ("pgm", [GREY, DEEP]),
        ("tif", [GREY, DEEP, COLOUR, ALPHA, DEEP[..., None].repeat(3, 2)]),
        ("tiff", [x.astype(t) / 7 for x in (GREY, COLOUR) for t in ("f2", "f4", "f8")]),
        ("npy", [GREY, DEEP, COLOUR, ALPHA, GREY / 255, COLOUR.astype("f2")]),
    ],
)
def test_comes_back_as_it_was(tmp_path, suffix, pages):
    for page in pages:
        back, notices = through(page, tmp_path / f"a.{suffix}")
        assert back.dtype == page.dtype
        assert np.array_equal(back, page)
        assert notices == ()


def test_jpeg_is_close(tmp_path):
    smooth = np.linspace(0, 255, 64).reshape(8, 8).astype(np.uint8)
    back, notices = through(smooth, tmp_path / "a.jpg")
    assert np.abs(back.astype(int) - smooth).max() <= 4 and notices == ()


def test_what_a_format_cannot_hold_is_said(tmp_path):
    back, (notice,) = through(DEEP, tmp_path / "a.jpg")
    assert back.dtype == np.uint8 and "a.jpg has 8 bits a channel" in notice
    back, (notice,) = through(DEEP / 65535, tmp_path / "a.png")
    assert np.array_equal(back, DEEP) and "a.png has 16 bits a channel" in notice
    back, (notice,) = through(ALPHA, tmp_path / "a.jpeg")
    assert back.shape == (6, 9, 3) and "without transparency" in notice


def test_many_pages(tmp_path):
    pages = (GREY, GREY[::-1], COLOUR)
    write_picture(tmp_path / "a.tif", Picture(pages))
    for page, back in zip(pages, read_picture(tmp_path / "a.tif").pages, strict=True):
        assert np.array_equal(page, back)
    for name in ("a.png", "a.npy"):
        with pytest.raises(GncpriorError, match="write a TIFF"):
            write_picture(tmp_path / name, Picture(pages))
    write_picture(tmp_path / "b.npy", Picture((GREY, GREY[::-1], GREY)))
    assert len(read_picture(tmp_path / "b.npy").pages) == 3


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "webp"])
def test_metadata_is_kept(tmp_path, suffix):
    exif = Image.Exif()
    exif[0x010F] = "a camera"
    metadata = {"dpi": (300.0, 300.0), "icc_profile": b"p" * 200, "exif": exif.tobytes()}
    write_picture(tmp_path / f"a.{suffix}", Picture((COLOUR,), metadata=metadata))
    back = read_picture(tmp_path / f"a.{suffix}").metadata
    assert back["icc_profile"] == metadata["icc_profile"]
    if suffix != "webp":
        assert back["dpi"] == pytest.approx((300, 300), abs=0.1)
    if suffix != "tif":
        with Image.open(tmp_path / f"a.{suffix}") as image:
            assert image.getexif()[0x010F] == "a camera"


@pytest.mark.parametrize(("mode", "target"), [("CMYK", "RGB"), ("P", "RGB"), ("1", "L")])
def test_conversions_are_said(tmp_path, mode, target):
    image = Image.fromarray(COLOUR).convert(mode)
    image.save(tmp_path / "a.tif")
    picture = read_picture(tmp_path / "a.tif")
    assert np.array_equal(picture.pages[0], np.array(image.convert(target)))
    assert f"to {target}" in picture.notices[0]


def test_without_tifffile(tmp_path, monkeypatch):
    write_picture(tmp_path / "a.tif", Picture((DEEP, DEEP[::-1])))
    monkeypatch.setitem(sys.modules, "tifffile", None)
    assert np.array_equal(read_picture(tmp_path / "a.tif").pages[1], DEEP[::-1])
    write_picture(tmp_path / "b.tif", Picture((DEEP, DEEP[::-1])))
    assert np.array_equal(read_picture(tmp_path / "b.tif").pages[1], DEEP[::-1])
    _, (notice,) = through(COLOUR / 255, tmp_path / "c.tif")
    assert "8 bits" in notice


def test_compressions_that_only_pillow_knows(tmp_path):
    Image.fromarray(COLOUR).save(tmp_path / "a.tif", compression="tiff_lzw")
    assert np.array_equal(read_picture(tmp_path / "a.tif").pages[0], COLOUR)


def png(width: int, height: int) -> bytes:
    """The head of a PNG file of any dimensions."""
    import zlib

    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    head = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    data = zlib.compress(bytes(1000))
    idat = struct.pack(">I", len(data)) + b"IDAT" + data
    return b"\x89PNG\r\n\x1a\n" + head + idat + struct.pack(">I", zlib.crc32(b"IDAT" + data))


def npy(shape: tuple[int, ...], dtype: str = "|u1") -> bytes:
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + bytes(100)


def tiff(width: int, height: int, following: int = 0) -> bytes:
    """One page of 100 bytes that claims a size, and where the next page is."""
    tags = [(256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 200)]
    tags += [(277, 3, 1), (278, 4, height), (279, 4, 100)]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    page = struct.pack("<H", len(tags)) + entries + struct.pack("<I", following)
    return (b"II*\0" + struct.pack("<I", 8) + page).ljust(200, b"\0") + bytes(100)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"hello", "Cannot read .* as a picture"),
        (png(100_000, 100_000), "10000 megapixels|Cannot read"),
        (png(0, 5), "Cannot read|no pixels"),
        (npy((10**6, 10**6)), "1000000 megapixels"),
        (npy((5000, 5000)), "cut off"),
        (npy((5, 5), "|O"), "holds object"),
        (npy((5, 5), "<i8"), "holds int64"),
        (npy((5,)), "has the shape"),
        (tiff(10**5, 10**5), "10000 megapixels"),
        (tiff(5000, 5000), "cut off"),
        (tiff(10, 10, following=8), "without end|Cannot read"),
    ],
)
def test_bad_files_are_one_sentence_and_cost_nothing(tmp_path, content, sentence):
    file = tmp_path / "bad.png"
    file.write_bytes(content)
    begin = time.process_time()
    with pytest.raises(GncpriorError, match=sentence) as caught:
        read_picture(file)
    assert time.process_time() - begin < 2
    assert "bad.png" in str(caught.value) and "\n" not in str(caught.value)


def test_missing_and_unreadable(tmp_path):
    with pytest.raises(GncpriorError, match=r"There is no picture .*none\.png"):
        read_picture(tmp_path / "none.png")
    with pytest.raises(GncpriorError, match=r"Cannot read .*directory"):
        read_picture(tmp_path)


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    file = tmp_path / "a.png"
    file.write_bytes(b"old")
    monkeypatch.setattr("gncprior.picture_files.encode", full)
    with pytest.raises(GncpriorError, match=r"Cannot write .*a\.png: No space left on device"):
        write_picture(file, Picture((GREY,)))
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.png"]  # noqa: PTH208
    with pytest.raises(GncpriorError, match=r"known format: choose one of \.png"):
        write_picture(tmp_path / "a.xyz", Picture((GREY,)))
    with pytest.raises(GncpriorError, match="Cannot write"):
        write_picture(file / "below.png", Picture((GREY,)))


def test_whole_files_are_read():
    for name, data in whole_files().items():
        assert outcome(data) == "read", name


def test_2000_damaged_files_are_read_or_refused():
    seen = {outcome(data) for _, data in mutants(2000, seed=7)}
    assert seen == {"read", "refused"}


def test_encode_writes_to_a_stream():
    file = io.BytesIO()
    encode(file, Picture((GREY,)), "PNG")
    assert np.array_equal(read_picture(file.getvalue()).pages[0], GREY)
