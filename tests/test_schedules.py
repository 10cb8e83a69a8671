import math

import pytest
import torch

from gncprior import schedules
from gncprior.errors import GncpriorError


def test_range_is_that_of_the_paper():
    assert (schedules.T_MIN, schedules.T_MAX) == (1e-4, 1)


@pytest.mark.parametrize("sigma", [0.01, 25 / 255, 1])
def test_t_is_the_variance_and_t_hat_its_logarithm(sigma):
    t_hat = schedules.t_hat_from_sigma(sigma)
    assert t_hat == pytest.approx(math.log(sigma**2), abs=1e-14)
    assert schedules.t_from_t_hat(t_hat) == pytest.approx(sigma**2, rel=1e-14)
    assert schedules.sigma_from_t_hat(t_hat) == pytest.approx(sigma, rel=1e-14)
    assert schedules.t_hat_from_t(sigma**2) == pytest.approx(t_hat, abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_stay_tensors_of_their_dtype(dtype):
    sigma = torch.tensor([0.01, 0.1, 1], dtype=dtype)
    t_hat = schedules.t_hat_from_sigma(sigma)
    torch.testing.assert_close(t_hat, sigma.square().log())
    torch.testing.assert_close(schedules.t_hat_from_t(sigma.square()), t_hat)
    torch.testing.assert_close(schedules.t_from_t_hat(t_hat), sigma.square())
    torch.testing.assert_close(schedules.sigma_from_t_hat(t_hat), sigma)


@pytest.mark.parametrize("convert", [schedules.t_hat_from_sigma, schedules.t_hat_from_t])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_what_has_no_logarithm_is_refused(convert, value):
    with pytest.raises(GncpriorError, match="must be positive"):
        convert(value)
    with pytest.raises(GncpriorError, match="must be positive"):
        convert(torch.tensor([1.0, value]))


def test_linear_is_log_spaced_in_t_and_holds_both_ends():
    t_hat = schedules.linear(0, math.log(1e-4), 5)
    expected = torch.tensor([1, 1e-1, 1e-2, 1e-3, 1e-4], dtype=torch.float64)
    torch.testing.assert_close(t_hat.exp(), expected)
    assert t_hat[-1] == math.log(1e-4)
    assert schedules.linear(-1, -2, 1).tolist() == [-1]
    assert schedules.linear(-1, -2, 3, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    ("start", "end", "steps"), [(0, -1, 0), (math.nan, 0, 2), (0, -math.inf, 2)]
)
def test_linear_refuses_what_is_no_schedule(start, end, steps):
    with pytest.raises(GncpriorError, match="schedule"):
        schedules.linear(start, end, steps)
