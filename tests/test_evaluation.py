"""The protocol of measurement, reproduced without the code that it tests."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from gncprior import GncpriorError, cli, estimate_sigma, load
from gncprior.checkpoints import save_prior
from gncprior.cli.levels import parse_level, parse_levels, parse_shares
from gncprior.evaluation import evaluate, observe, open_images, report, restoration
from gncprior.prior import Architecture, Prior
from gncprior.unrolled import Schedules, fingerprint, schedules_path

pytestmark = pytest.mark.usefixtures("one_thread")


SHAPES = [(20, 16), (13, 24), (16, 16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three pictures whose names are not in the order of their making, and a file of another kind."""
    folder = tmp_path_factory.mktemp("pictures")
    for k, (name, shape) in enumerate(zip(("c.png", "a.png", "b.png"), SHAPES, strict=True)):
        rows, columns = np.mgrid[: shape[0], : shape[1]]
        pixels = (7 * rows + (3 + k) * columns + 40 * (rows > columns)) % 256
        Image.fromarray(pixels.astype(np.uint8)).save(folder / name)
    (folder / "notes.txt").write_text("not a picture")
    return folder


@pytest.fixture(scope="module")
def prior(folder):
    prior = Prior(Architecture(filters=6, first_size=3, t_knots=5)).start().requires_grad_(False)
    prior.splines[0].weight.mul_(0.3)  # so weak that steps with η = 1 are stable
    save_prior(folder / "tiny.safetensors", prior)
    t_hats = torch.tensor([[-4.0, -5.0], [-3.0, -4.0]], dtype=torch.float64)
    info = {"prior_sha256": fingerprint(prior)}
    levels = torch.tensor([0.05, 0.2], dtype=torch.float64)
    schedules = Schedules("denoise", levels, t_hats, 0.5 * t_hats.exp(), info)
    schedules.save(schedules_path(folder / "tiny.safetensors", "denoise", 2))
    return prior


def clean(folder):
    return {
        name: np.asarray(Image.open(folder / name)) / 255.0 for name in ("a.png", "b.png", "c.png")
    }


def psnr(x, y):
    return -10 * math.log10(np.mean((x - y) ** 2))


def test_images_come_in_the_order_of_their_names(folder):
    images = open_images(folder)
    assert images.names == ("a.png", "b.png", "c.png")
    for found, expected in zip(images.images, clean(folder).values(), strict=True):
        assert np.array_equal(found[0] / 255.0, expected)


def test_the_noise_of_the_protocol(folder):
    """The input itself scores what noise of its seed scores, in float64."""
    scores = evaluate(open_images(folder), "denoise", 0.1, lambda z, mask: z)
    for k, (score, x) in enumerate(zip(scores, clean(folder).values(), strict=True)):
        z = x + 0.1 * np.random.default_rng(k).standard_normal(x.shape)
        assert score.psnr == pytest.approx(psnr(z, x), abs=1e-5)
        assert score.psnr_clipped == pytest.approx(psnr(z.clip(0, 1), x), abs=1e-5)
        assert score.psnr_clipped > score.psnr
        assert score.seconds >= 0
    assert math.isfinite(scores[0].ssim)


def test_the_masks_of_the_protocol(folder):
    seen = []

    def half(z, mask):
        seen.append((z, mask))
        return torch.where(mask, 0.5, z)

    scores = evaluate(open_images(folder), "inpaint", 0.8, half)
    for k, (score, x) in enumerate(zip(scores, clean(folder).values(), strict=True)):
        unknown = np.random.default_rng(1000 + k).random(x.shape) < 0.8
        assert score.psnr == pytest.approx(psnr(np.where(unknown, 0.5, x), x), abs=1e-5)
        z, mask = seen[k]
        assert np.array_equal(mask[0, 0].numpy(), unknown)
        assert (z[mask] == 0).all()
        assert torch.equal(z[~mask], torch.from_numpy(x).float()[None, None][~mask])


def test_colours_have_noise_of_their_own_and_lose_pixels_together():
    x = np.zeros((3, 8, 9))
    noisy, _ = observe(x, 4, "denoise", 0.5)
    expected = 0.5 * np.random.default_rng(4).standard_normal((8, 9, 3))
    assert np.array_equal(noisy, expected.transpose(2, 0, 1))
    _, mask = observe(x, 4, "inpaint", 0.5)
    assert np.array_equal(mask[0], mask[2])


def test_means_are_over_images(folder):
    scores = evaluate(open_images(folder), "denoise", 0.1, lambda z, mask: 0.9 * z, limit=2)
    result = report(scores, {"level": 0.1})
    assert result["settings"] == {"level": 0.1}
    assert [image["name"] for image in result["images"]] == ["a.png", "b.png"]
    for key in ("psnr", "psnr_clipped", "ssim", "seconds"):
        values = [image[key] for image in result["images"]]
        assert result["mean"][key] == pytest.approx(np.mean(values))


@pytest.mark.parametrize("method", ["tweedie", "scheduled", "joint"])
def test_methods_are_those_of_the_paper(prior, method):
    """Written out with gradients of the prior alone."""
    sigma, steps = 0.2, 3
    x = torch.rand(1, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    z, t_hat = x, 2 * math.log(sigma)
    if method == "tweedie":
        x = z - sigma**2 * prior.grad(z, t_hat)
    else:
        times = np.linspace(t_hat, math.log(1e-4), steps)
        for i in range(steps):
            t_hat = float(times[i]) if method == "scheduled" else t_hat
            t = math.exp(t_hat)
            _, grad, dt = prior.joint_grad(x, t_hat)
            x = (x - t * grad + t * z / sigma**2) / (1 + t / sigma**2)
            t_hat = min(max(t_hat - float(dt) / 144, math.log(1e-4)), 0.0)
    restored = restoration(prior, "denoise", sigma, method, steps=steps)(z, None)
    torch.testing.assert_close(restored, x, rtol=1e-4, atol=1e-5)
    other = restoration(prior, "denoise", sigma, method, steps=steps, t0=0.5)(z, None)
    assert torch.equal(other, restored) == (method == "tweedie")


def test_inpainting_methods_keep_what_is_known(prior):
    x = torch.linspace(0, 1, 144).view(1, 1, 12, 12)
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    z = x.masked_fill(mask, 0)
    for method in ("scheduled", "joint"):
        result = restoration(prior, "inpaint", 0.7, method, steps=5)(z, mask)
        assert torch.equal(result[~mask], x[~mask])
        assert (result - x).square().mean() < (z - x).square().mean()
    with pytest.raises(GncpriorError, match="it cannot inpaint"):
        restoration(prior, "inpaint", 0.7, "tweedie")(z, mask)


# ---------------------------------------------------------------- the noise level, and colour


@pytest.fixture(scope="module")
def colourful(tmp_path_factory):
    """Two pictures in colour, smooth enough that their noise can be told from them."""
    folder = tmp_path_factory.mktemp("colourful")
    rows, columns = np.mgrid[:48, :40]
    for k, name in enumerate(("a.png", "b.png")):
        waves = [np.sin(rows / (9 + c) + k) + np.cos(columns / (11 - c)) for c in range(3)]
        Image.fromarray((127 + 50 * np.dstack(waves)).astype(np.uint8)).save(folder / name)
    return folder


def in_colour(folder) -> list[np.ndarray]:
    return [np.asarray(Image.open(folder / name)) / 255.0 for name in ("a.png", "b.png")]


def with_noise(x: np.ndarray, k: int, sigma: float) -> np.ndarray:
    """Of the protocol, as float32."""
    return (x + sigma * np.random.default_rng(k).standard_normal(x.shape)).astype(np.float32)


def run(folder, prior, tmp_path, *words):
    """What the command writes for one level."""
    file = tmp_path / "scores.json"
    named = ["--prior", str(prior), "--data", str(folder), "--json", str(file)]
    assert cli.main(["evaluate", *named, *words]) == 0
    (found,) = json.loads(file.read_text("utf-8"))
    return found


def test_the_error_of_the_noise_level(colourful, tmp_path, capsys):
    grey = [np.asarray(Image.open(colourful / n).convert("L")) / 255.0 for n in ("a.png", "b.png")]
    for images, words in [(grey, []), (in_colour(colourful), ["--colour"])]:
        found = run(colourful, "r1", tmp_path, "--task", "noise", "--sigma", "0.1", *words)
        errors = []
        for k, (x, row) in enumerate(zip(images, found["images"], strict=True)):
            axis = -1 if x.ndim == 3 else None
            sigma = estimate_sigma(with_noise(x, k, 0.1), channel_axis=axis)
            errors.append(abs(sigma - 0.1) / 0.1)
            assert row["sigma"] == pytest.approx(sigma, rel=1e-3)
            assert row["error"] == pytest.approx(errors[-1], abs=1e-3) and row["error"] < 0.2
        assert found["mean"]["error"] == pytest.approx(np.mean(errors), abs=1e-3)
        assert found["settings"]["task"] == "noise" and found["settings"]["level"] == 0.1
        assert f"{found['mean']['error']:8.4f}" in capsys.readouterr().out


def test_blind_is_told_what_was_estimated(colourful, tmp_path):
    words = ["--sigma", "0.1", "--method", "tweedie"]
    found = run(colourful, "r1", tmp_path, *words, "--blind")
    told = run(colourful, "r1", tmp_path, *words)
    assert found["settings"]["blind"] and not told["settings"]["blind"]
    prior = load("r1")
    for k, row in enumerate(found["images"]):
        x = np.asarray(Image.open(colourful / row["name"]).convert("L")) / 255.0
        z = with_noise(x, k, 0.1)
        sigma = estimate_sigma(z)
        y = torch.from_numpy(z)[None, None]
        restored = (y - sigma**2 * prior.grad(y, 2 * math.log(sigma)))[0, 0].numpy()
        assert row["psnr"] == pytest.approx(psnr(restored, x), abs=1e-3)
        assert row["psnr"] != told["images"][k]["psnr"]


def test_colour_channel_by_channel_with_a_prior_for_grey(folder, prior, colourful, tmp_path):
    words = ["--sigma", "0.1", "--method", "tweedie", "--colour"]
    found = run(colourful, folder / "tiny.safetensors", tmp_path, *words)
    assert found["settings"]["colour"] is True
    for k, (x, row) in enumerate(zip(in_colour(colourful), found["images"], strict=True)):
        z = with_noise(x, k, 0.1)
        one_by_one = []
        for c in range(3):
            y = torch.from_numpy(z[..., c].copy())[None, None]
            one_by_one.append((y - 0.01 * prior.grad(y, math.log(0.01)))[0, 0].numpy())
        assert row["psnr"] == pytest.approx(psnr(np.dstack(one_by_one), x), abs=1e-4)
    inpainted = run(colourful, folder / "tiny.safetensors", tmp_path, "--task", "inpaint",
                    "--method", "scheduled", "--colour", "--missing", "0.5")  # fmt: skip
    assert len(inpainted["images"]) == 2


def test_colour_with_a_prior_for_colour(colourful, tmp_path):
    prior = Prior(Architecture(channels=3, filters=6, first_size=3, t_knots=5)).start()
    prior = prior.requires_grad_(False)
    save_prior(tmp_path / "rgb.safetensors", prior)
    words = ["--sigma", "0.1", "--method", "tweedie"]
    found = run(colourful, tmp_path / "rgb.safetensors", tmp_path, *words)
    assert found["settings"]["colour"] is True
    for k, (x, row) in enumerate(zip(in_colour(colourful), found["images"], strict=True)):
        y = torch.from_numpy(with_noise(x, k, 0.1).transpose(2, 0, 1).copy())[None]
        restored = (y - 0.01 * prior.grad(y, math.log(0.01)))[0].numpy().transpose(1, 2, 0)
        assert row["psnr"] == pytest.approx(psnr(restored, x), abs=1e-4)


# ---------------------------------------------------------------- the command


def command(folder, *words):
    return ["evaluate", "--prior", str(folder / "tiny.safetensors"), "--data", str(folder), *words]


def test_the_command_writes_what_it_shows(folder, prior, tmp_path, capsys):
    file = tmp_path / "scores.json"
    words = ["--sigma", "0.1,25/255", "--steps", "2", "--limit", "2", "--json", str(file)]
    assert cli.main(command(folder, *words)) == 0
    out = capsys.readouterr().out
    reports = json.loads(file.read_text("utf-8"))
    assert [r["settings"]["level"] for r in reports] == [0.1, 25 / 255]
    assert {r["settings"]["method"] for r in reports} == {"learned"}
    for r in reports:
        mean = r["mean"]
        assert f"{mean['psnr']:8.3f} {mean['psnr_clipped']:8.3f} {mean['ssim']:8.4f}" in out
        assert len(r["images"]) == 2
    images = open_images(folder)
    learned = restoration(
        prior, "denoise", 0.1, "learned",
        learned=Schedules(
            "denoise", torch.tensor([0.1]), torch.tensor([[-3.5, -4.5]]),
            0.5 * torch.tensor([[-3.5, -4.5]]).exp(),
        ),
    )  # fmt: skip
    # 0.1 is half-way between the two levels of the file in log σ
    again = evaluate(images, "denoise", 0.1, learned, limit=2)
    assert again[1].psnr == pytest.approx(reports[0]["images"][1]["psnr"], abs=1e-4)


@pytest.mark.parametrize("method", ["scheduled", "joint"])
def test_a_first_smoothing_that_follows_the_noise(folder, tmp_path, method):
    def scores(levels, t0):
        words = ["--sigma", levels, "--method", method, "--steps", "3", "--t0", t0]
        assert cli.main(command(folder, *words, "--json", str(tmp_path / "s.json"))) == 0
        return json.loads((tmp_path / "s.json").read_text("utf-8"))

    both = scores("0.1,0.2", "0.3v")
    assert [r["settings"]["t0"] for r in both] == ["0.3 σ²", "0.3 σ²"]
    for r, level, t0 in zip(both, ("0.1", "0.2"), ("0.003", "0.012"), strict=True):
        (told,) = scores(level, t0)
        assert r["mean"]["psnr"] == pytest.approx(told["mean"]["psnr"], abs=1e-5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--sigma", "0"], "must be a positive number such as 0.1 or 25/255, not '0'"),
        (["--sigma", "nan"], "must be a positive number"),
        (["--sigma", "1/0"], "must be a positive number"),
        (["--task", "inpaint", "--missing", "1.0"], "give a share below 1"),
        (["--limit", "0"], "At least one image"),
        (["--steps", "7"], "There are no learned schedules in"),
        (["--threads", "0"], "At least one thread"),
        (["--task", "noise", "--half"], "read in full precision"),
        (["--task", "inpaint", "--blind"], "Only denoising can be blind"),
        (["--task", "inpaint", "--t0", "0.3v"], "give --t0 without v"),
        (["--method", "joint", "--t0", "v"], "A smoothing variance must be a positive number"),
        (["--method", "tweedie", "--set", "val"], "does not hold BSDS500"),
    ],
)
def test_what_can_go_wrong(folder, prior, capsys, words, sentence):
    assert cli.main(command(folder, *words)) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1


def test_an_empty_folder(prior, tmp_path):
    with pytest.raises(GncpriorError, match="no images in"):
        open_images(tmp_path)
    with pytest.raises(GncpriorError, match="does not exist"):
        open_images(tmp_path / "nowhere")
    with pytest.raises(GncpriorError, match="Nothing was evaluated"):
        report([], {})


def test_levels_as_people_write_them():
    assert parse_level("25/255") == 25 / 255
    assert parse_levels("0.1,25/255, 1e-2") == [0.1, 25 / 255, 0.01]
    assert parse_shares("0.8") == [0.8]
