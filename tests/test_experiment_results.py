"""The page of results: numbers go from the reports to their places unchanged."""

import json
import shlex
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from gncprior import cli
from gncprior.datasets import Dataset
from gncprior.errors import GncpriorError
from gncprior.experiments import peers, results

PAGE = Path(__file__).parents[1] / "docs" / "results.md"


def one(task, level, prior="r1", method="learned", steps=10, **mean):
    settings = {"task": task, "level": level, "prior": prior, "images": "BSDS68", "count": 68}
    if task != "noise":
        settings |= {"method": method, "steps": steps, "t0": None, "blind": False}
    return {"settings": {**settings, "colour": False}, "mean": mean, "images": []}


REPORTS = [
    one("denoise", 15 / 255, psnr=31.123, ssim=0.8767, seconds=0.2),
    one("denoise", 0.1, psnr=28.456, ssim=0.7891, seconds=0.3),
    one("denoise", 0.1, prior="r3", method="joint", psnr=28.1, ssim=0.7, seconds=1.5),
    one("denoise", 0.1, prior="", method="BM3D", steps=0, psnr=28.52, ssim=0.8, seconds=3.0),
    one("inpaint", 0.8, psnr=26.789, ssim=0.81234, seconds=2.341),
    one("noise", 0.1, sigma=0.102, error=0.0234, seconds=0.1),
]


@pytest.fixture
def scores(tmp_path):
    for k, report in enumerate(REPORTS):
        (tmp_path / f"{k}.json").write_text(json.dumps([report]))
    return tmp_path


def cells(table):
    return [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()]


def test_denoising(scores):
    head, _, *rows = cells(results.denoising(results.read(scores)))
    assert head[2:] == ["5", "15", "25", "25.5 (σ = 0.1)", "50", "time / BM3D"]
    scores = ["–", "31.12 / 0.877", "–", "28.46 / 0.789", "–"]
    assert ["`r1`", "learned, I = 10", *scores, "0.100"] in rows
    assert ["`r3`", "joint, I = 10", "–", "–", "–", "28.10 / 0.700", "–", "0.500"] in rows
    assert ["–", "BM3D", "–", "–", "–", "28.52 / 0.800", "–", "1.000"] in rows


def test_without_bm3d_there_is_no_ratio():
    assert cells(results.denoising(REPORTS[:2]))[-1][-1] == "–"


def test_inpainting_and_noise_level(scores):
    reports = results.read(scores)
    rows = cells(results.inpainting(reports))
    assert ["`r1`", "learned, I = 10", "26.79", "0.812", "2.34"] in rows
    assert len(rows) == 2 + 1 + len(peers.INPAINTERS)
    rows = cells(results.noise_level(reports))
    assert ["`r1`", "–", "–", "2.34", "–", "–"] in rows
    assert rows[-1][1:] == ["37.00", "10.00", "2.80", "0.83", "0.86"]


def test_images_other_than_all_of_bsds68_are_named():
    report = one("denoise", 0.1, psnr=28.0, ssim=0.7, seconds=1.0)
    report["settings"]["count"] = 8
    assert "(8 images of BSDS68)" in results.denoising([report])


def test_colour_and_blind_scores_are_not_mixed_in():
    report = one("denoise", 0.1, psnr=33.0, ssim=0.9, seconds=1.0)
    report["settings"]["colour"] = True
    assert "33.0" not in results.denoising([report])


def test_colour_beside_channel_by_channel():
    reports = [
        one("denoise", 25 / 255, prior=prior, psnr=psnr, ssim=0.9, seconds=1.0)
        for prior, psnr in (("r1", 28.123), ("r1-rgb", 30.456))
    ]
    assert len(cells(results.colour(reports))) == 2
    for report in reports:
        report["settings"]["colour"] = True
    rows = cells(results.colour(reports))[2:]
    assert ["`r1`", "learned, I = 10", "one by one", "28.12", "0.900", "1.00"] in rows
    assert ["`r1-rgb`", "learned, I = 10", "together", "30.46", "0.900", "1.00"] in rows


def test_peers_are_all_in_their_table():
    table = results.denoising_peers()
    for peer in peers.DENOISERS:
        assert peer.name in table
        assert peer.measured is None or f" {peer.measured:.2f} " in table
    measured = [p.measured for p in peers.DENOISERS if p.measured is not None]
    assert measured == sorted(measured, reverse=True)


def test_the_page_has_all_places_and_keeps_its_words(scores, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text("utf-8"), "utf-8")
    results.write(page, results.tables(results.read(scores), tmp_path, page))
    text = page.read_text("utf-8")
    assert "28.46 / 0.789" in text and "26.79" in text

    def words(text):
        """What stands outside of the places."""
        parts = text.split("<!-- begin ")
        return [parts[0], *(part.partition("<!-- end ")[2] for part in parts[1:])]

    assert words(text) == words(PAGE.read_text("utf-8"))
    before = text
    results.write(page, results.tables(results.read(scores), tmp_path, page))
    assert page.read_text("utf-8") == before


def test_a_page_without_places(tmp_path):
    page = tmp_path / "page.md"
    with pytest.raises(GncpriorError, match="no page"):
        results.write(page, {})
    page.write_text("nothing")
    with pytest.raises(GncpriorError, match="no place marked <!-- begin a -->"):
        results.write(page, {"a": "b"})
    assert page.read_text() == "nothing"


def test_scores_that_cannot_be_read(tmp_path):
    with pytest.raises(GncpriorError, match="no folder"):
        results.read(tmp_path / "none")
    (tmp_path / "bad.json").write_text('[{"a": 1}]')
    with pytest.raises(GncpriorError, match=r"bad\.json was not written by"):
        results.read(tmp_path)


@pytest.mark.parametrize("priors", [["r1"], []])
def test_the_listed_commands_are_commands(priors):
    lines = results.commands(priors)
    files = [shlex.split(line)[-1] for line in lines]
    assert len(set(files)) == len(files)
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "gncprior"
        cli.app.parse_args(words, exit_on_error=False, print_error=False)


def test_bm3d_is_measured_by_the_protocol(monkeypatch):
    """With a BM3D that does nothing the PSNR is that of the noise of the protocol."""
    package = types.ModuleType("bm3d")
    package.bm3d = lambda z, sigma: z
    monkeypatch.setitem(sys.modules, "bm3d", package)
    images = Dataset("two", ("a", "b"), (np.zeros((1, 32, 32), np.uint8),) * 2)
    (report,) = results.measure_bm3d(images)
    noise = [0.1 * np.random.default_rng(k).standard_normal((32, 32)) for k in range(2)]
    expected = np.mean([-10 * np.log10(np.mean(n**2)) for n in noise])
    assert report["mean"]["psnr"] == pytest.approx(expected, abs=1e-4)
    assert report["settings"]["method"] == "BM3D" and report["settings"]["count"] == 2
    monkeypatch.setitem(sys.modules, "bm3d", None)
    with pytest.raises(GncpriorError, match="BM3D is not installed"):
        results.measure_bm3d(images)
