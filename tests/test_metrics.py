"""PSNR and SSIM against closed forms and an independent computation."""

import math

import numpy as np
import pytest
import torch

from gncprior import GncpriorError
from gncprior.metrics import psnr, ssim


def test_psnr_of_a_constant_error():
    x = np.linspace(0, 1, 60).reshape(6, 10)
    assert float(psnr(x + 0.1, x, data_range=1.0)) == pytest.approx(20.0)
    assert float(psnr(255 * (x + 0.1), 255 * x, data_range=255.0)) == pytest.approx(20.0)
    assert float(psnr(x, x, data_range=1.0)) == math.inf


def test_psnr_is_per_image_over_all_channels():
    x = torch.zeros(2, 3, 4, 5)
    y = x.clone()
    y[0, 0] = 0.3  # mean square 0.03
    y[1] = 0.01
    expected = torch.tensor([-10 * math.log10(0.03), 40.0], dtype=torch.float64)
    torch.testing.assert_close(psnr(x, y, data_range=1.0), expected, rtol=1e-6, atol=0)


def test_ssim_of_constant_images():
    """Without variance only the luminance factor is left."""
    a, b, c1 = 0.3, 0.7, 1e-4
    expected = (2 * a * b + c1) / (a * a + b * b + c1)
    x = torch.full((1, 1, 16, 20), a, dtype=torch.float64)
    torch.testing.assert_close(float(ssim(x, x * b / a, data_range=1.0)), expected)


def test_ssim_against_scipy():
    from scipy.ndimage import gaussian_filter

    rng = np.random.default_rng(0)
    x = gaussian_filter(rng.random((40, 52)), 1.0)
    y = x + 0.05 * rng.standard_normal(x.shape)

    def mean(u):  # radius 5
        return gaussian_filter(u, 1.5, truncate=3.4)[5:-5, 5:-5]

    for r in (1.0, 2.0):
        c1, c2 = (0.01 * r) ** 2, (0.03 * r) ** 2
        mx, my = mean(x), mean(y)
        sx, sy, sxy = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
        map_ = (2 * mx * my + c1) * (2 * sxy + c2) / ((mx**2 + my**2 + c1) * (sx + sy + c2))
        assert float(ssim(x, y, data_range=r)) == pytest.approx(map_.mean(), rel=1e-10)


def test_ssim_is_one_only_for_equal_images_and_averages_channels():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(2, 3, 24, 24, generator=generator)
    y = x + 0.1 * torch.randn(x.shape, generator=generator)
    torch.testing.assert_close(ssim(x, x, data_range=1.0), torch.ones(2, dtype=torch.float64))
    both = ssim(x, y, data_range=1.0)
    assert (both < 0.95).all()
    each = torch.stack([ssim(x[:, [c]], y[:, [c]], data_range=1.0) for c in range(3)]).mean(0)
    torch.testing.assert_close(both, each)


@pytest.mark.parametrize(
    ("x", "y", "data_range", "sentence"),
    [
        (torch.zeros(4, 4), torch.zeros(4, 5), 1.0, "must have one shape"),
        (torch.zeros(0, 4), torch.zeros(0, 4), 1.0, "must have one shape"),
        (torch.zeros(12, 12), torch.zeros(12, 12), 0.0, "range of the data must be a positive"),
        (torch.zeros(10, 12), torch.zeros(10, 12), 1.0, "SSIM needs images of 11×11 pixels"),
    ],
)
def test_bad_input(x, y, data_range, sentence):
    with pytest.raises(GncpriorError, match=sentence):
        ssim(x, y, data_range=data_range)
