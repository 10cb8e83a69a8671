"""Picture files: what comes back is what was written, and damage is one sentence."""

import io
import os
import struct
import sys
import time
import zlib

import numpy as np
import pytest
from fuzz import outcome
from mutants import mutants, whole_files
from PIL import ExifTags, Image, TiffImagePlugin

from gncprior import GncpriorError
from gncprior.picture_files import Picture, encode, read_picture, write_picture

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (6, 9)).astype(np.uint8)
DEEP = RNG.integers(0, 65536, (6, 9)).astype(np.uint16)
COLOUR = RNG.integers(0, 256, (6, 9, 3)).astype(np.uint8)
ALPHA = RNG.integers(0, 256, (6, 9, 4)).astype(np.uint8)
DEEP_ALPHA = RNG.integers(0, 65536, (6, 9, 4)).astype(np.uint16)


def through(page: np.ndarray, path) -> tuple[np.ndarray, tuple[str, ...]]:
    notices = write_picture(path, Picture((page,)))
    (back,) = read_picture(path).pages
    return back, notices


@pytest.mark.parametrize(
    ("suffix", "pages"),
    [
        ("png", [GREY, DEEP, COLOUR, ALPHA, ALPHA[..., :2]]),
        ("png", [DEEP_ALPHA, DEEP_ALPHA[..., :3], DEEP_ALPHA[..., :2]]),
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
    back, (notice,) = through(DEEP_ALPHA / 65535, tmp_path / "b.png")
    assert np.array_equal(back, DEEP_ALPHA) and "b.png has 16 bits a channel" in notice
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


def camera() -> bytes:
    """EXIF as a camera writes it, with its settings, a place and a note in its own language."""
    exif = Image.Exif()
    exif[ExifTags.Base.Make] = "a camera"
    exif[ExifTags.Base.Orientation] = 6
    exif[ExifTags.IFD.Exif] = {
        ExifTags.Base.ExposureTime: TiffImagePlugin.IFDRational(1, 125),
        ExifTags.Base.ISOSpeedRatings: 400,
        ExifTags.Base.MakerNote: b"odd\0note",
    }
    exif[ExifTags.IFD.GPSInfo] = {ExifTags.GPS.GPSLatitudeRef: "N"}
    return exif.tobytes()


def assert_of_the_camera(exif: Image.Exif) -> None:
    assert exif[ExifTags.Base.Make] == "a camera"
    assert exif[ExifTags.Base.Orientation] == 6
    settings = exif.get_ifd(ExifTags.IFD.Exif)
    assert settings[ExifTags.Base.ExposureTime] == 1 / 125
    assert settings[ExifTags.Base.ISOSpeedRatings] == 400
    assert settings[ExifTags.Base.MakerNote] == b"odd\0note"
    assert exif.get_ifd(ExifTags.IFD.GPSInfo) == {ExifTags.GPS.GPSLatitudeRef: "N"}


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "webp"])
@pytest.mark.parametrize("page", [COLOUR, DEEP_ALPHA[..., :3]], ids=["8 bits", "16 bits"])
def test_metadata_is_kept(tmp_path, suffix, page):
    metadata = {"dpi": (300.0, 300.0), "icc_profile": b"p" * 200, "exif": camera()}
    file, copy = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
    write_picture(file, Picture((page,), metadata=metadata))
    write_picture(copy, read_picture(file))  # and a second time
    picture = read_picture(copy)
    assert picture.notices == ()
    assert picture.metadata["icc_profile"] == metadata["icc_profile"]
    if suffix != "webp":
        assert picture.metadata["dpi"] == pytest.approx((300, 300), abs=0.1)
    exif = Image.Exif()
    exif.load(picture.metadata["exif"])
    assert_of_the_camera(exif)
    if (suffix, page.dtype) != ("tif", np.uint16):  # which Pillow does not open
        with Image.open(copy) as image:  # as others read it
            assert_of_the_camera(image.getexif())


def test_exif_goes_from_format_to_format(tmp_path):
    picture = Picture((COLOUR,), metadata={"exif": camera()})
    for name in ("a.jpg", "b.tif", "c.png", "d.tiff", "e.webp", "f.jpg"):
        write_picture(tmp_path / name, picture)
        picture = read_picture(tmp_path / name)
    exif = Image.Exif()
    exif.load(picture.metadata["exif"])
    assert_of_the_camera(exif)


def test_tiff_with_exif_is_the_same_to_others(tmp_path):
    import tifffile

    pages = (DEEP, DEEP[::-1], DEEP_ALPHA)
    write_picture(tmp_path / "a.tif", Picture(pages, metadata={"exif": camera()}))
    with tifffile.TiffFile(tmp_path / "a.tif") as tiff:
        assert all(np.array_equal(p.asarray(), q) for p, q in zip(tiff.pages, pages, strict=True))
        tags = tiff.pages[0].tags
        assert tags["ExifTag"].value["ISOSpeedRatings"] == 400
        codes = [tag.code for tag in tags]
        assert codes == sorted(codes)


@pytest.mark.parametrize(("order", "big"), [("<", False), (">", False), ("<", True)])
def test_exif_of_every_kind_of_tiff(order, big):
    import tifffile

    file = io.BytesIO()
    with tifffile.TiffWriter(file, bigtiff=big, byteorder=order) as writer:
        writer.write(DEEP_ALPHA[..., :3].astype(np.float16), photometric="rgb", metadata=None,
                     software="a program", extratags=[(271, "s", 0, "a camera", True)])  # fmt: skip
    picture = read_picture(file.getvalue())
    assert picture.notices == ()
    exif = Image.Exif()
    exif.load(picture.metadata["exif"])
    assert dict(exif) == {271: "a camera", 305: "a program"}


def test_exif_that_is_damaged_or_too_long_is_said(tmp_path):
    metadata = {"exif": b"Exif\0\0nonsense"}
    (notice,) = write_picture(tmp_path / "a.tif", Picture((GREY,), metadata=metadata))
    assert "a.tif is without EXIF" in notice
    assert np.array_equal(read_picture(tmp_path / "a.tif").pages[0], GREY)
    metadata = {"exif": camera() + bytes(70_000)}
    (notice,) = write_picture(tmp_path / "a.jpg", Picture((GREY,), metadata=metadata))
    assert "a.jpg is without EXIF" in notice


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


def png(width: int, height: int, depth: int = 8, data: bytes = bytes(1000), *more: int) -> bytes:
    """A PNG file of any dimensions and content; more is type, compression, filter, interlacing."""
    head = struct.pack(">IIBBBBB", width, height, depth, *(more or (0, 0, 0, 0)))
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(content)) + kind + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in parts
    ]  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


DEEP_TYPES = {2: 4, 3: 2, 4: 6}  # channels → colour type


@pytest.mark.parametrize("channels", DEEP_TYPES)
@pytest.mark.parametrize("kind", range(5))
def test_deep_png_by_every_filter(channels, kind):
    """Filters 0 … 4 are none, left, above, their mean, and Paeth's choice among three."""
    page = DEEP_ALPHA[..., :channels]
    rows = page.astype(">u2").view(np.uint8).reshape(6, -1).astype(int)
    left, above, corner = np.zeros_like(rows), np.zeros_like(rows), np.zeros_like(rows)
    left[:, 2 * channels :] = rows[:, : -2 * channels]
    above[1:] = rows[:-1]
    corner[1:] = left[:-1]
    near = np.abs(np.stack([left, above, corner]) - (left + above - corner)).argmin(0)
    paeth = np.choose(near, [left, above, corner])  # the first of equals
    guess = [0 * rows, left, above, (left + above) // 2, paeth][kind]
    filtered = np.insert((rows - guess) % 256, 0, kind, axis=1).astype(np.uint8)
    data = png(9, 6, 16, filtered.tobytes(), DEEP_TYPES[channels], 0, 0, 0)
    (back,) = read_picture(data).pages
    assert back.dtype == np.uint16 and np.array_equal(back, page)


@pytest.mark.parametrize("channels", DEEP_TYPES)
def test_deep_png_interlaced(channels):
    page = DEEP_ALPHA[..., :channels]
    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2),
              (1, 0, 2, 1)]  # fmt: skip
    data = b""
    for row, column, down, across in passes:
        part = page[row::down, column::across]
        if part.size:
            data += b"".join(b"\0" + line.astype(">u2").tobytes() for line in part)
    (back,) = read_picture(png(9, 6, 16, data, DEEP_TYPES[channels], 0, 0, 1)).pages
    assert np.array_equal(back, page)


def test_deep_png_in_bands(tmp_path, monkeypatch):
    monkeypatch.setattr("gncprior.deep_png._BAND", 20)  # two rows at a time, and one
    for page in (DEEP_ALPHA, DEEP_ALPHA[:5, :, :3], DEEP_ALPHA[..., :2]):
        assert np.array_equal(through(page, tmp_path / "a.png")[0], page)


def test_damage_to_a_deep_png_is_found():
    file = io.BytesIO()
    encode(file, Picture((DEEP_ALPHA,)), "PNG")
    whole = file.getvalue()
    begin, end = whole.index(b"IDAT"), whole.index(b"IEND")
    for place in range(begin, end - 4, 7):
        damaged = bytearray(whole)
        damaged[place] ^= 16
        with pytest.raises(GncpriorError, match="Cannot read the input as a picture"):
            read_picture(bytes(damaged))
        with pytest.raises(GncpriorError, match="Cannot read the input as a picture"):
            read_picture(whole[:place])


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
        (png(50_000, 50_000, 16, bytes(10**7), 2, 0, 0, 0), "2500 megapixels|Cannot read"),
        (png(4000, 4000, 16, bytes(1000), 6, 0, 0, 0), "cut off"),
        (png(11, 15_000_000, 8, bytes(1000), 6, 0, 0, 0), "cut off"),
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
