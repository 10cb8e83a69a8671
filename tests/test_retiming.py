"""Another clock for the family: the same steps, at t̂ of their own."""

import pytest
import torch
from small import smooth_images, tiny

from gncprior import GncpriorError
from gncprior.fidelity import Denoising
from gncprior.retiming import spread_times
from gncprior.unrolled import Schedules, unroll

SHARES = [0.78, 0.16, 0.17, 0.15, 0.33]  # of the range of t̂; three of them crowd


def crowded(repeat=1):
    prior = tiny(2, torch.float64)
    low, high = prior.t_hat_range
    first = torch.tensor(SHARES * repeat, dtype=torch.float64)
    t_hats = low + (high - low) * torch.stack([first, first - 0.02])
    levels = torch.tensor([0.1, 0.2], dtype=torch.float64)
    return prior, Schedules("denoise", levels, t_hats, 0.3 * t_hats.exp())


def test_steps_do_what_they_did_with_potentials_of_their_own():
    prior, schedules = crowded()
    retimed, learned = spread_times(prior, schedules, 0.1)
    x = smooth_images().tensor(0).double()
    z = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).double()
    before = unroll(prior, Denoising(z, 0.1), z, schedules.at(0.1))
    after = unroll(retimed, Denoising(z, 0.1), z, learned.at(0.1))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    assert (before - z).abs().max() > 0.01
    # in the same order, at equal distances
    order = schedules.t_hats[0].argsort()
    gaps = learned.t_hats[0][order].diff()
    torch.testing.assert_close(gaps, gaps.mean().expand(4), rtol=1e-6, atol=0)
    assert gaps.min() > 3 * schedules.t_hats[0][order].diff().min()


def test_the_ends_of_the_range_stay_and_other_levels_move_along():
    prior, schedules = crowded()
    retimed, learned = spread_times(prior, schedules, 0.1)
    x = smooth_images().tensor(1).double()
    for t_hat in prior.t_hat_range:
        want = prior.grad(x, t_hat)
        torch.testing.assert_close(
            retimed.grad(x, t_hat), want, rtol=0, atol=1e-5 * float(want.abs().max())
        )
    assert torch.equal(learned.t_hats[1].argsort(), schedules.t_hats[1].argsort())
    assert (learned.t_hats[1] < learned.t_hats[0]).all()
    assert torch.equal(learned.etas, schedules.etas)


def test_more_steps_than_knots_are_refused():
    prior, schedules = crowded(repeat=2)
    with pytest.raises(GncpriorError, match="no potentials of their own for 10 steps"):
        spread_times(prior, schedules, 0.1)
