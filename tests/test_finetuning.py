"""Fine-tuning: a model for all levels, learned through the unrolled steps."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small import smooth_images, tiny

from gncprior import GncpriorError, finetuning
from gncprior.calibration import time_slopes
from gncprior.convexity import flat_curvature, smallest_curvature
from gncprior.datasets import Dataset
from gncprior.fidelity import Denoising
from gncprior.finetuning import FineTuning, Settings, _problem, fine_tune, on_one_scale
from gncprior.prior import Architecture, Prior
from gncprior.solvers import solve_joint
from gncprior.unrolled import Schedules, unroll
from gncprior.unrolled_adjoint import make_problem
from gncprior.unrolled_learning import scores_of, start_schedule
from gncprior.workers import Workers

pytestmark = pytest.mark.usefixtures("one_thread")

LEVELS = {"denoise": [0.05, 0.1, 0.2], "inpaint": [0.3, 0.5, 0.8]}


def fine_tuning(steps, task="denoise", **choices):
    prior = tiny(2, torch.float32)
    levels = torch.tensor(LEVELS[task], dtype=torch.float64)
    pairs = [start_schedule(task, level, 2, prior.t_hat_range) for level in levels.tolist()]
    t_hats, etas = (torch.stack(s) for s in zip(*pairs, strict=True))
    schedules = Schedules(task, levels, t_hats, etas / 4)
    settings = Settings(**{"steps": steps, "looks": 4, "batch": 6, "size": 16} | choices)
    return prior, schedules, FineTuning(prior, schedules, smooth_images(), settings)


@pytest.mark.parametrize("task", LEVELS)
def test_fine_tuning_improves_every_level(task):
    prior, schedules, run = fine_tuning(20, task, average=0.5, lr=2e-3, lr_schedules=1e-2)
    losses = [run.step().loss for _ in range(24)]
    tuned, learned = run.result()
    assert sum(losses[-5:]) < sum(losses[:5])
    images = smooth_images()
    start = on_one_scale(schedules) if task == "denoise" else schedules
    before = scores_of(prior, images, start, size=16)
    after = scores_of(tuned, images, learned, size=16)
    assert set(before) == set(map(str, LEVELS[task]))
    for level, score in after.items():
        assert score > before[level] + 0.1
    assert torch.equal(learned.levels, schedules.levels)
    assert learned.task == task
    assert not any(p.requires_grad for p in tuned.parameters())


def test_fine_tuning_leaves_the_prior_alone_and_moves_everything():
    prior, schedules, run = fine_tuning(1)
    before = [p.clone() for p in prior.parameters()]
    for _ in range(run.settings.looks):  # nothing moves yet
        run.step()
    assert all(map(torch.equal, before, run.prior.parameters()))
    run.step()
    tuned, learned = run.result()
    for old, kept, new in zip(before, prior.parameters(), tuned.parameters(), strict=True):
        assert torch.equal(old, kept)
        assert not torch.equal(old, new)
    assert (learned.t_hats != schedules.t_hats).all()
    assert (learned.etas != schedules.etas).all()


def test_fine_tuning_is_repeatable_and_saves_on_its_way():
    saved = []
    prior, schedules, _ = fine_tuning(3)
    settings = Settings(steps=2, looks=1, batch=6, size=16)

    def once():
        seen = []
        model, _ = fine_tune(
            prior, schedules, smooth_images(), settings,
            save=lambda *s: saved.append(s), save_every=2, callback=seen.append,
        )  # fmt: skip
        return seen, model

    (first, one), (second, other) = once(), once()
    assert first == second
    assert [p.number for p in first] == [1, 2, 3]
    assert len(saved) == 4  # after batch 2 and at the end, twice
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_fine_tuned_model_is_convex_at_t_max_and_calibrated():
    prior, schedules, run = fine_tuning(6, looks=2, lr=0.01)
    tuned, _ = fine_tune(prior, schedules, smooth_images(), run.settings)
    x = smooth_images().tensor(0)[0, :, :12, :12]
    assert smallest_curvature(tuned, x, tuned.t_hat_range[1])[0] > -1e-5
    images = [smooth_images().tensor(k)[0] for k in range(len(smooth_images()))]
    t_hats = torch.linspace(*tuned.t_hat_range, 9)[1:-1]
    slopes = time_slopes(tuned, images, t_hats, seed=5).mean(0)
    while run.number < run.settings.batches:
        run.step()
    raw = time_slopes(run.result()[0], images, t_hats, seed=5).mean(0)
    assert slopes.abs().max() < 0.3 * raw.abs().max()


def test_a_model_fine_tuned_to_inpaint_has_a_pace():
    """The joint scheme goes down with it, from t_max to t_min in about 25 steps, for one layer."""
    wild, schedules, run = fine_tuning(2, "inpaint", looks=2)
    fine_tune(wild, schedules, smooth_images(), run.settings)  # images blow up, nothing else
    prior = Prior(Architecture(filters=8, first_size=3)).start(gain=1.0, spread=0.05)
    tuned, _ = fine_tune(prior, schedules, smooth_images(), run.settings)
    low, high = tuned.t_hat_range
    problem = make_problem(
        "inpaint", 0.8, smooth_images().tensor(2), torch.Generator().manual_seed(3)
    )
    halfway = solve_joint(tuned, problem.fidelity, problem.x0, high, max_iter=12).t_hat
    assert float(halfway) == pytest.approx((low + high) / 2, abs=0.15 * (high - low))
    end = solve_joint(tuned, problem.fidelity, problem.x0, high, max_iter=50).t_hat
    assert float(end) == pytest.approx(low)


def test_fine_tuning_shortens_gradients_of_pictures_that_are_out_of_the_way():
    _, _, run = fine_tuning(1, half=False)
    for _ in range(run.settings.looks):
        run.step()
    s = torch.zeros(1, dtype=torch.long)
    x = smooth_images().tensor(0)[..., :16, :16]
    problem = _problem("denoise", x, torch.ones_like(x), run.levels[s], run.scales[s])

    def added(usual):
        total = run._total()
        run._add(total, problem, s, torch.tensor([usual]))
        return total

    free = added(1.0)
    length = float(free[-2])
    assert length == pytest.approx(run.model.length())
    run._usual = length
    torch.testing.assert_close(added(1 / 1.9)[:-3], 1.9 * free[:-3], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(added(1e-3)[:-3], 2 * free[:-3], rtol=1e-3, atol=1e-6)
    assert added(1e-3)[-3:].tolist() == pytest.approx([1000 * float(free[-3]), 2 * length, 1.0])
    with torch.no_grad():
        run.tensors[0].fill_(math.inf)
    assert (added(1.0)[:-3] == 0).all()  # passed over
    assert added(1.0)[-2:].tolist() == [0, 0]


def test_fine_tuning_leaves_a_blank_picture_alone():
    """Lines in the potentials pull at its edges.  Where nothing else counts, that is taken off."""
    prior, schedules, _ = fine_tuning(1)
    dataset = Dataset("blank", ("a",), (np.full((1, 40, 40), 99, np.uint8),))
    settings = Settings(steps=150, looks=12, batch=2, size=16, lr=3e-2, lr_schedules=0, average=0.5)
    run = FineTuning(prior, schedules, dataset, settings)

    def moved(model, steps):
        flat = torch.full((1, 1, 20, 26), 0.3)
        energy = steps.prior_at(model, 0.1)
        return float((unroll(energy, Denoising(flat, 0.1), flat, steps.at(0.1)) - flat).abs().max())

    before = moved(*run.result())
    for _ in range(settings.looks):
        run.step()
    run.usual_errors[:] = math.inf  # from now on nothing but the blank picture counts
    while run.number < settings.batches:
        run.step()
    assert moved(*run.result()) < 0.3 * before


def test_fine_tuning_goes_back_to_its_average_where_images_blow_up():
    _, _, run = fine_tuning(3, looks=1)
    run.step()
    run.step()
    good = [t.clone() for t in run.average.tensors]
    with torch.no_grad():
        run.tensors[0].fill_(math.inf)
    assert not math.isfinite(run.step().loss)
    for tensor, average in zip(run.tensors, good, strict=True):
        assert torch.equal(tensor, average)
    assert math.isfinite(run.step().loss)


def test_fine_tuned_inpainting_keeps_its_steps_short_enough_for_flat_images():
    _, _, run = fine_tuning(1, "inpaint")
    with torch.no_grad():
        for schedule in run.schedules:
            schedule.free[1] += 20  # far longer than they may be
        t_hats, etas, _ = run._schedules(run.prior, run.schedules, 60)
    curvature, _ = flat_curvature(run.prior, t_hats.flatten(), 60)
    assert (etas.flatten() * curvature).tolist() == pytest.approx([2.5] * 6, rel=0.01)


def test_fine_tuning_hides_as_many_pixels_as_the_level_says():
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 2, 1, 200, 200, generator=generator)
    problem = _problem("inpaint", x, noise, torch.tensor([0.3, 0.8]), torch.tensor([1.0, 2.0]))
    scaled = x * torch.tensor([1.0, 2.0]).view(2, 1, 1, 1)
    assert torch.equal(problem.target, scaled)
    assert torch.equal(problem.fidelity.z, scaled.masked_fill(problem.fidelity.mask, 0))
    shares = problem.fidelity.mask.float().mean((1, 2, 3))
    assert shares.tolist() == pytest.approx([0.3, 0.8], abs=4 * 0.5 / 200)  # four deviations


def test_fine_tuning_denoises_all_levels_on_one_scale():
    """All have noise of 0.1, but for those that would have to be more than doubled."""
    prior, schedules, run = fine_tuning(1)
    levels = torch.tensor([0.025, 0.05, 0.1, 0.2], dtype=torch.float64)
    start = on_one_scale(replace(schedules, levels=levels[1:]))
    torch.testing.assert_close(start.scales, 0.1 / levels[1:])
    x = smooth_images().tensor(0).float()
    z = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    expected = unroll(prior, Denoising(z, 0.1), z, schedules.at(0.1))
    for sigma in (0.05, 0.2):
        c = 0.1 / sigma
        model = start.prior_at(prior, sigma)
        found = unroll(model, Denoising(z / c, sigma), z / c, start.at(sigma))
        torch.testing.assert_close(c * found, expected, atol=1e-5, rtol=0)
    given = replace(schedules, levels=levels[:3])
    capped = on_one_scale(given)
    assert capped.scales.tolist() == [2, 2, 1]
    torch.testing.assert_close(capped.t_hats[0], given.at(0.1)[0] - math.log(4))
    # the run works on scaled images, and says what that means for those that are not
    _, learned = run.result()
    torch.testing.assert_close(learned.scales, torch.tensor([2.0, 1.0, 0.5]).double())
    torch.testing.assert_close(learned.etas, on_one_scale(schedules).etas, rtol=1e-5, atol=0)


def test_fine_tuning_counts_all_levels_alike():
    """With steps that change nothing the loss of every level is about 1, whatever its scale."""
    prior, schedules, _ = fine_tuning(1)
    given = on_one_scale(schedules)
    settings = Settings(steps=1, looks=1, batch=48, size=16)
    for s in range(3):
        one = Schedules("denoise", given.levels[s : s + 1], given.t_hats[s : s + 1],
                        given.etas[s : s + 1], scales=given.scales[s : s + 1])  # fmt: skip
        loss = FineTuning(prior, one, smooth_images(), settings).step().loss
        assert loss == pytest.approx(1, abs=0.25)


def test_fine_tuning_refuses_empty_batches():
    with pytest.raises(GncpriorError, match="must be positive"):
        Settings(batch=0)


def test_fine_tuning_divides_by_how_hard_an_image_is():
    """Errors of images are 1 on average; more contrast is harder, and no image is easier than a tenth."""
    prior, schedules, _ = fine_tuning(1, "inpaint")
    waves = torch.linspace(0, 40, 48).sin().outer(torch.linspace(0, 40, 48).sin()).numpy()
    images = [np.uint8(127.5 + contrast * waves)[None] for contrast in (0, 60, 120)]
    dataset = Dataset("waves", ("a", "b", "c"), tuple(images))
    settings = Settings(steps=1, looks=1, batch=3, size=16)
    errors = FineTuning(prior, schedules, dataset, settings).usual_errors
    usual = 10 ** (-torch.tensor([*scores_of(prior, dataset, schedules, 16, 16).values()]) / 10)
    for s in range(3):
        flat, soft, sharp = (errors[:, s] / usual[s]).tolist()
        assert flat == pytest.approx(0.1)  # its error is less than 0.02
        assert soft + sharp == pytest.approx(3, abs=0.02)
        assert sharp > 2 * soft


def still(run):
    """A run after its looks, which does not move."""
    run.number = run.settings.looks
    run.model.length = lambda: 1.0
    run.model.step = lambda _: None
    return run


def test_processes_share_a_batch():
    """What two processes sum up is what one has."""
    prior, schedules, alone = fine_tuning(1)
    parts = []
    for rank in range(2):
        workers = Workers("cpu")
        workers.rank, workers.size = rank, 2
        workers.sum = lambda values: values
        run = still(FineTuning(prior, schedules, smooth_images(), alone.settings, workers))
        parts.append((run.step().loss, run))
    loss = still(alone).step().loss
    assert sum(one for one, _ in parts) == pytest.approx(loss)
    for k, tensor in enumerate(alone.tensors):
        total = sum(run.tensors[k].grad for _, run in parts)
        torch.testing.assert_close(total.to(tensor), tensor.grad, rtol=1e-4, atol=1e-6)


def test_looks_have_the_moments_of_the_gauss_newton_matrix():
    """dᵀHd = Σ 2‖∂x/∂d‖²/u over crops, ∂x/∂d by differences, against the mean of ⟨s, d⟩² over looks."""
    _, _, run = fine_tuning(1, looks=200, half=False)
    generator = torch.Generator().manual_seed(0)
    directions = [0.01 * torch.randn(p.shape, generator=generator) for p in run.prior.parameters()]
    found, expected = [], []
    run.model.look = lambda: found.append(
        sum(float((p.grad * d).sum()) for p, d in zip(run.prior.parameters(), directions, strict=True)) ** 2
    )  # fmt: skip
    real, epsilon = finetuning.squared_error, 1e-2

    def watched(prior, problem, t_hats, etas, buffers, **options):
        def end(sign):
            moved = copy.deepcopy(prior).requires_grad_(False)
            for p, d in zip(moved.parameters(), directions, strict=True):
                p.add_(d, alpha=sign * epsilon)
            return unroll(moved, problem.fidelity, problem.x0, (t_hats[:, 0], etas[:, 0]))

        rate = (end(1) - end(-1)) / (2 * epsilon)
        expected.append(2 * float(rate.square().sum() * options["weights"]))
        return real(prior, problem, t_hats, etas, buffers, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetuning, "squared_error", watched)
        for _ in range(60):
            run.step()
    assert len(found) == len(expected) == 360
    assert np.mean(found) == pytest.approx(np.mean(expected), rel=0.25)  # 7 % by chance


def test_levels_that_are_named_twice_count_twice():
    _, _, run = fine_tuning(1, turns=(0.2, 0.05, 0.2))
    assert run.turns.tolist() == [2, 0, 2]
    with pytest.raises(GncpriorError, match="and no others"):
        fine_tuning(1, turns=(0.3,))


def test_spread_steps_begin_where_they_were():
    losses, gaps = [], []
    for spread in (False, True):
        _, _, run = fine_tuning(1, turns=(0.1,), spread=spread)
        losses.append(run.step().loss)
        gaps.append(float(run.result()[1].t_hats[1].diff().abs()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert gaps[1] > 1.5 * gaps[0]
