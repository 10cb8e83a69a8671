"""Solvers on problems whose minimisers are known: mixtures in closed form, and a small R_1."""

import math

import psutil
import pytest
import torch

from gncprior import GaussianMixture, GncpriorError
from gncprior.fidelity import Denoising, Inpainting, NoisyInpainting
from gncprior.mixtures import example_1d, global_minimum_1d
from gncprior.prior import Architecture, Prior
from gncprior.schedules import linear
from gncprior.solvers import solve_joint, solve_scheduled, tweedie

pytestmark = pytest.mark.usefixtures("one_thread")


class MixtureEnergy:
    """A mixture as a solver sees it: points are images of shape (1, 1, d), t̂ is per image."""

    def __init__(self, mixture, t_min=1e-4, t_max=1.0):
        self.mixture = mixture
        self.t_hat_range = math.log(t_min), math.log(t_max)

    def grad(self, x, t_hat, *, buffers=None):
        return self.energy_and_grad(x, t_hat)[1]

    def energy_and_grad(self, x, t_hat, *, buffers=None):
        energy, grad = self.mixture.energy_and_grad(x.flatten(1), self._t(t_hat))
        return energy, grad.view_as(x)

    def joint_grad(self, x, t_hat, *, buffers=None):
        energy, grad = self.energy_and_grad(x, t_hat)
        t = self._t(t_hat)
        return energy, grad, t * self.mixture.dt(x.flatten(1), t)

    def _t(self, t_hat):
        return torch.as_tensor(t_hat, dtype=torch.float64).clamp(*self.t_hat_range).exp()


class Nothing:
    """No data at all: the least that a user's data term must be."""

    def value(self, x):
        return torch.zeros(len(x), dtype=torch.float64)

    def prox(self, v, tau):
        return v


def points(*values):
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1, 1)


STARTS = torch.linspace(-3, 3, 61, dtype=torch.float64).view(-1, 1, 1, 1)


# ---------------------------------------------------------------- a bank of problems x every solver


def joint(prior, fidelity, x0, **options):
    return solve_joint(prior, fidelity, x0, prior.t_hat_range[1], **options)


def predefined(prior, fidelity, x0, max_iter, **options):
    t_hats = linear(prior.t_hat_range[1], prior.t_hat_range[0], 100)
    return solve_scheduled(prior, fidelity, x0, t_hats, max_iter=max_iter, **options)


def given_steps(prior, fidelity, x0, max_iter, **options):
    t_hats = linear(prior.t_hat_range[1], prior.t_hat_range[0], 100)
    etas = 0.8 * t_hats.exp()
    return solve_scheduled(prior, fidelity, x0, t_hats, etas=etas, max_iter=max_iter, **options)


SOLVERS = {"joint": joint, "predefined": predefined, "given steps": given_steps}


def free():
    """The paper's 1-D example without data."""
    prior = MixtureEnergy(example_1d())
    return prior, Nothing(), STARTS, global_minimum_1d(prior.mixture, 1e-4)[0]


def denoising():
    """The same, seen through noise from its least likely side."""
    prior = MixtureEnergy(example_1d(), t_min=1e-3)
    z = torch.full_like(STARTS, 0.1)
    return prior, Denoising(z, 0.5), STARTS, _least(prior, z, 0.5)


def noise_map():
    """Each image with its own σ; z is far away and little trusted."""
    prior = MixtureEnergy(example_1d(), t_min=1e-3)
    z, sigma = points(0.0, 0.2, 1.5), torch.tensor([0.6, 0.4, 0.8], dtype=torch.float64)
    least = torch.tensor([_least(prior, z[i : i + 1], float(sigma[i])) for i in range(3)])
    least = least.view_as(z)
    return prior, Denoising(z, sigma), z, least


def inpainting():
    """Two modes in the plane of which the observed coordinate selects one; both x0 are wrong."""
    means = torch.tensor([[0.0, 0.0], [1.0, 0.8]], dtype=torch.float64)
    mixture = GaussianMixture(
        torch.tensor([0.5, 0.5]).double(), means, torch.full((2,), 0.01).double()
    )
    z = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64).view(2, 1, 1, 2)
    mask = torch.tensor([False, True]).expand(1, 2)
    x0 = z.clone()
    x0[..., 1] = torch.tensor([[[0.8]], [[0.0]]])
    least = torch.tensor([[0.0, 0.0], [1.0, 0.8]], dtype=torch.float64).view(2, 1, 1, 2)
    return MixtureEnergy(mixture, t_min=1e-3), Inpainting(z, mask), x0, least


def gaussian():
    """One component and noisy data for two of three pixels: a quadratic with a closed form."""
    mean = torch.tensor([[0.2, 0.5, 0.9]], dtype=torch.float64)
    covariance = torch.tensor([[[0.3, 0.1, 0.0], [0.1, 0.2, 0.05], [0.0, 0.05, 0.4]]]).double()
    prior = MixtureEnergy(GaussianMixture(torch.ones(1).double(), mean, covariance), t_min=0.05)
    z = torch.tensor([1.0, 0.0, 7.0], dtype=torch.float64).view(1, 1, 1, 3)
    mask = torch.tensor([[False, False, True]])
    precision = (covariance[0] + 0.05 * torch.eye(3)).inverse()
    data = torch.diag(torch.tensor([4.0, 4.0, 0.0], dtype=torch.float64))
    right = precision @ mean[0] + data @ z.flatten()
    least = torch.linalg.solve(precision + data, right).view(1, 1, 1, 3)
    return prior, NoisyInpainting(z, mask, 0.5), torch.zeros_like(z), least


def _least(prior, z, sigma):
    """The global minimiser of F(x, t_min) + (x − z)²/(2σ²) by a fine scan."""
    x = torch.linspace(-3, 3, 600_001, dtype=torch.float64)
    energy = prior.mixture.energy(x[:, None], math.exp(prior.t_hat_range[0]))
    return float(x[(energy + (x - z.flatten()[0]) ** 2 / (2 * sigma**2)).argmin()])


PROBLEMS = [free, denoising, noise_map, inpainting, gaussian]


@pytest.mark.parametrize("backtracking", [False, True], ids=["plain", "backtracking"])
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.__name__)
def test_every_solver_reaches_the_global_minimum(problem, solver, backtracking):
    """All start where F(·, t) is convex, so local minima of the sharp energy must not hold them."""
    prior, fidelity, x0, least = problem()
    before = x0.clone()
    result = solver(prior, fidelity, x0, max_iter=20_000, tolerance=1e-7, backtracking=backtracking)
    assert torch.equal(x0, before)
    assert (result.x - least).abs().max() < 1e-3
    torch.testing.assert_close(result.t_hat, torch.full_like(result.t_hat, prior.t_hat_range[0]))
    assert result.converged
    assert result.status == "converged"
    assert result.message == f"No image moved by more than 1e-07 in step {result.iterations}."


def test_without_graduation_local_minima_hold():
    """The same problem at t_min: only starts inside the basin of the global minimum reach it."""
    prior, fidelity, x0, least = free()
    x = solve_scheduled(prior, fidelity, x0, torch.full((4000,), -9.2)).x
    attained = (x - least).abs().flatten() < 0.05
    inside = (x0.flatten() > 0.1935) & (x0.flatten() < 0.8811)
    assert torch.equal(attained, inside)


def test_tweedie_is_the_posterior_mean():
    """E[x | z] of a mixture, component by component."""
    mixture = example_1d()
    z, t = STARTS[10:50], 0.09
    variance = mixture.variances.flatten()
    log = -0.5 * (z.flatten()[:, None] - mixture.means.flatten()) ** 2 / (variance + t)
    weight = (log - 0.5 * (variance + t).log() + mixture.weights.log()).softmax(1)
    each = (variance * z.flatten()[:, None] + t * mixture.means.flatten()) / (variance + t)
    expected = (weight * each).sum(1)
    prior = MixtureEnergy(mixture)
    torch.testing.assert_close(tweedie(prior, z, 0.3).flatten(), expected)
    each_sigma = torch.full((len(z),), 0.3, dtype=torch.float64)
    torch.testing.assert_close(tweedie(prior, z, each_sigma).flatten(), expected)


# ---------------------------------------------------------------- the loop


@pytest.fixture(scope="module")
def small():
    """A prior of an image, not convex, and a noisy image."""
    prior = Prior(Architecture(filters=6, first_size=3, t_knots=5)).start(gain=3.0).double()
    generator = torch.Generator().manual_seed(0)
    weight = prior.splines[0].weight
    with torch.no_grad():
        weight.mul_(1 + 0.1 * torch.randn(weight.shape, generator=generator))
    prior.requires_grad_(False)
    x = torch.rand(3, 1, 12, 9, generator=generator, dtype=torch.float64)
    return prior, x


def test_joint_is_algorithm_2(small):
    """Two steps written out as the paper prints them."""
    prior, z = small
    fidelity, t_hat, x = Denoising(z, 0.2), torch.tensor([-1.0, -2.0, 0.0]).double(), z.clone()
    result = solve_joint(prior, fidelity, z, t_hat, max_iter=2, eta=0.7)
    for _ in range(2):
        _, grad, dt = prior.joint_grad(x, t_hat)
        tau = 0.7 * t_hat.exp()
        x = fidelity.prox(x - tau.view(-1, 1, 1, 1) * grad, tau)
        t_hat = (t_hat - 0.7 / 108 * dt).clamp(*prior.t_hat_range)
    torch.testing.assert_close(result.x, x)
    torch.testing.assert_close(result.t_hat, t_hat)
    assert result.message == "All 2 steps were made."
    assert not result.converged


@pytest.mark.parametrize("per_image", [False, True])
def test_scheduled_steps_are_the_papers(small, per_image):
    prior, z = small
    fidelity, t_hats = Denoising(z, 0.2), linear(-1, -4, 4)
    etas = torch.tensor([0.3, 0.2, 0.1, 0.05])
    if per_image:
        t_hats = t_hats[:, None] - torch.tensor([0.0, 0.5, 1.0])
        etas = etas[:, None] * torch.tensor([1.0, 0.5, 0.25])
    for given in (None, etas):
        x = z.clone()
        for i in range(4):
            tau = t_hats[i].exp() if given is None else given[i]
            size = tau.view(-1, 1, 1, 1) if per_image else tau
            x = fidelity.prox(x - size * prior.grad(x, t_hats[i]), tau)
        result = solve_scheduled(prior, fidelity, z, t_hats, etas=given)
        torch.testing.assert_close(result.x, x)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_history_holds_energies_times_and_steps(small, solver):
    prior, z = small
    fidelity = Denoising(z, 0.2)
    seen = []
    result = solver(
        prior, fidelity, z, max_iter=6, history=True,
        callback=lambda s: seen.append((s.iteration, s.x.clone(), s.t_hat, s.step_size)),
    )  # fmt: skip
    history = result.history
    assert history.energy.shape == history.t_hat.shape == (7, 3)
    assert history.step_size.shape == (6, 3)
    assert [s[0] for s in seen] == [1, 2, 3, 4, 5, 6]
    states = [z, *[s[1] for s in seen]]
    for i, (x, t_hat) in enumerate(zip(states, history.t_hat, strict=True)):
        expected = prior.energy(x, t_hat) + fidelity.value(x)
        torch.testing.assert_close(history.energy[i], expected)
    assert torch.equal(result.energy, history.energy[-1])
    assert torch.equal(history.step_size[-1], seen[-1][3])
    assert torch.equal(result.x, seen[-1][1])
    plain = solver(prior, fidelity, z, max_iter=6)
    assert torch.equal(plain.x, result.x)
    assert plain.energy is None
    assert plain.history is None


@pytest.mark.parametrize("eta", [1.0, 30.0])
def test_backtracking_makes_energies_fall(small, eta):
    prior, z = small
    options = {"max_iter": 60, "eta": eta, "history": True}
    fidelity = Denoising(z, 0.2)
    energy = solve_joint(prior, fidelity, z, -1.0, backtracking=True, **options).history.energy
    assert (energy.diff(dim=0) <= 1e-6 * energy[:-1].abs()).all()
    assert (energy[-1] < energy[0] - 1).all()
    if eta > 1:  # the same without it
        plain = solve_joint(prior, fidelity, z, -1.0, **options).history.energy
        assert (plain.diff(dim=0) > 1e-3).any()
        assert (plain[-1] > energy[-1]).all()


def test_divergence_is_said():
    """A concave quadratic: every step doubles the distance, until t̂ or x is not a number any more."""

    class Concave(MixtureEnergy):
        def joint_grad(self, x, t_hat, *, buffers=None):
            energy = -x.square().flatten(1).sum(1) / 2
            return energy, -x, energy.square()

        def energy_and_grad(self, x, t_hat, *, buffers=None):
            return -x.square().flatten(1).sum(1) / 2, -x

        def grad(self, x, t_hat, *, buffers=None):
            return -x

    prior = Concave(example_1d(), t_min=1.0, t_max=1.5)
    scheduled = solve_scheduled(prior, Nothing(), STARTS, torch.zeros(2000), history=True)
    joined = solve_joint(prior, Nothing(), STARTS, 0.0, max_iter=2000, history=True)
    for result in (scheduled, joined):
        assert result.status == "diverged"
        steps = result.iterations
        assert (
            result.message == f"It diverged within {steps} steps: lower eta, or use backtracking."
        )


def test_callback_stops(small):
    prior, z = small
    result = solve_joint(
        prior, Denoising(z, 0.2), z, -1.0, max_iter=50, callback=lambda s: s.iteration == 3
    )
    assert (result.status, result.iterations, result.converged) == ("stopped", 3, False)
    assert result.message == "The callback ended it after 3 steps."


def test_images_of_a_batch_do_not_meet(small):
    """Each converges on its own: the batch returns what single images do."""
    prior, z = small
    t_hat = torch.tensor([-1.0, -6.0, -3.0])
    options = {"max_iter": 400, "tolerance": 1e-5, "backtracking": True}
    batch = solve_joint(prior, Denoising(z, 0.2), z, t_hat, **options)
    singles = [
        solve_joint(prior, Denoising(z[i : i + 1], 0.2), z[i : i + 1], t_hat[i], **options)
        for i in range(3)
    ]
    assert len({s.iterations for s in singles}) > 1
    assert batch.iterations == max(s.iterations for s in singles)
    torch.testing.assert_close(batch.x, torch.cat([s.x for s in singles]), rtol=0, atol=1e-6)


def test_inpainting_keeps_observed_pixels(small):
    prior, z = small
    mask = torch.rand(z.shape, generator=torch.Generator().manual_seed(3)) < 0.8
    fidelity = Inpainting(z, mask)
    x0 = z.masked_fill(mask, 0)
    result = solve_joint(prior, fidelity, x0, 0.0, max_iter=30, history=True)
    assert torch.equal(result.x[~mask], z[~mask])
    assert not torch.equal(result.x[mask], x0[mask])
    assert result.history.energy.isfinite().all()


def test_a_users_prox_may_return_its_own_memory(small):
    prior, z = small

    class Stubborn(Nothing):
        def prox(self, v, tau):
            return z

    before = z.clone()
    result = solve_scheduled(prior, Stubborn(), z, linear(-1, -4, 5))
    assert torch.equal(z, before)
    assert torch.equal(result.x, z)
    assert result.x.data_ptr() != z.data_ptr()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_memory_does_not_grow_with_steps(solver, layers):
    prior = Prior(Architecture(layers=layers, filters=8, first_size=5)).start()
    z = torch.rand(2, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    fidelity = Denoising(z, 0.1)
    process, resident = psutil.Process(), []

    def watch(state):
        if state.iteration in (100, 400):
            resident.append(process.memory_info().rss)

    result = solver(prior, fidelity, z, max_iter=400, tolerance=1e-30, callback=watch)
    assert not result.x.requires_grad  # although the parameters of the prior do
    assert resident[1] - resident[0] < 2 * z.numel() * 4 * 10  # ten images in 300 steps


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda p, f, x: solve_joint(p, f, x, 0.0, max_iter=0), "at least one step, not 0"),
        (lambda p, f, x: solve_joint(p, f, x, 0.0, max_iter=1, eta=0.0), "eta must be positive"),
        (
            lambda p, f, x: solve_joint(p, f, x, 0.0, max_iter=1, tolerance=-1),
            "must not be negative",
        ),
        (lambda p, f, x: solve_joint(p, f, x, torch.zeros(2), max_iter=1), "one per image: 3"),
        (lambda p, f, x: solve_joint(p, f, x, math.nan, max_iter=1), "t̂ must be a number"),
        (lambda p, f, x: solve_joint(p, f, x / 0, 0.0, max_iter=1), "all of them finite"),
        (lambda p, f, x: solve_joint(p, f, x[:0], 0.0, max_iter=1), "must have pixels"),
        (lambda p, f, x: solve_scheduled(p, f, x, torch.zeros(0)), "schedule must be shaped"),
        (
            lambda p, f, x: solve_scheduled(p, f, x, torch.zeros(3), etas=torch.ones(2)),
            "as many step sizes",
        ),
        (lambda p, f, x: tweedie(p, x, 0.0), "sigma must be positive and finite"),
        (lambda p, f, x: tweedie(p, x, math.nan), "sigma must be positive and finite"),
    ],
)
def test_bad_input(small, call, sentence):
    prior, z = small
    with pytest.raises(GncpriorError, match=sentence):
        call(prior, Denoising(z, 0.1), z)
