"""`gncprior denoise`, `inpaint`, `estimate`: files, folders, patterns, pipes, and everything that can be wrong."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_cli import one_sentence

from gncprior import cli, denoise
from gncprior.picture_files import Picture, read_picture, write_picture

RNG = np.random.default_rng(3)
CLEAN = 128 + 60 * np.add.outer(np.sin(np.arange(32) / 9), np.cos(np.arange(40) / 7))
NOISY = np.clip(CLEAN + 20 * RNG.standard_normal(CLEAN.shape), 0, 255).astype(np.uint8)
MASK = (RNG.random(CLEAN.shape) < 0.5).astype(np.uint8) * 255


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


def save(path: Path, *pages: np.ndarray) -> Path:
    write_picture(path, Picture(pages))
    return path


def error(page: np.ndarray) -> float:
    return float(np.sqrt(np.mean((page.astype(float) - CLEAN) ** 2)))


@pytest.fixture
def noisy(tmp_path) -> Path:
    return save(tmp_path / "noisy.png", NOISY)


def test_a_file(noisy, tmp_path, capsys):
    out = tmp_path / "new" / "clean.png"
    assert run("denoise", noisy, out, "--sigma", "20/255") == 0
    (page,) = read_picture(out).pages
    assert page.dtype == np.uint8 and error(page) < 0.55 * error(NOISY)
    assert re.search(r"clean\.png  \(.* s, σ = 0\.0784 given\)", capsys.readouterr().out)


def test_refuses_to_overwrite(noisy, tmp_path, capsys):
    out = tmp_path / "clean.png"
    out.write_bytes(b"precious")
    assert run("denoise", noisy, out) == 2
    assert "exists" in one_sentence(capsys.readouterr().err)
    assert out.read_bytes() == b"precious"
    assert run("denoise", noisy, out, "--overwrite", "--quality", "fast") == 0
    assert error(read_picture(out).pages[0]) < 0.6 * error(NOISY)


def test_the_noise_level_is_estimated_and_told(noisy, tmp_path, capsys):
    assert run("denoise", noisy, tmp_path / "a.png", "--json") == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["sigma"][0] == pytest.approx(20 / 255, abs=3 * record["estimated_error"][0])
    assert run("estimate", noisy, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["sigma"] == record["sigma"]
    assert run("estimate", noisy) == 0
    assert re.search(r"noisy\.png  0\.0\d+ ± 0\.0\d+  \(\d+\.\d/255\)", capsys.readouterr().out)


def test_inpainting_keeps_what_is_known(tmp_path, capsys):
    image = save(tmp_path / "a.png", np.where(MASK, 0, CLEAN).astype(np.uint8))
    mask = save(tmp_path / "m.png", MASK)
    assert run("inpaint", image, tmp_path / "b.png", "--mask", mask, "--quality", "fast") == 0
    (page,) = read_picture(tmp_path / "b.png").pages
    assert np.array_equal(page[MASK == 0], CLEAN.astype(np.uint8)[MASK == 0])
    assert error(page) < 2
    assert "% unknown" in capsys.readouterr().out


def test_a_folder_is_mirrored_and_bad_files_are_listed(tmp_path, capsys):
    source, out = tmp_path / "in", tmp_path / "out"
    save(source / "a.png", NOISY)
    save(source / "deep" / "er" / "b.tif", NOISY, NOISY[::-1])
    save(source / "c.jpg", np.dstack([NOISY] * 3))
    (source / "bad.png").write_bytes(b"no picture")
    (source / "notes.txt").write_text("not listed")
    assert run("denoise", source, out, "--sigma", "0.08", "--jobs", 2) == 1
    printed, err = capsys.readouterr()
    lines = err.splitlines()
    assert "bad.png" in lines[0] and "1 of 4 pictures" in lines[1] and len(lines) == 2
    assert sorted(str(f.relative_to(out)) for f in out.rglob("*") if f.is_file()) == [
        "a.png", "c.jpg", "deep/er/b.tif",
    ]  # fmt: skip
    assert len(printed.splitlines()) == 3
    first, second = read_picture(out / "deep" / "er" / "b.tif").pages
    assert np.array_equal(first, denoise(NOISY, 0.08))
    assert np.array_equal(second, denoise(NOISY[::-1], 0.08))
    assert error(first) < 0.6 * error(NOISY)
    (source / "bad.png").unlink()
    save(source / "d.png", NOISY)
    before = (out / "a.png").stat().st_mtime_ns
    assert run("denoise", source, out, "--sigma", "0.08") == 0
    printed = capsys.readouterr().out
    assert "d.png" in printed and "3 done before" in printed
    assert (out / "a.png").stat().st_mtime_ns == before


def test_a_pattern(tmp_path, capsys):
    for name in ("a1.png", "a2.png", "b.png"):
        save(tmp_path / "in" / name, NOISY)
    assert run("denoise", tmp_path / "in" / "a*.png", tmp_path / "out", "--quality", "fast") == 0
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["a1.png", "a2.png"]
    assert run("estimate", tmp_path / "in" / "*.png") == 0
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_a_folder_of_masks(tmp_path):
    for name in ("a.png", "b.png"):
        save(tmp_path / "in" / name, np.where(MASK, 0, CLEAN).astype(np.uint8))
    save(tmp_path / "masks" / "a.png", MASK)
    words = ("inpaint", tmp_path / "in", tmp_path / "out", "--mask", tmp_path / "masks")
    assert run(*words, "--quality", "fast") == 1  # one mask is missing
    assert error(read_picture(tmp_path / "out" / "a.png").pages[0]) < 2
    assert not (tmp_path / "out" / "b.png").exists()


def test_pipes(noisy):
    command = [sys.executable, "-m", "gncprior", "denoise", "-", "-", "--sigma", "20/255"]
    done = subprocess.run(command, input=noisy.read_bytes(), capture_output=True, check=True)
    with Image.open(io.BytesIO(done.stdout)) as image:
        assert image.format == "PNG" and error(np.asarray(image)) < 0.55 * error(NOISY)
    assert done.stderr == b""
    done = subprocess.run(command, input=b"", capture_output=True, check=False)
    assert done.returncode == 2 and done.stdout == b""
    assert one_sentence(done.stderr.decode()) == "the input is empty."


def test_comparison_and_trace(noisy, tmp_path):
    words = ("--sigma", "0.08", "--method", "scheduled", "--compare", "--trace")
    assert run("denoise", noisy, tmp_path / "a.png", *words) == 0
    (both,) = read_picture(tmp_path / "a-compare.png").pages
    assert np.array_equal(both[:, :40], NOISY)
    assert np.array_equal(both[:, -40:], read_picture(tmp_path / "a.png").pages[0])
    head, *rows = (tmp_path / "a-trace.csv").read_text().splitlines()
    assert head == "part,step,t_hat,energy,step_size"
    t_hats = [float(row.split(",")[2]) for row in rows]
    assert t_hats[0] == pytest.approx(2 * np.log(0.08), abs=1e-5)
    assert len(rows) == 5 and t_hats[-1] == pytest.approx(t_hats[0] - 3, abs=1e-5)
    assert read_picture(tmp_path / "a-trace.png").pages[0].shape[1] > 500


@pytest.mark.parametrize("suffix", ["tif", "png"])
def test_depth_and_metadata_are_kept(tmp_path, suffix):
    page = (NOISY.astype(np.uint16) * 257)[..., None].repeat(4, 2)
    exif = Image.Exif()
    exif[0x010F] = "a camera"
    metadata = {"dpi": (150.0, 150.0), "icc_profile": b"p" * 64, "exif": exif.tobytes()}
    source, target = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
    write_picture(source, Picture((page,), metadata=metadata))
    assert run("denoise", source, target, "--sigma", "20/255") == 0
    back = read_picture(target)
    assert back.pages[0].dtype == np.uint16
    assert back.metadata.pop("dpi") == pytest.approx(metadata.pop("dpi"), abs=0.1)
    assert back.metadata == metadata
    assert np.array_equal(back.pages[0][..., 3], page[..., 3])
    assert error(back.pages[0][..., 1] / 257) < 0.55 * error(NOISY)


def test_notices(tmp_path, capsys):
    Image.fromarray(np.dstack([NOISY] * 3)).convert("CMYK").save(tmp_path / "inks.tif")
    assert run("denoise", tmp_path / "inks.tif", tmp_path / "b.png", "--sigma", "0.08") == 0
    assert "converted from CMYK to RGB" in one_sentence(capsys.readouterr().err)
    np.save(tmp_path / "f.npy", NOISY.astype(np.float32))
    assert run("denoise", tmp_path / "f.npy", tmp_path / "g.npy", "--sigma", "0.08") == 0
    assert "--data-range" in one_sentence(capsys.readouterr().err)
    words = ("--sigma", "0.08", "--overwrite", "--data-range", "255")
    assert run("denoise", tmp_path / "f.npy", tmp_path / "g.npy", *words) == 0
    assert capsys.readouterr().err == ""
    assert error(np.load(tmp_path / "g.npy")) < 0.55 * error(NOISY)


def damaged(tmp_path: Path) -> None:
    """All that can be wrong with files, by name."""
    whole = save(tmp_path / "whole.png", NOISY).read_bytes()
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "cut.png").write_bytes(whole[:200])
    (tmp_path / "nothing").mkdir()
    save(tmp_path / "small_mask.png", MASK[:5])
    save(tmp_path / "all_mask.png", np.full_like(MASK, 255))
    save(tmp_path / "one.png", NOISY[:1, :1])
    for name, value in [("nan", np.nan), ("inf", np.inf)]:
        page = CLEAN / 255
        page[3, 5] = value
        save(tmp_path / f"{name}.npy", page)
    save(tmp_path / "pages.tif", NOISY, NOISY)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("denoise empty.png x.png", "empty.png is empty"),
        ("denoise cut.png x.png", "Cannot read .*cut.png"),
        ("denoise none.png x.png", "There is no picture .*none.png"),
        ("denoise nothing x", "no pictures in .*nothing"),
        ("denoise whole.png x.xyz", "known format"),
        ("denoise nan.npy x.npy", "nan.npy: The pixel at row 3, column 5 is nan"),
        ("denoise inf.npy x.npy --sigma 0.1", "row 3, column 5 is inf"),
        ("denoise pages.tif x.png", "cannot hold 2 pages: write a TIFF"),
        ("denoise whole.png x.png --sigma loud", "noise level must be a positive number"),
        ("denoise whole.png x.png --prior r99", "r99"),
        ("denoise whole.png /proc/x.png", "Cannot write"),
        ("denoise whole.png - --json", "no place for more"),
        ("denoise *.png -", "pipe"),
        ("inpaint whole.png x.png --mask small_mask.png", "mask of shape .* does not fit"),
        ("inpaint whole.png x.png --mask all_mask.png", "every pixel as unknown"),
        ("inpaint whole.png x.png --mask none.png", "There is no picture .*none.png"),
        ("inpaint whole.png x.png --mask whole.png --method tweedie", "Tweedie"),
        ("estimate cut.png", "Cannot read .*cut.png"),
    ],
)
def test_bad_input_is_one_sentence_without_output(line, sentence, tmp_path, monkeypatch, capsys):
    damaged(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir())  # noqa: PTH208
    assert run(*line.split()) == 2
    out, err = capsys.readouterr()
    assert re.search(sentence, one_sentence(err)), err
    assert out == ""
    assert sorted(os.listdir()) == before  # noqa: PTH208


def test_a_picture_of_one_pixel(tmp_path):
    damaged(tmp_path)
    assert run("denoise", tmp_path / "one.png", tmp_path / "x.png") == 0
    assert read_picture(tmp_path / "x.png").pages[0].shape == (1, 1)


def test_no_permission_and_a_full_disk(noisy, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gncprior.picture_files.encode", full)
    assert run("denoise", noisy, tmp_path / "a.png", "--sigma", "0.1") == 2
    assert "No space left on device" in one_sentence(capsys.readouterr().err)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["noisy.png"]
