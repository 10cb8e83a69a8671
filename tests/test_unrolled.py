"""The learned scheme: its adjoint against autograd, its parameters, and schedules for every level."""

import math
from dataclasses import replace

import pytest
import torch
from PIL import Image
from small import smooth_images, tiny

from gncprior import GncpriorError, cli
from gncprior.buffers import Buffers
from gncprior.checkpoints import load_prior, save_prior, write_tensors
from gncprior.experiments.common import HARBOUR
from gncprior.fidelity import Denoising, Inpainting
from gncprior.images import read_image
from gncprior.prior import Architecture, Prior
from gncprior.sensitivities import gradient_adjoint
from gncprior.unrolled import (
    Schedules,
    fingerprint,
    load_schedules,
    schedules_path,
    unroll,
)
from gncprior.unrolled_adjoint import Problem, crops, make_problem, squared_error
from gncprior.unrolled_learning import (
    Parameters,
    learn_schedule,
    start_schedule,
    stretch,
)

pytestmark = pytest.mark.usefixtures("one_thread")


STEPS = 4


def images(count=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 9, 8, generator=generator, dtype=dtype)


def problem(task, level, **options):
    return make_problem(task, level, images(**options), torch.Generator().manual_seed(1))


def schedule():
    t_hats = torch.tensor([-2.0, -3.1, -4.0, -4.6], dtype=torch.float64)
    return t_hats, torch.tensor([0.4, 0.7, 0.5, 0.9], dtype=torch.float64) * t_hats.exp() / 4


layers = pytest.mark.parametrize("layers", [1, 2, 3])
tasks = pytest.mark.parametrize(("task", "level"), [("denoise", 0.1), ("inpaint", 0.6)])


# ---------------------------------------------------------------- the adjoint


@layers
def test_sensitivities_are_the_derivatives_of_the_gradient(layers):
    prior, x = tiny(layers), images()
    v = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    t_hat = torch.tensor([-3.0, -1.5], dtype=x.dtype, requires_grad=True)
    x.requires_grad_()
    dx, dt = torch.autograd.grad((prior.grad(x, t_hat) * v).sum(), [x, t_hat])
    hv, mixed = gradient_adjoint(prior, x.detach(), t_hat.detach(), v)
    torch.testing.assert_close(hv, dx, rtol=1e-9, atol=1e-9 * float(dx.abs().max()))
    torch.testing.assert_close(mixed, dt, rtol=1e-9, atol=0)


def test_halved_products_change_the_sensitivities_little():
    """By the kernels of this processor; those without bfloat16 change nothing."""
    prior = load_prior("r2").requires_grad_(True)
    generator = torch.Generator().manual_seed(2)
    picture = torch.from_numpy(read_image(HARBOUR)[60:108, 20:68].copy())[None, None] / 255
    x = picture + 0.1 * torch.randn(picture.shape, generator=generator)
    v = torch.randn(x.shape, generator=generator)
    found = []
    for half in (False, True):
        prior.zero_grad()
        hv, _ = gradient_adjoint(prior, x, torch.tensor([-4.6]), v, parameters=True, half=half)
        found.append([hv.clone(), *(p.grad.clone() for p in prior.parameters())])
    off = [float((b - a).norm() / a.norm()) for a, b in zip(*found, strict=True)]
    assert off[0] < 0.005
    assert max(off) < 0.03


@layers
@tasks
@pytest.mark.parametrize("per_image", [False, True], ids=["one schedule", "per image"])
def test_the_written_out_adjoint_is_the_gradient(layers, task, level, per_image):
    """In t̂, η and all parameters of the prior, with errors of the images weighed differently."""
    prior, data = tiny(layers).requires_grad_(True), problem(task, level)
    t_hats, etas = (s[:, None].expand(-1, 2).clone() for s in schedule())
    if per_image:
        t_hats[:, 1] -= 0.3
        etas[:, 1] *= 0.7
    weights = torch.tensor([1.0, 0.4], dtype=torch.float64)
    given = (t_hats, etas) if per_image else schedule()
    errors, dt_hats, detas = squared_error(
        prior, data, *given, Buffers(), weights=weights, parameters=True
    )
    mine = [p.grad.clone() for p in prior.parameters()]

    prior.zero_grad()
    t_hats.requires_grad_()
    etas.requires_grad_()
    x = data.x0
    for t_hat, eta in zip(t_hats, etas, strict=True):
        eta = eta.view(-1, 1, 1, 1)
        w = x - eta * prior.grad(x, t_hat)
        if task == "denoise":
            x = (w + eta * data.x0 / level**2) / (1 + eta / level**2)
        else:
            x = torch.where(data.fidelity.mask, w, data.x0)
    expected = (x - data.target).square().flatten(1).sum(1)
    torch.testing.assert_close(errors, expected.detach())
    (weights * expected).sum().backward()
    torch.testing.assert_close(dt_hats, t_hats.grad, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(detas, etas.grad, rtol=1e-8, atol=1e-8)
    for parameter, grad in zip(prior.parameters(), mine, strict=True):
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-8, atol=1e-9 * largest)


def test_the_adjoint_belongs_to_what_the_solver_computes():
    prior, data = tiny(2), problem("denoise", 0.1)
    x = unroll(prior, data.fidelity, data.x0, schedule())
    errors, _, _ = squared_error(prior, data, *schedule(), Buffers())
    torch.testing.assert_close(errors, (x - data.target).square().flatten(1).sum(1))


def test_the_native_path_agrees_with_float64():
    prior, data = tiny(2, filters=16), problem("denoise", 0.1)
    double = squared_error(prior, data, *schedule(), Buffers())
    z = data.x0.float()
    native = Problem(data.target.float(), Denoising(z, 0.1), z)
    single = squared_error(prior.float(), native, *schedule(), Buffers())
    for mine, expected in zip(single, double, strict=True):
        size = float(expected.abs().max())
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3 * size)


def test_memory_is_that_of_one_step():
    """Features are kept for one step only, whatever their number: here 40 steps of 6 MB features."""
    import psutil

    prior = tiny(1, torch.float32, filters=48, first_size=5)
    x = torch.rand(2, 1, 128, 128, generator=torch.Generator().manual_seed(0))
    data = make_problem("denoise", 0.1, x, torch.Generator().manual_seed(1))
    buffers = Buffers()
    process = psutil.Process()

    def resident(steps):
        t_hats = torch.linspace(-4, -6, steps, dtype=torch.float64)
        squared_error(prior, data, t_hats, 0.2 * t_hats.exp(), buffers)
        return process.memory_info().rss

    few, many = resident(2), resident(42)
    kept = 2 * 40 * x.numel() * 4  # x_i and g_i
    assert many - few < 2 * kept + 2 * 48 * x.numel() * 4


# ---------------------------------------------------------------- parameters and learning


@pytest.mark.parametrize("steps", [1, 10, 30])
@tasks
def test_exactly_two_parameters_a_step(steps, task, level):
    t_hat_range = (math.log(1e-4), 0.0)
    start = start_schedule(task, level, steps, t_hat_range)
    parameters = Parameters(*start, t_hat_range)
    assert parameters.free.numel() == 2 * steps
    t_hats, etas = (s.detach() for s in parameters.schedule())
    torch.testing.assert_close(t_hats, start[0], rtol=0, atol=0.01)
    torch.testing.assert_close(etas, start[1], rtol=0.02, atol=0)


def test_parameters_cannot_leave_their_range():
    parameters = Parameters(*schedule(), (-9.0, 0.0))
    with torch.no_grad():
        parameters.free.mul_(-1000)
    t_hats, _ = parameters.schedule()
    assert (t_hats >= -9).all()
    assert (t_hats <= 0).all()
    with torch.no_grad():
        parameters.free[1] = -50.0
    assert (parameters.schedule()[1] > 0).all()


@tasks
def test_learning_finds_the_best_step_sizes(task, level):
    """For one step the loss is a function of two numbers, which a scan minimises as well."""
    prior = tiny(1, torch.float32)
    data = crops(smooth_images(), task, level, count=6, size=16, chunk=4)
    assert [len(p.target) for p in data] == [4, 2]
    buffers = Buffers()

    def loss(t_hat, eta):
        one = (torch.tensor([t_hat]).double(), torch.tensor([eta]).double())
        return sum(float(squared_error(prior, p, *one, buffers)[0].sum()) for p in data)

    def scan(t_hats, factors):
        low, high = prior.t_hat_range
        pairs = [
            (t_hat, math.exp(t_hat + b))
            for t_hat in torch.linspace(low + 0.3, high - 0.3, t_hats).tolist()
            for b in torch.linspace(-3, 4, factors).tolist()
        ]
        return min(pairs, key=lambda pair: loss(*pair))

    # the loss has more than one minimum: learning starts in the valley of the lowest
    start = scan(4, 8)
    seen = []
    learned = learn_schedule(
        prior, data, torch.tensor(start)[:, None].double().unbind(), evaluations=60,
        callback=seen.append,
    )  # fmt: skip
    reached = loss(float(learned[0]), float(learned[1]))
    assert reached < loss(*start)
    assert reached < 1.02 * loss(*scan(12, 29))
    pixels = 6 * 16 * 16
    assert max(s.psnr for s in seen) == pytest.approx(-10 * math.log10(reached / pixels), abs=1e-3)
    assert [s.evaluation for s in seen] == list(range(1, len(seen) + 1))


def test_steps_of_inpainting_are_bounded_and_do_not_blow_up_a_flat_picture():
    t_hats = torch.linspace(-2, -8, 5, dtype=torch.float64)
    long = Parameters(t_hats, 5 * t_hats.exp(), (-9.0, 0.0), longest=1.8)
    found, etas = long.schedule()
    torch.testing.assert_close(found, t_hats)
    assert (etas < 1.8 * t_hats.exp()).all()
    within = Parameters(t_hats, 1.1 * t_hats.exp(), (-9.0, 0.0), longest=1.8).schedule()[1]
    torch.testing.assert_close(within, 1.1 * t_hats.exp())
    # the quadratic prior has the curvature 1/(t + 0.01) of noise on a nearly constant image
    prior = Prior(Architecture()).start().requires_grad_(False)
    uneven = 0.5 + 1e-4 * torch.randn(1, 1, 24, 24, generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(uneven, dtype=torch.bool)
    mask[..., ::4, ::4] = False
    x = unroll(prior, Inpainting(uneven, mask), uneven, long.schedule())
    assert (x - 0.5).abs().max() < 1e-3


def test_more_steps_are_no_worse_when_stretched():
    prior = tiny(1, torch.float32)
    data = crops(smooth_images(), "denoise", 0.1, count=6, size=16)
    two = learn_schedule(prior, data, start_schedule("denoise", 0.1, 2, prior.t_hat_range))
    start = stretch(two, 5)
    assert start[0].shape == start[1].shape == (5,)
    torch.testing.assert_close(start[0][[0, -1]], two[0][[0, -1]])
    five = learn_schedule(prior, data, start)
    buffers = Buffers()
    losses = [
        sum(float(squared_error(prior, p, *s, buffers)[0].sum()) for p in data) for s in (two, five)
    ]
    assert losses[1] < losses[0]


# ---------------------------------------------------------------- schedules for every level

SIGMAS = torch.tensor([5.0, 15.0, 50.0], dtype=torch.float64) / 255


def shipped(task="denoise", levels=SIGMAS):
    generator = torch.Generator().manual_seed(0)
    t_hats = 2 * levels.log()[:, None] - torch.rand(3, STEPS, generator=generator).double()
    return Schedules(task, levels, t_hats, t_hats.exp() * 0.5)


def test_schedules_return_what_they_hold():
    schedules = shipped()
    for sigma, t_hats, etas in zip(SIGMAS, schedules.t_hats, schedules.etas, strict=True):
        found = schedules.at(float(sigma))
        torch.testing.assert_close(found[0], t_hats)
        torch.testing.assert_close(found[1], etas)
    assert schedules.steps == STEPS


def test_no_seam_between_or_beyond_levels():
    """From 0.01 to 0.5 neighbouring levels have neighbouring schedules, also across the held ones."""
    schedules = shipped()
    sigmas = torch.logspace(-2, math.log10(0.5), 4001, dtype=torch.float64)
    t_hats, etas = (
        torch.stack(s) for s in zip(*(schedules.at(float(s)) for s in sigmas), strict=True)
    )
    step = float(sigmas.log().diff()[0])
    rate = schedules.t_hats.diff(dim=0).abs() / schedules.levels.log().diff()[:, None]
    steepest = max(2.0, float(rate.max()))
    assert t_hats.diff(dim=0).abs().max() <= steepest * step * (1 + 1e-6)
    assert etas.log().diff(dim=0).abs().max() <= steepest * step * (1 + 1e-6)


@pytest.mark.parametrize("sigma", [0.01, 0.5])
def test_beyond_the_ends_the_image_is_scaled(sigma):
    """What comes out is that of the last level, for the image whose noise is scaled to it."""
    schedules, prior, z = shipped(), tiny(2), images()
    end = float(SIGMAS[0] if sigma < SIGMAS[0] else SIGMAS[-1])
    c = end / sigma
    found = unroll(schedules.prior_at(prior, sigma), Denoising(z, sigma), z, schedules.at(sigma))
    expected = unroll(prior, Denoising(c * z, end), c * z, schedules.at(end)) / c
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("sigma", [0.01, 0.1, 0.5])
def test_without_scales_smoothing_follows_the_noise(sigma):
    held = shipped()
    end = min(max(sigma, float(SIGMAS[0])), float(SIGMAS[-1]))
    t_hats, etas = held.unscaled(sigma)
    torch.testing.assert_close(t_hats, held.at(end)[0] + 2 * math.log(sigma / end))
    torch.testing.assert_close(etas, held.at(end)[1] * (sigma / end) ** 2)
    doubled = replace(held, scales=torch.full((3,), 2.0)).unscaled(sigma)
    torch.testing.assert_close(doubled[0], t_hats - math.log(4))
    torch.testing.assert_close(doubled[1], etas)


def test_shares_are_interpolated_linearly_and_held_beyond():
    levels = torch.tensor([0.5, 0.8, 0.9], dtype=torch.float64)
    schedules = shipped("inpaint", levels)
    middle = schedules.t_hats[:2].mean(0)
    torch.testing.assert_close(schedules.at(0.65)[0], middle)
    torch.testing.assert_close(schedules.at(0.95)[0], schedules.t_hats[-1])
    torch.testing.assert_close(schedules.at(0.1)[1], schedules.etas[0])


def test_scales_are_interpolated_like_steps():
    scaled = replace(shipped(), scales=torch.tensor([4.0, 1.0, 0.5], dtype=torch.float64))
    prior = tiny(2)

    def scale(sigma):
        ratio = float(scaled.prior_at(prior, sigma).filters[0].norm() / prior.filters[0].norm())
        assert ratio == pytest.approx(scaled.scale(sigma))
        return ratio

    assert scale(15 / 255) == pytest.approx(1)
    assert scale(math.sqrt(5 * 15) / 255) == pytest.approx(2)
    assert scale(0.01) == pytest.approx(4 * (5 / 255) / 0.01)
    assert scale(0.5) == pytest.approx(0.5 * (50 / 255) / 0.5)
    assert shipped().prior_at(prior, 0.1) is prior


def test_a_scaled_prior_takes_the_steps_of_the_scaled_image():
    prior, sigma, c = tiny(2), 0.1, 1.7
    (t_hats, etas), z = schedule(), images()
    scaled = replace(shipped(), scales=torch.full((3,), c, dtype=torch.float64))
    x = unroll(scaled.prior_at(prior, sigma), Denoising(z, sigma), z, (t_hats, etas))
    other = unroll(prior, Denoising(c * z, c * sigma), c * z, (t_hats, c**2 * etas)) / c
    torch.testing.assert_close(x, other)
    assert not torch.allclose(x, unroll(prior, Denoising(z, sigma), z, (t_hats, etas)))


def test_files(tmp_path):
    prior = tiny(1, torch.float32)
    file = tmp_path / "mine.safetensors"
    save_prior(file, prior)
    path = schedules_path(file, "denoise", STEPS)
    assert path == tmp_path / "mine-denoise-4.safetensors"
    assert schedules_path("r2", "inpaint", 30).name == "r2-inpaint-30.safetensors"
    held = shipped()
    info = {"prior": "mine", "prior_sha256": fingerprint(prior)}
    Schedules(held.task, held.levels, held.t_hats, held.etas, info).save(path)
    again = load_schedules(path, prior)
    assert torch.equal(again.t_hats, held.t_hats)
    assert torch.equal(again.etas, held.etas)
    assert again.info["prior"] == "mine"
    assert again.scales is None
    replace(held, scales=2 * SIGMAS).save(path)
    assert torch.equal(load_schedules(path).scales, 2 * SIGMAS)
    Schedules(held.task, held.levels, held.t_hats, held.etas, info).save(path)
    with torch.no_grad():
        prior.filters[0][0, 0, 0, 0] += 1e-3
    with pytest.raises(GncpriorError, match="learned for another version of the prior"):
        load_schedules(path, prior)
    with pytest.raises(GncpriorError, match="holds 'prior' and not schedules"):
        load_schedules(file)
    write_tensors(path, {"levels": SIGMAS}, {"kind": "schedules", "task": "denoise"})
    with pytest.raises(GncpriorError, match="not schedules"):
        load_schedules(path)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: shipped("blur"), "is for denoise or inpaint, not 'blur'"),
        (lambda: shipped(levels=SIGMAS.flip(0)), "ascending levels"),
        (lambda: Schedules("denoise", SIGMAS, torch.zeros(2, 4), torch.ones(2, 4)), "every level"),
        (lambda: Schedules("denoise", SIGMAS, torch.zeros(3, 4), torch.zeros(3, 4)), "positive η"),
        (lambda: replace(shipped(), scales=torch.ones(2)), "one positive scale per level"),
        (lambda: replace(shipped(), scales=torch.zeros(3)), "one positive scale per level"),
        (lambda: shipped().at(0.0), "noise level must be positive and finite, not 0.0"),
        (lambda: shipped().at(math.nan), "noise level must be positive and finite, not nan"),
        (lambda: learn_schedule(tiny(1), [], schedule()), "needs images"),
    ],
)
def test_bad_input(make, sentence):
    with pytest.raises(GncpriorError, match=sentence):
        make()


# ---------------------------------------------------------------- the command


def test_the_command_learns_and_fine_tunes(tmp_path, capsys):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, image in zip(smooth_images().names, smooth_images().images, strict=True):
        Image.fromarray(image[0]).save(folder / name)
    file, tuned = tmp_path / "mine.safetensors", tmp_path / "tuned.safetensors"
    save_prior(file, tiny(1, torch.float32))
    words = [
        "learn-schedule", "--prior", str(file), "--data", str(folder), "--size", "16",
        "--crops", "4", "--steps", "3",
    ]  # fmt: skip
    assert cli.main([*words, "--sigma", "0.2,25/255", "--evaluations", "6"]) == 0
    assert "mine-denoise-3.safetensors" in capsys.readouterr().out
    prior = load_prior(file)
    learned = load_schedules(schedules_path(file, "denoise", 3), prior)
    assert learned.levels.tolist() == [25 / 255, 0.2]
    assert learned.t_hats.shape == (2, 3)
    for score in learned.info["scores"].values():
        assert score["validation"] > score["validation before"]

    assert cli.main([*words, "--task", "inpaint", "--missing", "0.5", "--evaluations", "3"]) == 0
    assert schedules_path(file, "inpaint", 3).is_file()

    more = ["--finetune", "model", "--iterations", "2", "--batch", "4", "--out", str(tuned)]
    assert cli.main([*words, *more]) == 0
    model = load_prior(tuned)
    assert model.info["fine-tuned from"] == "mine"
    assert load_schedules(schedules_path(tuned, "denoise", 3), model).levels.tolist() == [
        25 / 255,
        0.2,
    ]
    capsys.readouterr()
    assert cli.main([*words, "--finetune", "model"]) == 2
    assert "Say with --out" in capsys.readouterr().err
