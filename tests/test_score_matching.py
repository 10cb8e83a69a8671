"""Joint score matching: its hand-derived gradient, and what it learns where the truth is known."""

import math

import pytest
import torch

from gncprior.errors import GncpriorError
from gncprior.mixtures import GaussianMixture
from gncprior.native import kernels
from gncprior.optimizers import AdaBelief, Average, cosine
from gncprior.prior import Architecture, Prior
from gncprior.score_matching import ScoreMatching, loss_by_autograd


def small_prior(layers, dtype, scaled=False, channels=1):
    prior = Prior(
        Architecture(
            layers=layers,
            channels=channels,
            filters=5,
            first_size=3,
            x_knots=9,
            t_knots=5,
            scaled=scaled,
        )
    ).to(dtype)
    prior.start(gain=2.0, spread=0.3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in prior.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
    return prior


def batch_of(count, channels, dtype, seed=2):
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(2, count, channels, 7, 6, generator=generator, dtype=torch.float64)
    t_hat = torch.linspace(-8.0, -0.3, count, dtype=torch.float64)
    return x.to(dtype), noise.to(dtype), t_hat.to(dtype)


@pytest.mark.parametrize("form", ["boundary", "explicit"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_terms_and_gradients_are_those_of_the_plain_formula(layers, scaled, dtype, rtol, form):
    prior = small_prior(layers, dtype, scaled, channels=3 if layers == 2 else 1)
    data = batch_of(4, prior.architecture.channels, dtype)
    terms = ScoreMatching(prior, t_weight=1.3, **{form: True})(*data)
    mine = [p.grad.clone() for p in prior.parameters()]
    for p in prior.parameters():
        p.grad = None
    plain = loss_by_autograd(prior, *data, t_weight=1.3, **{form: True})
    sum(plain).backward()
    for got, want in zip((terms.x, terms.t, terms.boundary), plain, strict=True):
        assert got == pytest.approx(float(want.detach()), rel=10 * rtol)
    assert terms.total == pytest.approx(float(sum(plain).detach()), rel=10 * rtol)
    for got, p in zip(mine, prior.parameters(), strict=True):
        assert (got - p.grad).abs().max() <= rtol * p.grad.abs().max()


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("t_weight", [0.0, 0.8])
def test_gradients_of_a_t_term_on_part_of_the_batch(layers, t_weight):
    prior = small_prior(layers, torch.float64)
    data = batch_of(5, 1, torch.float64)
    terms = ScoreMatching(prior, t_weight, t_fraction=0.4, boundary=True)(*data)
    mine = [p.grad.clone() for p in prior.parameters()]
    for p in prior.parameters():
        p.grad = None
    part = [v[:2] for v in data]
    in_t = data if layers == 1 else part  # for one layer the whole costs next to nothing
    plain = (
        loss_by_autograd(prior, *data)[0],
        loss_by_autograd(prior, *in_t, t_weight=t_weight)[1],
        loss_by_autograd(prior, *part, t_weight=t_weight, boundary=True)[2],
    )
    sum(plain).backward()
    for got, want in zip((terms.x, terms.t, terms.boundary), plain, strict=True):
        assert got == pytest.approx(float(want.detach()), rel=1e-11)
    for got, p in zip(mine, prior.parameters(), strict=True):
        assert (got - p.grad).abs().max() <= 1e-12 * p.grad.abs().max()


def test_half_products_change_gradients_by_no_more_than_their_rounding():
    """A factor of eight bits is off by at most 1/256; four of them stand one after the other here."""
    prior = small_prior(2, torch.float32)
    data = batch_of(4, 1, torch.float32)
    grads = []
    for half in (False, True):
        ScoreMatching(prior, half=half)(*data)
        grads.append([p.grad.clone() for p in prior.parameters()])
    for full, rough in zip(*grads, strict=True):
        assert (full - rough).norm() <= 4 / 256 * full.norm()
    same = all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert same == (kernels.variant() not in ("amx", "avx512bf16"))


def test_gradient_is_that_of_finite_differences():
    prior = small_prior(2, torch.float64)
    data = batch_of(3, 1, torch.float64)
    objective = ScoreMatching(prior, t_weight=0.7, boundary=True)
    objective(*data)
    generator = torch.Generator().manual_seed(3)
    for p in prior.parameters():
        direction = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        slope = float((p.grad * direction).sum())
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                p.add_(direction, alpha=sign * 1e-6)
            values.append(sum(float(v.detach()) for v in loss_by_autograd(prior, *data, 0.7, True)))
            with torch.no_grad():
                p.sub_(direction, alpha=sign * 1e-6)
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-6)


def test_gradients_are_overwritten_and_buffers_do_not_remember():
    prior = small_prior(3, torch.float32)
    objective = ScoreMatching(prior)
    first = batch_of(4, 1, torch.float32)
    objective(*first)
    want = [p.grad.clone() for p in prior.parameters()]
    objective(*batch_of(6, 1, torch.float32, seed=9))
    objective(*first)
    assert all(torch.equal(p.grad, w) for p, w in zip(prior.parameters(), want, strict=True))


def test_first_filters_get_no_gradient_towards_a_mean():
    prior = small_prior(1, torch.float64)
    ScoreMatching(prior)(*batch_of(4, 1, torch.float64))
    assert prior.filters[0].grad.mean(dim=(1, 2, 3)).abs().max() < 1e-15


def test_t_term_on_parts_of_the_batch_averages_to_the_whole():
    prior = small_prior(2, torch.float64)
    x, noise, t_hat = batch_of(4, 1, torch.float64)
    whole = ScoreMatching(prior)(x, noise, t_hat).t
    objective = ScoreMatching(prior, t_fraction=0.25)
    parts = [objective(*(v.roll(k, 0) for v in (x, noise, t_hat))).t for k in range(4)]
    assert sum(parts) / 4 == pytest.approx(whole, rel=1e-12)


def test_weights_out_of_range_are_refused():
    prior = small_prior(1, torch.float32)
    both = {"boundary": True, "explicit": True}
    for options in ({"t_weight": -1.0}, {"t_fraction": 0.0}, {"t_fraction": 1.5}, both):
        with pytest.raises(GncpriorError):
            ScoreMatching(prior, **options)


# ---------------------------------------------------------------- the truth: a Gaussian mixture

T_MIN, T_MAX = 0.1, 1.0
ACROSS = torch.tensor([-1.0, 1.0], dtype=torch.float64) / math.sqrt(2)
SPREADS = torch.tensor([0.06, 0.08, 0.06], dtype=torch.float64)


def two_pixels() -> GaussianMixture:
    """Images of two pixels: their difference is a mixture, their mean is nearly uniform.

    (The prior does not see the mean; a variance of 10⁶ makes the truth blind to it as well.)
    """
    along = torch.tensor([1.0, 1.0], dtype=torch.float64) / math.sqrt(2)
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    centres = torch.tensor([0.0, 0.9, -0.7], dtype=torch.float64)
    means = centres[:, None] * ACROSS
    covariances = SPREADS[:, None, None] * torch.outer(ACROSS, ACROSS) + 1e6 * torch.outer(
        along, along
    )
    return GaussianMixture(weights, means, covariances)


def pairs(images: int, rows: int, generator: torch.Generator):
    """Images of ``rows`` independent pairs, and noise: filters of one row do not mix them."""
    x = two_pixels().sample(images * rows, generator=generator)
    x = x - x.mean(1, keepdim=True)  # the mean plays no part
    shape = (images, 1, rows, 2)
    return x.float().view(shape), torch.randn(shape, generator=generator)


def pair_prior() -> Prior:
    """One expert, of the difference of two pixels; hardly a pair falls beyond its grid."""
    prior = Prior(
        Architecture(
            filters=1, first_size=3, x_knots=35, x_range=4.5, t_knots=4, t_min=T_MIN, t_max=T_MAX
        )
    ).start()
    with torch.no_grad():
        prior.filters[0].zero_()
        prior.filters[0][0, 0, 1] = torch.tensor([-0.5, 0.0, 0.5])
    return prior


@pytest.fixture(scope="module")
def learned():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these tensors are small
    yield _learned()
    torch.set_num_threads(threads)


def _learned() -> Prior:
    prior = pair_prior()
    splines = prior.splines[0].weight
    objective = ScoreMatching(prior, boundary=True)
    optimizer = AdaBelief([splines])
    average = Average([splines], 0.995)
    generator = torch.Generator().manual_seed(0)
    low, high = prior.t_hat_range
    count, steps = 48, 1500
    for step in range(steps):
        u = (
            torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)
        ) / count
        objective(*pairs(count, 600, generator), low + (high - low) * u)
        optimizer.param_groups[0]["lr"] = 0.03 * cosine(step, steps, 0.005)
        optimizer.step()
        average.update()
    average.copy_to([splines])
    return prior.requires_grad_(False)


def test_learned_energy_has_the_score_and_the_time_slope_of_the_mixture(learned):
    mixture = two_pixels()
    x, noise = (v.view(-1, 1, 1, 2) for v in pairs(1, 20000, torch.Generator().manual_seed(1)))
    wrong, right = 0.0, 0.0
    for t in (0.1, 0.15, 0.25, 0.4, 0.7, 1.0):
        y = x + math.sqrt(t) * noise
        flat = y.double().flatten(1)
        truth = mixture.grad(flat, t)
        truth = truth - truth.mean(1, keepdim=True)
        error = learned.grad(y, math.log(t)).double().flatten(1) - truth
        assert error.norm() <= 0.05 * truth.norm()
        slope = t * mixture.dt(flat, t)
        wrong += float((learned.t_derivatives(y, math.log(t))[0] - slope).square().sum())
        right += float(slope.square().sum())
    assert wrong <= 0.05**2 * right


def test_both_forms_of_the_t_term_have_the_same_mean_gradient(one_thread):
    """The explicit form and the implicit one with its boundary term; without that they differ."""
    prior = pair_prior()
    low, high = prior.t_hat_range
    generator = torch.Generator().manual_seed(0)
    forms = [{"explicit": True}, {"boundary": True}, {}]
    objectives = [ScoreMatching(prior, t_weight=20.0, **form) for form in forms]
    grads = []
    for _ in range(300):
        t_hat = low + (high - low) * torch.rand(64, generator=generator)
        batch = (*pairs(64, 20, generator), t_hat)
        grads.append([_gradient(objective, batch) for objective in objectives])
    explicit, implicit, without = (torch.stack(g) for g in zip(*grads, strict=True))

    def deviations(difference):
        """Of the mean gradient, in units of its standard error, at knots that many pairs fall on."""
        some = difference[..., 13:26]
        return (some.mean(0) / some.std(0)).abs().max() * math.sqrt(len(some))

    assert deviations(explicit - implicit) < 4
    assert deviations(explicit - without) > 10


def _gradient(objective, batch):
    objective(*batch)
    return objective.prior.splines[0].weight.grad.double().clone()


def least_squares(objective: ScoreMatching, batch, iterations: int) -> float:
    """With the filters fixed the loss is quadratic in the spline weights: conjugate gradients solve it."""
    w = objective.prior.splines[0].weight

    def gradient(at):
        with torch.no_grad():
            w.copy_(at)
        terms = objective(*batch)
        return w.grad.double(), terms.total

    x = w.detach().double()
    zero, _ = gradient(torch.zeros_like(x))
    residual = -gradient(x)[0]
    p = residual.clone()
    for _ in range(iterations):
        ap = gradient(p)[0] - zero
        before = residual.square().sum()
        alpha = before / (p * ap).sum()
        x += alpha * p
        residual -= alpha * ap
        p = residual + residual.square().sum() / before * p
    return gradient(x)[1]


def test_training_reaches_the_loss_of_the_least_squares_solution():
    prior = pair_prior()
    low, high = prior.t_hat_range
    batch = (*pairs(64, 500, torch.Generator().manual_seed(0)), torch.linspace(low, high, 64))
    best = least_squares(ScoreMatching(pair_prior(), boundary=True), batch, 150)
    objective = ScoreMatching(prior, boundary=True)
    optimizer = AdaBelief([prior.splines[0].weight])
    start = objective(*batch).total
    steps = 500
    for step in range(steps):
        objective(*batch)
        optimizer.param_groups[0]["lr"] = 0.05 * cosine(step, steps, 0.01)
        optimizer.step()
    reached = objective(*batch).total
    assert best < start - 0.05 * abs(best)  # there is something to learn
    assert abs(reached - best) <= 0.01 * abs(best)
