"""Calibration in t̂, and the noise level read off the energy."""

import math

import pytest
import torch

from gncprior.calibration import (
    calibrate,
    centre,
    first_minimum,
    noise_level,
    set_pace,
    time_slopes,
)
from gncprior.fidelity import Inpainting
from gncprior.prior import Architecture, Prior
from gncprior.solvers import solve_joint


def quadratic_prior(layers: int = 1, scaled: bool = False) -> Prior:
    """½‖x‖²/(t + 0.01) and no idea of its own normalisation."""
    prior = Prior(Architecture(layers=layers, scaled=scaled)).start(gain=1.0, spread=0.05)
    return prior.requires_grad_(False)


def flat_images(count: int = 3) -> list[torch.Tensor]:
    return [torch.full((1, 64, 56), 0.2 + 0.15 * k) for k in range(count)]


@pytest.mark.parametrize("layers", [1, 2])
def test_calibration_makes_the_mean_time_slope_vanish_and_keeps_the_gradient(layers):
    prior = quadratic_prior(layers)
    y = torch.randn(2, 1, 20, 24, generator=torch.Generator().manual_seed(0))
    before = prior.grad(y, -3.0)
    found = calibrate(prior, flat_images(), points=25)
    assert found["mean_time_slope_before"] > 0.1
    assert found["mean_time_slope_after"] < 0.02
    t_hats = torch.linspace(-9.0, -0.1, 7, dtype=torch.float64)
    # images of another size and fresh noise
    fresh = time_slopes(prior, [torch.full((1, 48, 40), 0.5)] * 6, t_hats, seed=7).mean(0)
    assert fresh.abs().max() < 0.03
    after = prior.grad(y, -3.0)
    assert (after - before).abs().max() < 1e-4 * before.abs().max()


@pytest.mark.parametrize("layers", [1, 2])
def test_at_a_pace_the_joint_scheme_takes_the_steps_of_the_predefined_one(layers):
    prior = quadratic_prior(layers)
    low, high = prior.t_hat_range
    generator = torch.Generator().manual_seed(0)
    waves = torch.linspace(0, 12, 40).sin()[:, None] * torch.linspace(0, 9, 36).cos()
    problems = []
    for contrast in (0.2, 0.3, 0.4):
        x = 0.5 + contrast * waves[None, None]
        fidelity = Inpainting(x, torch.rand(x.shape, generator=generator) < 0.5)
        problems.append((fidelity, fidelity.start()))
    y = torch.randn(2, 1, 20, 24, generator=generator)
    before = prior.grad(y, -3.0)
    found = set_pace(prior, problems, 40)
    assert found["pace"] == pytest.approx((high - low) / 39)
    assert found["largest_deviation_before"] > 0.1
    assert found["largest_deviation_after"] < 0.02
    assert (prior.grad(y, -3.0) - before).abs().max() < 1e-4 * before.abs().max()
    _, middle = problems[1]
    ends = {}
    solve_joint(
        prior, problems[1][0], middle, high, max_iter=60,
        callback=lambda s: ends.update({s.iteration: float(s.t_hat)}),
    )  # fmt: skip
    for iteration in (10, 20, 30):
        assert ends[iteration] == pytest.approx(high - iteration * found["pace"], abs=0.7)
    assert ends[60] == pytest.approx(low)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("channels", "x_knots"), [(1, 21), (3, 22)])
def test_centred_potentials_leave_flat_pictures_alone_and_change_the_border_only(
    scaled, channels, x_knots
):
    generator = torch.Generator().manual_seed(0)
    architecture = Architecture(channels=channels, filters=5, x_knots=x_knots, scaled=scaled)
    prior = Prior(architecture).double().start().requires_grad_(False)
    prior.splines[0].weight.copy_(
        torch.randn(prior.splines[0].weight.shape, generator=generator, dtype=torch.float64)
    )
    colour = torch.rand(1, channels, 1, 1, generator=generator, dtype=torch.float64)
    flat = colour.expand(1, channels, 20, 24).contiguous()
    x = flat + 0.1 * torch.randn(flat.shape, generator=generator, dtype=torch.float64)
    t_hats = (-8.0, -3.0, -0.5)
    pulls = [prior.grad(flat, t_hat).abs().max() for t_hat in t_hats]
    before = prior.grad(x, -3.0)
    centre(prior)
    for t_hat, pull in zip(t_hats, pulls, strict=True):
        assert prior.grad(flat, t_hat).abs().max() < 1e-9 * pull
    inside = (..., slice(6, -6), slice(6, -6))
    torch.testing.assert_close(prior.grad(x, -3.0)[inside], before[inside], rtol=0, atol=1e-10)


def test_deeper_priors_are_not_centred():
    prior = quadratic_prior(2)
    before = prior.splines[1].weight.clone()
    centre(prior)
    assert torch.equal(prior.splines[1].weight, before)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("sigma", [0.05, 0.1, 0.3])
def test_noise_on_a_flat_image_is_measured(scaled, sigma):
    prior = quadratic_prior(scaled=scaled)
    calibrate(prior, flat_images(), points=25)
    noise = torch.randn(2, 1, 64, 64, generator=torch.Generator().manual_seed(3))
    t_hat, curvature = noise_level(prior, 0.4 + sigma * noise)
    assert (t_hat / 2).exp() == pytest.approx([sigma, sigma], rel=0.05)
    # for pure noise R = ½‖y‖²/t + ½d t̂ has the curvature d/2 in t̂ at its minimum, where 0.01 ≪ t
    if sigma == 0.3:
        assert curvature == pytest.approx([64 * 64 / 2] * 2, rel=0.25)


def test_the_minimum_is_looked_for_from_above_and_may_be_an_end():
    prior = quadratic_prior()
    calibrate(prior, flat_images(), points=25)
    low, high = prior.t_hat_range
    noise = torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(3))
    assert float(noise_level(prior, 10 * noise)[0]) == pytest.approx(high)
    assert float(noise_level(prior, torch.zeros(1, 1, 32, 32))[0]) < low + math.log(2)


@pytest.mark.parametrize(
    ("bump", "noise", "expected"),
    [(0.0, -2.0, -2.0), (0.2, -2.0, -2.0), (0.2, 3.0, 0.0), (0.0, -12.0, -9.0)],
)
def test_a_small_rise_at_the_end_of_the_range_hides_no_minimum(bump, noise, expected):
    """R = ½(1 − e^{noise − t̂}) in slope, less a bump in the last tenth before t̂_max = 0."""

    def slope(t_hat: float) -> float:
        edge = bump * max(0.0, 1 + 10 * t_hat) * 5
        return 0.5 * (1 - math.exp(noise - t_hat)) - edge

    found, curvature = first_minimum(slope, -9.0, 0.0, 32)
    assert found == pytest.approx(expected, abs=1e-3)
    inside = -9 < expected < 0
    # d/dt̂ of the slope at t̂ = noise is ½, taken as a difference over a 32nd of the range
    assert curvature == pytest.approx(0.5 if inside else 0.0, rel=0.2)


@pytest.mark.parametrize(
    "inside", [0.002, 0.1, 0.4]
)  # noise in the middle, where elsewhere it is 0.1
def test_the_way_down_through_deep_priors_is_found_in_the_middle_and_ends_on_the_whole(inside):
    prior = quadratic_prior(2)
    calibrate(prior, flat_images(), points=25)
    sigma = torch.full((1, 1, 160, 200), 0.1)
    sigma[:, :, 30:130, 50:150] = inside
    noise = torch.randn(sigma.shape, generator=torch.Generator().manual_seed(3))
    y = 0.4 + sigma * noise
    expected = first_minimum(
        lambda t_hat: float(prior.joint_grad(y, t_hat)[2]), *prior.t_hat_range, 32
    )
    looked_at = []
    joint_grad = prior.joint_grad
    prior.joint_grad = lambda y, *rest, **more: (
        looked_at.append(y.numel()) or joint_grad(y, *rest, **more)
    )
    t_hat, curvature = noise_level(prior, y)
    assert (float(t_hat), float(curvature)) == pytest.approx(expected, rel=1e-6)
    if inside == 0.1:  # most of the way was found in the middle
        assert looked_at.count(y.numel()) < 12
