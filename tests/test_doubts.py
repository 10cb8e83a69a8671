"""Doubts about results: in closed form, and what comes of them."""

import math

import numpy as np
import pytest
import torch

from gncprior import denoise, inpaint, restore
from gncprior.doubts import MOST_OVERSHOOT, MOST_RESIDUAL, overshoot_doubt, residual_doubt

ROWS, COLUMNS = np.indices((64, 64))
PATTERNS = {
    "checkerboard": (ROWS + COLUMNS) % 2 * 1.0,
    "large checkerboard": (ROWS // 2 + COLUMNS // 2) % 2 * 1.0,
    "bricks": (ROWS // 8 + COLUMNS // 3) % 2 * 1.0,
    "stripes": COLUMNS // 2 % 2 * 1.0,
    "black and white noise": (np.random.default_rng(0).random((64, 64)) < 0.5) * 1.0,
}


def noisy(x, sigma):
    return x + sigma * np.random.default_rng(1).standard_normal(x.shape)


@pytest.mark.parametrize("size", [(64, 96), (70, 40), (9, 50)])
def test_the_residual_is_that_of_the_worst_block_in_units_of_sigma(size):
    z = torch.zeros(2, *size)
    x = torch.full_like(z, 0.1)
    assert residual_doubt(x, z, 0.1) == pytest.approx(1 / MOST_RESIDUAL)
    if min(size) >= 32:
        x[1, :32, :32] = 0.3
        assert residual_doubt(x, z, 0.1) == pytest.approx(3 / MOST_RESIDUAL)
    x[0, -1, -1] = math.nan
    assert residual_doubt(x, z, 0.1) == math.inf


def test_the_overshoot_is_beyond_the_range_of_what_is_known():
    z = torch.linspace(0.2, 0.7, 100).view(1, 10, 10)
    unknown = torch.zeros_like(z, dtype=torch.bool)
    unknown[0, 4, 4] = True
    for value, share in [(0.5, 0.0), (0.9, 0.4), (-0.05, 0.5)]:
        x = z.clone()
        x[0, 4, 4] = value
        assert overshoot_doubt(x, z, unknown) == pytest.approx(share / MOST_OVERSHOOT, abs=1e-6)
    x[0, 4, 4] = math.nan
    assert overshoot_doubt(x, z, unknown) == math.inf


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("sigma", [0.02, 0.06, 0.1])
def test_patterns_are_denoised_no_worse_than_by_the_shallow_prior(name, sigma):
    """`best` was learned from photographs, and some of these came back from it as not a number."""
    x = PATTERNS[name]
    z = noisy(x, sigma)

    def error(**how):
        return float(np.sqrt(np.mean((denoise(z, sigma, **how) - x) ** 2)))

    assert error() < 1.3 * error(quality="fast") + sigma


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("missing", [0.5, 0.8])
@pytest.mark.parametrize("dtype", [np.float64, np.uint8])
def test_patterns_that_are_inpainted_stay_near_the_range_of_what_is_known(name, missing, dtype):
    x = (0.25 + 0.5 * PATTERNS[name]) * (255 if dtype == np.uint8 else 1)
    x = x.astype(dtype)
    mask = np.random.default_rng(2).random(x.shape) < missing
    filled = inpaint(x, mask).astype(float) / (255 if dtype == np.uint8 else 1)
    assert np.array_equal(filled[~mask], x[~mask] / (255 if dtype == np.uint8 else 1))
    assert filled.min() >= -0.25 and filled.max() <= 1.25


def opinions(monkeypatch, first, second):
    """Two priors to choose from, whose results have these doubts."""
    monkeypatch.setattr(restore, "_best", lambda quality, *_: "r2" if quality == "best" else "r1")
    doubts = iter([first, second])
    monkeypatch.setattr(restore, "residual_doubt", lambda *_: next(doubts))


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [(1.0, 0.0, "r2"), (1.1, 0.5, "r1"), (4.0, 3.9, "r2"), (math.inf, 3.0, "r1")],
)
def test_a_second_opinion_stays_where_it_is_clearly_better(monkeypatch, first, second, name):
    z = noisy(PATTERNS["stripes"], 0.1)
    trace, expected = [], []
    want = denoise(z, 0.1, prior=name, trace=expected)
    opinions(monkeypatch, first, second)
    told = []
    x = denoise(z, 0.1, trace=trace, progress=lambda k, n: told.append((k, n)))
    assert np.array_equal(x, want)
    assert len(trace) == 1 and torch.equal(trace[0].energy, expected[0].energy)
    assert told == [(1, 1)]


def test_a_prior_that_was_named_is_taken_at_its_word(monkeypatch):
    z = noisy(PATTERNS["stripes"], 0.1)
    want = denoise(z, 0.1, prior="r2")
    monkeypatch.setattr(restore, "residual_doubt", lambda *_: math.inf)
    assert np.array_equal(denoise(z, 0.1, prior="r2"), want)
