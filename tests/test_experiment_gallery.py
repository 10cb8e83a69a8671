import sys
import types

import numpy as np
import pytest

from gncprior import denoise, inpaint, plots
from gncprior.errors import GncpriorError
from gncprior.experiments import gallery


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    files = gallery.run(tmp_path_factory.mktemp("gallery"), quick=True, priors=["r1"])
    return files, plots.load_data(files[0])


def test_files(quick):
    files, data = quick
    assert [file.name for file in files] == [f"gallery.{kind}" for kind in ["npz", "png", "pdf"]]
    assert data["images"].tolist() == [0, 1, 2]


def test_pictures_are_those_of_the_protocol_and_of_the_public_functions(quick):
    data = quick[1]
    x = data["2.x"]
    z = x + 0.1 * np.random.default_rng(2).standard_normal(x.shape)
    mask = np.random.default_rng(1002).random(x.shape) < 0.8
    np.testing.assert_allclose(data["2.denoise.seen"], z, atol=1e-6)
    np.testing.assert_allclose(data["2.inpaint.seen"], np.where(mask, 0, x), atol=1e-6)
    restored = denoise(z, sigma=0.1, prior="r1")
    np.testing.assert_allclose(data["2.denoise.r1"], restored, atol=1e-4)
    filled = inpaint(np.where(mask, 0, x), mask, prior="r1")
    np.testing.assert_allclose(data["2.inpaint.r1"], filled, atol=1e-4)
    for task in ("denoise", "inpaint"):
        error = np.mean((data[f"2.{task}.r1"] - x) ** 2)
        assert data[f"2.{task}.r1.psnr"] == pytest.approx(-10 * np.log10(error), abs=1e-2)


def test_restoring_helps(quick):
    data = quick[1]
    for k in range(3):
        for task in ("denoise", "inpaint"):
            assert data[f"{k}.{task}.r1.psnr"] > data[f"{k}.{task}.seen.psnr"] + 1


def test_the_busiest_part():
    x = np.zeros((40, 50))
    x[16:24, 24:32] = np.eye(8)
    assert gallery.busiest(x, 8) == (16, 24, 8)
    assert gallery.busiest(x, 100) == (0, 0, 40)


def test_bm3d_where_it_is_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "bm3d", None)
    assert gallery.find_bm3d() is None
    package = types.ModuleType("bm3d")
    package.bm3d = lambda z, sigma: z[..., None] * 0 + sigma
    monkeypatch.setitem(sys.modules, "bm3d", package)
    np.testing.assert_array_equal(gallery.find_bm3d()(np.ones((2, 3)), 0.1), np.full((2, 3), 0.1))


def test_an_image_that_is_not_there(tmp_path, quick):
    with pytest.raises(GncpriorError, match=r"no image 3: .* has 0 to 2"):
        gallery.run(tmp_path, priors=["r1"], data=_folder(tmp_path), images=[3])


def _folder(path):
    from PIL import Image

    for k in range(3):
        Image.new("L", (16, 16)).save(path / f"{k}.png")
    return path


def test_figure_depends_on_the_saved_data_only(quick, tmp_path):
    files, data = quick
    again = gallery.draw(data, tmp_path)
    assert [f.read_bytes() for f in files[1:]] == [f.read_bytes() for f in again]
