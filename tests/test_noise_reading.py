"""The noise level read off the terms of the energy: what they are, how they are weighed, and where it fails."""

import numpy as np
import pytest
import torch
from PIL import Image

from gncprior import GncpriorError, cli, estimate_sigma, load
from gncprior import noise_reading as reading_of
from gncprior.calibration import calibrate
from gncprior.checkpoints import save_prior
from gncprior.noise_reading import Reading, learn, reading_path, tables, terms
from gncprior.prior import Architecture, Prior
from gncprior.unrolled import fingerprint

RNG = np.random.default_rng(0)


def tiny(layers: int = 1, scaled: bool = False) -> Prior:
    architecture = Architecture(layers, filters=6, first_size=3, t_knots=5, scaled=scaled)
    return Prior(architecture).start().requires_grad_(False)


def smooth(k: int, height: int = 60, width: int = 50) -> np.ndarray:
    """Waves in all directions, of bytes (1, H, W)."""
    y, x = np.mgrid[:height, :width]
    a, b = 0.05 + 0.3 * np.random.default_rng(k).random(2)
    return (127 + 60 * np.sin(a * x + k) + 50 * np.cos(b * y)).clip(0, 255).astype(np.uint8)[None]


def noisy(k: int, sigma: float) -> torch.Tensor:
    x = smooth(k) / 255.0
    return torch.from_numpy(x + sigma * np.random.default_rng(k).standard_normal(x.shape)).float()


@pytest.fixture(scope="module")
def learned() -> tuple[Prior, Reading]:
    prior = tiny()
    calibrate(prior, [torch.from_numpy(smooth(k) / 255.0).float() for k in range(8)], points=25)
    return prior, learn(prior, [smooth(k) for k in range(20)], levels=24)


def test_the_terms_are_those_of_the_slope():
    """Σ_j s_j times the pixels is ∂R/∂t̂, and a term is that of a prior with one filter."""
    prior = tiny()
    images = [noisy(0, 0.1)[None], noisy(1, 0.1)[None, :, :30]]
    t_hats = torch.tensor([-7.0, -4.5, -2.0], dtype=torch.float64)
    s = terms(prior, images, tables(prior, t_hats))
    pixels = 60 * 50 + 30 * 50
    for k, t_hat in enumerate(t_hats.tolist()):
        slope = sum(float(prior.joint_grad(y, t_hat)[2]) for y in images)
        assert float(s[k].sum()) * pixels == pytest.approx(slope, rel=1e-4)
    one = tiny()
    one.splines[0].weight[[0, 1, 2, 4, 5]] = 0
    slope = sum(float(one.joint_grad(y, -4.5)[2]) for y in images)
    assert float(s[1, 3]) * pixels == pytest.approx(slope, rel=1e-4)


def test_the_fit_is_that_of_ridge_regression():
    s, t = (
        torch.from_numpy(RNG.standard_normal((50, 3)) * [1, 10, 0.1] + 4),
        torch.arange(50.0).double(),
    )
    w, a, deviation = reading_of._fit(s, t)
    z = (s - s.mean(0)) / s.std(0)
    # the minimum of mean (t − ā − ⟨v, z⟩)² + ridge·|v|² has this gradient zero
    v, rest = w * s.std(0), t - a - s @ w
    assert float((z.T @ rest / 50 - reading_of.RIDGE * v).abs().max()) < 1e-10
    assert float(rest.mean()) == pytest.approx(0, abs=1e-10)
    assert float(deviation) == pytest.approx(float(rest.std()))


def test_noise_levels_of_other_pictures_are_read(learned):
    """Twice as close as the minimum of the energy, and within the error bars."""
    prior, reading = learned
    plain = Reading(reading.knots, 0 * reading.weights, 0 * reading.offsets, reading.spreads)
    errors, plain_errors, bars = [], [], []
    for sigma in (0.05, 0.1, 0.3):
        for k in range(100, 106):
            y = noisy(k, sigma)[None]
            (t_hat, bar), (minimum, _) = reading.read(prior, [y]), plain.read(prior, [y])
            errors.append(abs(t_hat - 2 * np.log(sigma)))
            plain_errors.append(abs(minimum - 2 * np.log(sigma)))
            bars.append(bar)
    assert np.mean(errors) < 0.5 * np.mean(plain_errors)
    assert np.mean(np.array(errors) < 2 * np.array(bars)) > 0.8


def test_parts_of_a_picture_are_read_together(learned):
    prior, reading = learned
    y = noisy(7, 0.1)[None]
    whole, bar = reading.read(prior, [y])
    assert reading.read(prior, [y, y])[0] == pytest.approx(whole, abs=1e-9)
    small = reading.read(prior, [y[..., :15, :12]])[1]
    assert small > 2 * bar  # fewer pixels, less certain


def test_beyond_the_range_the_end_is_read(learned):
    prior, reading = learned
    low, high = prior.t_hat_range
    assert reading.read(prior, [torch.zeros(1, 1, 40, 40)])[0] == pytest.approx(low, abs=0.01)
    loud = torch.randn(1, 1, 40, 40, generator=torch.Generator().manual_seed(0)) * 20
    assert reading.read(prior, [loud])[0] == pytest.approx(high, abs=0.01)


def test_crossings():
    knots = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    assert reading_of._crossings(knots, [-1, 1, -3, 1, 2]) == [2.75, 0.5]
    assert reading_of._crossing(knots, [-1, 1, -3, 1, 2]) == 2.75
    assert reading_of._crossing(knots, [1, 1, 1, 1, 1]) == 0
    assert reading_of._crossing(knots, [-1, 1, 1, 1, -1]) == 4


def test_files(learned, tmp_path):
    prior, reading = learned
    save_prior(tmp_path / "tiny.safetensors", prior)
    file = reading_path(tmp_path / "tiny.safetensors")
    assert file == tmp_path / "tiny-noise.safetensors"
    assert reading_of.load(file, prior) is None
    reading.save(file)
    again = reading_of.load(file, prior)
    y = noisy(3, 0.2)[None]
    assert again is not None and again.read(prior, [y]) == reading.read(prior, [y])
    other = tiny()
    other.splines[0].weight.mul_(2)
    assert reading_of.load(file, other) is None  # it was learned for another
    with pytest.raises(GncpriorError, match="holds 'prior' and no reading"):
        reading_of.load(tmp_path / "tiny.safetensors", prior)
    with pytest.raises(GncpriorError, match="priors of one layer"):
        learn(tiny(layers=2), [smooth(0)])
    with pytest.raises(GncpriorError, match="too few images"):
        learn(prior, [smooth(0)])


def test_the_command_writes_beside_the_prior_and_estimates_use_it(learned, tmp_path, capsys):
    prior, _ = learned
    save_prior(tmp_path / "tiny.safetensors", prior)
    (tmp_path / "pictures").mkdir()
    for k in range(22):
        Image.fromarray(smooth(k)[0]).save(tmp_path / "pictures" / f"{k:02}.png")
    words = ["--prior", str(tmp_path / "tiny.safetensors"), "--data", str(tmp_path / "pictures")]
    y = noisy(50, 0.1)[0].numpy()
    before = estimate_sigma(y, prior=tmp_path / "tiny.safetensors")
    assert cli.main(["learn-noise-level", *words, "--levels", "24"]) == 0
    assert "tiny-noise.safetensors" in capsys.readouterr().out
    after = estimate_sigma(y, prior=tmp_path / "tiny.safetensors")
    assert abs(after - 0.1) < abs(before - 0.1)


def test_the_shipped_reading_is_of_the_shipped_prior():
    """Where this fails, r1 has been replaced: run `gncprior learn-noise-level` again."""
    prior = load("r1")
    reading = reading_of.load(reading_path("r1"), prior)
    assert reading is not None and reading.info["prior_sha256"] == fingerprint(prior)
