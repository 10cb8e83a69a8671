"""The learned scheme: its adjoint against autograd, its parameters, and schedules for every level."""

import math

import pytest
import torch
from PIL import Image

from gncprior import GncpriorError, cli
from gncprior.buffers import Buffers
from gncprior.checkpoints import load_prior, save_prior, write_tensors
from gncprior.convexity import flat_curvature
from gncprior.datasets import Dataset
from gncprior.experiments.common import HARBOUR
from gncprior.fidelity import Denoising, Inpainting
from gncprior.finetuning import FineTuning, Settings, _problem, fine_tune
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
    scores_of,
    start_schedule,
    stretch,
)

pytestmark = pytest.mark.usefixtures("one_thread")


STEPS = 4


def tiny(layers, dtype=torch.float64, **shape):
    """A prior whose functions are anything but linear or quadratic."""
    shape = {"filters": 5, "first_size": 3, "t_knots": 5, "x_knots": 15, "x_range": 2.0, **shape}
    prior = Prior(Architecture(layers=layers, **shape)).start(gain=1.0).to(dtype)
    generator = torch.Generator().manual_seed(layers)
    with torch.no_grad():
        for splines in prior.splines:
            noise = torch.randn(splines.weight.shape, generator=generator, dtype=dtype)
            splines.weight.add_(0.1 * splines.weight.abs().mean() * noise)
    return prior.requires_grad_(False)


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


def smooth_images():
    """Discs and ramps: something that a smoothing prior improves."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
    pictures = [(x * (k - 2) + y + 3) / 8 + 0.3 * (x**2 + y**2 < 0.1 * k) for k in range(1, 6)]
    names = tuple(f"{k}.png" for k in range(len(pictures)))
    bytes_ = tuple((255 * p.clamp(0, 1)).byte()[None].numpy() for p in pictures)
    return Dataset("discs", names, bytes_)


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
def test_beyond_the_ends_everything_scales(sigma):
    schedules = shipped()
    end = SIGMAS[0] if sigma < SIGMAS[0] else SIGMAS[-1]
    ratio = (sigma / end) ** 2
    t_hats, etas = schedules.at(float(end))
    torch.testing.assert_close(schedules.at(sigma)[0], t_hats + ratio.log())
    torch.testing.assert_close(schedules.at(sigma)[1], etas * ratio)


def test_shares_are_interpolated_linearly_and_held_beyond():
    levels = torch.tensor([0.5, 0.8, 0.9], dtype=torch.float64)
    schedules = shipped("inpaint", levels)
    middle = schedules.t_hats[:2].mean(0)
    torch.testing.assert_close(schedules.at(0.65)[0], middle)
    torch.testing.assert_close(schedules.at(0.95)[0], schedules.t_hats[-1])
    torch.testing.assert_close(schedules.at(0.1)[1], schedules.etas[0])


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
        (lambda: shipped().at(0.0), "noise level must be positive and finite, not 0.0"),
        (lambda: shipped().at(math.nan), "noise level must be positive and finite, not nan"),
        (lambda: learn_schedule(tiny(1), [], schedule()), "needs images"),
    ],
)
def test_bad_input(make, sentence):
    with pytest.raises(GncpriorError, match=sentence):
        make()


# ---------------------------------------------------------------- the whole model


LEVELS = {"denoise": [0.05, 0.1, 0.2], "inpaint": [0.3, 0.5, 0.8]}


def fine_tuning(steps, task="denoise", **choices):
    prior = tiny(2, torch.float32)
    levels = torch.tensor(LEVELS[task], dtype=torch.float64)
    pairs = [start_schedule(task, level, 2, prior.t_hat_range) for level in levels.tolist()]
    t_hats, etas = (torch.stack(s) for s in zip(*pairs, strict=True))
    schedules = Schedules(task, levels, t_hats, etas / 4)
    settings = Settings(steps=steps, batch=6, size=16, chunk=4, **choices)
    return prior, schedules, FineTuning(prior, schedules, smooth_images(), settings)


@pytest.mark.parametrize("task", LEVELS)
def test_fine_tuning_improves_every_level(task):
    prior, schedules, run = fine_tuning(20, task, average=0.5, lr_splines=2e-3)
    losses = [run.step().loss for _ in range(20)]
    tuned, learned = run.result()
    assert sum(losses[-5:]) < sum(losses[:5])
    images = smooth_images()
    before = scores_of(prior, images, schedules, size=16)
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
    settings = Settings(steps=3, batch=6, size=16)

    def once():
        seen = []
        model, _ = fine_tune(
            prior, schedules, smooth_images(), settings,
            save=lambda *s: saved.append(s), save_every=2, callback=seen.append,
        )  # fmt: skip
        return seen, model

    (first, one), (second, other) = once(), once()
    assert first == second
    assert [p.step for p in first] == [1, 2, 3]
    assert len(saved) == 4  # after step 2 and at the end, twice
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_fine_tuning_shortens_gradients_that_are_out_of_the_way():
    _, _, run = fine_tuning(1)

    def clipped(length):
        for tensor in run.tensors:
            tensor.grad = torch.zeros_like(tensor)
        run.tensors[0].grad.flatten()[0] = length
        fine = run._clip()
        return fine, float(run.tensors[0].grad.flatten()[0])

    assert clipped(1.0) == (True, 1.0)
    assert clipped(1.5) == (True, 1.5)  # the usual length is now 1.025
    assert clipped(1e6) == (True, pytest.approx(2.05))
    assert not clipped(math.inf)[0]
    assert clipped(2.1) == (True, pytest.approx(2.1))  # 1.07625 is usual


def test_fine_tuned_inpainting_keeps_its_steps_short_enough_for_flat_images():
    _, _, run = fine_tuning(1, "inpaint")
    with torch.no_grad():
        for schedule in run.schedules:
            schedule.free[1] += 20  # far longer than they may be
        t_hats, etas = run._schedules(run.prior, run.schedules, 60)
    curvature, _ = flat_curvature(run.prior, t_hats.flatten(), 60)
    assert (etas.flatten() * curvature).tolist() == pytest.approx([2.5] * 6, rel=0.01)


def test_fine_tuning_hides_as_many_pixels_as_the_level_says():
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 2, 1, 200, 200, generator=generator)
    problem = _problem("inpaint", x, noise, torch.tensor([0.3, 0.8]))
    assert torch.equal(problem.fidelity.z, x.masked_fill(problem.fidelity.mask, 0))
    shares = problem.fidelity.mask.float().mean((1, 2, 3))
    assert shares.tolist() == pytest.approx([0.3, 0.8], abs=4 * 0.5 / 200)  # four deviations


def test_fine_tuning_refuses_empty_batches():
    with pytest.raises(GncpriorError, match="must be positive"):
        Settings(batch=0)


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
