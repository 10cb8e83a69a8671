"""Pictures from disk: listed in order, read exactly, and refused with a sentence."""

import numpy as np
import pytest
from PIL import Image

from gncprior import GncpriorError
from gncprior.images import list_images, read_image

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(256, size=(5, 7, 3), dtype=np.uint8)


def test_grey_and_colour_are_those_of_pil(tmp_path):
    Image.fromarray(COLOUR).save(tmp_path / "a.png")
    grey = read_image(tmp_path / "a.png")
    weights = np.array([299, 587, 114]) / 1000
    assert np.abs(grey - COLOUR @ weights).max() <= 1
    assert np.array_equal(grey, np.asarray(Image.fromarray(COLOUR).convert("L")))
    assert np.array_equal(read_image(tmp_path / "a.png", 3), COLOUR)


def test_other_modes(tmp_path):
    alpha = np.dstack([COLOUR, np.full((5, 7), 9, np.uint8)])
    Image.fromarray(alpha).save(tmp_path / "alpha.png")
    assert np.array_equal(read_image(tmp_path / "alpha.png", 3), COLOUR)
    deep = COLOUR[..., 0].astype(np.uint16) * 257
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert np.array_equal(read_image(tmp_path / "deep.png"), COLOUR[..., 0])
    assert np.array_equal(read_image(tmp_path / "deep.png", 3)[..., 2], COLOUR[..., 0])


def test_folders_are_listed_in_order(tmp_path):
    for name in ("b.PNG", "a.jpg", "notes.txt", ".hidden.png", "below/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    assert [f.name for f in list_images(tmp_path)] == ["a.jpg", "b.PNG"]
    assert [f.name for f in list_images(tmp_path, recursive=True)] == ["a.jpg", "b.PNG", "c.png"]


@pytest.mark.parametrize("missing", ["nothing", "notes.txt"])
def test_what_is_no_folder(tmp_path, missing):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(GncpriorError, match=f"{missing}.*: name a folder of images"):
        list_images(tmp_path / missing)


def test_errors_name_the_file(tmp_path):
    Image.fromarray(COLOUR).save(tmp_path / "good.png")
    good = (tmp_path / "good.png").read_bytes()
    for name, content in [("empty.png", b""), ("text.png", b"hello"), ("cut.png", good[:60])]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(GncpriorError, match=rf"Cannot read .*{name} as an image"):
            read_image(tmp_path / name)
    with pytest.raises(GncpriorError, match=r"There is no image .*none\.png"):
        read_image(tmp_path / "none.png")
    Image.fromarray(np.ones((3, 3), np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(GncpriorError, match=r"float\.tif has pixels of 32 bits"):
        read_image(tmp_path / "float.tif")
    with pytest.raises(GncpriorError, match="1 channel"):
        read_image(tmp_path / "good.png", 2)
