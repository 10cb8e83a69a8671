import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from gncprior import mixtures, plots
from gncprior.errors import GncpriorError
from gncprior.experiments import mixture


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    out = tmp_path_factory.mktemp("figures") / "new"
    return out, mixture.run(out, quick=True)


def test_run_makes_data_png_and_pdf_and_nothing_else(quick):
    out, files = quick
    assert files == [out / f"mixture.{kind}" for kind in ["npz", "png", "pdf"]]
    assert sorted(out.iterdir()) == sorted(files)
    assert files[2].read_bytes().startswith(b"%PDF-")
    with Image.open(files[1]) as image:
        assert image.width >= 2000
        pixels = np.asarray(image.convert("RGB").resize((300, 120))).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 1000


def test_data_are_the_numbers_of_the_example(quick):
    data = plots.load_data(quick[1][0])
    assert data["t_convex"] == pytest.approx(0.19628, abs=1e-4)
    assert data["t_unimodal"] == pytest.approx(0.07075, abs=1e-4)
    np.testing.assert_allclose(data["minimum"], [0.499445, -0.884574], atol=1e-5)
    np.testing.assert_allclose(data["basin"], [0.1935, 0.8811], atol=1e-4)
    assert data["energy"].shape == (len(data["t"]), len(data["x"]))
    assert data["energy"][0].min() == pytest.approx(-0.884574, abs=1e-3)
    assert data["curvature"][0] == pytest.approx(-186.6, rel=0.02)
    convex = data["t_curvature"] >= data["t_convex"]
    np.testing.assert_array_equal(data["curvature"] >= 0, convex)


@mixture._one_thread()
def test_rates_are_those_of_the_plain_flow(quick):
    data = plots.load_data(quick[1][0])
    low, high = data["basin"]
    starts = torch.linspace(-3, 3, 1000, dtype=torch.float64).unsqueeze(-1)
    for i, j in [(0, 3), (12, 15), (17, 20), (20, 10), (22, 14), (23, 20)]:
        t_0, steps = float(data["t_0"][i]), int(data["steps"][j])
        ends = mixtures.gnc_flow(mixtures.example_1d(), starts, t_0, steps)
        expected = float(((ends >= low) & (ends < high)).double().mean())
        assert data["rate"][i, j] == expected
    assert data["rate"].min() < 0.2
    assert data["rate"][-1, -1] == 1


def test_full_size_map_takes_less_than_a_minute():
    begin = time.process_time()
    data = mixture.compute()
    assert time.process_time() - begin < 60
    assert data["rate"].shape == (len(data["t_0"]), len(data["steps"]))
    assert min(data["rate"].shape) >= 40
    assert data["starts"] == 1000
    assert (data["steps"][0], data["steps"][-1]) == (1, 2000)
    assert data["t_0"][[0, -1]] == pytest.approx([1e-4, 1])
    # All starts attain the minimum in the upper right corner; none of the rows below two minima do.
    assert (data["rate"][data["t_0"] >= 0.1, -1] == 1).all()
    assert (data["rate"][data["t_0"] <= 0.07] < 0.6).all()


def test_figure_depends_on_the_saved_data_only(quick, tmp_path):
    data = plots.load_data(quick[1][0])
    for path, again in zip(quick[1][1:], mixture.draw(data, tmp_path), strict=True):
        assert path.read_bytes() == again.read_bytes()
    data["rate"] = 1 - data["rate"]
    changed, _ = mixture.draw(data, tmp_path)
    assert changed.read_bytes() != quick[1][1].read_bytes()


def test_threads_are_given_back():
    before = torch.get_num_threads()
    seen = []

    @mixture._one_thread()
    def fail():
        seen.append(torch.get_num_threads())
        raise ZeroDivisionError

    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            fail()
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    plots.save_data(tmp_path, "numbers", {"a": np.arange(3)})

    class Unwritable:
        def __array__(self, dtype=None, copy=None):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        plots.save_data(tmp_path, "numbers", {"a": Unwritable()})
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.npz"]
    np.testing.assert_array_equal(plots.load_data(tmp_path / "numbers.npz")["a"], np.arange(3))


def test_without_matplotlib_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(GncpriorError, match=r"pip install 'gncprior\[plot\]'"), plots.figure(1, 1):
        pass
