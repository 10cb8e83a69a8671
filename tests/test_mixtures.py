import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from gncprior import mixtures
from gncprior.errors import GncpriorError
from gncprior.mixtures import GaussianMixture

T_MIN = 1e-4
X = torch.linspace(-3, 3, 6001, dtype=torch.float64).unsqueeze(-1)
STARTS = torch.linspace(-3, 3, 1000, dtype=torch.float64)
ENDS = STARTS[[0, -1]].unsqueeze(-1)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def example():
    return mixtures.example_1d()


@pytest.fixture(scope="module")
def basin(example):
    x_star, _ = mixtures.global_minimum_1d(example, T_MIN)
    return mixtures.basin_1d(example, x_star, T_MIN)


def random_covariance(rng, d):
    a = rng.standard_normal((d, d))
    return a @ a.T / d + 0.05 * np.eye(d)


def random_mixture(kind, d, seed=0, n=4):
    rng = np.random.default_rng(seed)
    w = torch.from_numpy(rng.dirichlet(np.ones(n)))
    means = torch.from_numpy(rng.standard_normal((n, d)))
    covariances = {
        "full": np.stack([random_covariance(rng, d) for _ in range(n)]),
        "isotropic": rng.uniform(0.1, 1, n),
        "diracs": np.zeros(n),
    }[kind]
    return GaussianMixture(w, means, torch.from_numpy(covariances))


def in_basin(x, basin):
    return ((x >= basin[0]) & (x < basin[1])).squeeze(-1)


every_kind = pytest.mark.parametrize("kind", ["full", "isotropic", "diracs"])
dims = pytest.mark.parametrize("d", [1, 2, 3])


# -- energy and derivatives


@every_kind
@dims
def test_energy_is_that_of_the_normal_density(kind, d):
    from scipy.stats import multivariate_normal

    p, t = random_mixture(kind, d), 0.3
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((20, d)))
    density = sum(
        float(w) * multivariate_normal(mean.numpy(), cov.numpy() + t * np.eye(d)).pdf(x.numpy())
        for w, mean, cov in zip(p.weights, p.means, p.covariances, strict=True)
    )
    np.testing.assert_allclose(p.energy(x, t).numpy(), -np.log(density), rtol=1e-10)


def central(f, z, h=1e-5):
    return (f(z + h) - f(z - h)) / (2 * h)


@every_kind
@dims
@pytest.mark.parametrize("t", [0.05, 0.7])
def test_derivatives_agree_with_finite_differences(kind, d, t):
    p = random_mixture(kind, d, seed=d)
    x = torch.from_numpy(np.random.default_rng(2).standard_normal((30, d)))
    directions = torch.eye(d, dtype=torch.float64)
    grad = [central(lambda s, e=e: p.energy(x + s * e, t), 0.0) for e in directions]
    hessian = [central(lambda s, e=e: p.grad(x + s * e, t), 0.0) for e in directions]
    close = {"rtol": 1e-6, "atol": 1e-6}
    assert_close(p.grad(x, t), torch.stack(grad, -1), **close)
    assert_close(p.hessian(x, t), torch.stack(hessian, -1), **close)
    assert_close(p.dt(x, t), central(lambda s: p.energy(x, s), t), **close)
    assert_close(p.dt2(x, t), central(lambda s: p.dt(x, s), t), **close)
    energy, gradient = p.energy_and_grad(x, t)
    assert torch.equal(energy, p.energy(x, t))
    assert torch.equal(gradient, p.grad(x, t))


@every_kind
@dims
def test_density_solves_the_heat_equation(kind, d):
    """∂p/∂t = ½ Δp, which reads ∂F/∂t = ½(ΔF − |∇F|²)."""
    p = random_mixture(kind, d, seed=3)
    x = 2 * torch.from_numpy(np.random.default_rng(3).standard_normal((40, d)))
    laplacian = p.hessian(x, 0.2).diagonal(dim1=-2, dim2=-1).sum(-1)
    assert_close(p.dt(x, 0.2), (laplacian - p.grad(x, 0.2).square().sum(-1)) / 2)


@every_kind
@dims
def test_batch_equals_singles(kind, d):
    p = random_mixture(kind, d)
    x = torch.from_numpy(np.random.default_rng(4).standard_normal((3, 5, d)))
    t = torch.linspace(0.1, 1, 3, dtype=torch.float64).unsqueeze(-1)
    shapes = {"energy": (), "grad": (d,), "hessian": (d, d), "dt": (), "dt2": ()}
    for name, shape in shapes.items():
        f = getattr(p, name)
        batch = f(x, t)
        assert batch.shape == (3, 5, *shape)
        for i, j in itertools.product(range(3), range(5)):
            assert_close(batch[i, j], f(x[i, j], float(t[i])), rtol=1e-12, atol=1e-12)
        # One point, many t.
        assert_close(f(x[0, 0], t.squeeze(-1))[2], f(x[0, 0], float(t[2])))


@every_kind
@dims
def test_float32_agrees_with_float64(kind, d):
    p = random_mixture(kind, d)
    x = torch.from_numpy(np.random.default_rng(5).uniform(-2, 2, (50, d)))
    for name in ["energy", "grad", "hessian", "dt", "dt2"]:
        single = getattr(p, name)(x.float(), 0.5)
        assert single.dtype == torch.float32
        assert_close(single.double(), getattr(p, name)(x, 0.5), rtol=1e-5, atol=1e-5)
    ends = mixtures.gnc_flow(p, x.float(), 0.5, 10)
    assert ends.dtype == torch.float32
    assert_close(ends.double(), mixtures.gnc_flow(p, x, 0.5, 10), rtol=1e-3, atol=1e-3)


# -- stability


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("t", [1e-12, 1e-4, 1.0])
@pytest.mark.parametrize("distance", [0.0, 1e-3, 1.0, 1e3, 1e6])
def test_one_component_rules_far_away_and_at_tiny_t(dtype, t, distance):
    """Far from the other Diracs F is the parabola of the nearest one."""
    p = mixtures.empirical(torch.tensor([[0.0, 0.0], [-64.0, 0.0], [0.0, -64.0]], dtype=dtype))
    # Seen from (s, 0) the third point is farther than the first by 64² in the square, at every s:
    # one part in 10⁸ of the squares themselves at the largest s.
    x = torch.tensor([distance, 0.0], dtype=dtype)
    d = 2
    energy = math.log(3) + d / 2 * math.log(2 * math.pi * t) + distance**2 / (2 * t)
    tolerance = {"rtol": 1e-5 if dtype == torch.float32 else 1e-12, "atol": 0.0}
    assert_close(p.energy(x, t), x.new_tensor(energy), **tolerance)
    assert_close(p.grad(x, t), x / t, **tolerance)
    assert_close(p.hessian(x, t), torch.eye(d, dtype=dtype) / t, **tolerance)
    slope = d / (2 * t) - distance**2 / (2 * t**2)
    assert_close(p.dt(x, t), x.new_tensor(slope), **tolerance)
    curvature = -d / (2 * t**2) + distance**2 / t**3
    assert_close(p.dt2(x, t), x.new_tensor(curvature), **tolerance)  # may be +∞ in float32


@pytest.mark.parametrize("t", [1e-12, 1e-6, 1e-2, 1.0])
@pytest.mark.parametrize("a", [0.5, 1.0, 8.0])
def test_between_two_diracs(t, a):
    """At the midpoint, where the components tie, everything is known in closed form."""
    p = mixtures.empirical(torch.tensor([[-a], [a]], dtype=torch.float64))
    x = torch.zeros(1, dtype=torch.float64)
    expected = {
        "energy": math.log(2 * math.pi * t) / 2 + a**2 / (2 * t),
        "grad": 0.0,
        "hessian": 1 / t - a**2 / t**2,
        "dt": 1 / (2 * t) - a**2 / (2 * t**2),
        "dt2": -1 / (2 * t**2) + a**2 / t**3,
    }
    for name, value in expected.items():
        rounding = 1e-15 * a**2 / t**2 if name == "hessian" else 0  # its two terms may cancel
        assert float(getattr(p, name)(x, t)) == pytest.approx(value, rel=1e-12, abs=rounding)


def test_zero_weight_is_no_component():
    two = torch.tensor([[0.0], [5.0]], dtype=torch.float64)
    variance = torch.tensor([1.0, 2.0], dtype=torch.float64)
    padded = GaussianMixture(torch.tensor([1.0, 0.0]), two, variance)
    alone = GaussianMixture(torch.tensor([1.0]), two[:1], variance[:1])
    for name in ["energy", "grad", "hessian", "dt", "dt2"]:
        assert_close(getattr(padded, name)(X, 0.1), getattr(alone, name)(X, 0.1))


# -- construction and sampling


def test_covariances_come_back():
    rng = np.random.default_rng(6)
    covariances = torch.from_numpy(np.stack([random_covariance(rng, 3) for _ in range(2)]))
    p = GaussianMixture(torch.tensor([0.5, 0.5]), torch.zeros(2, 3).double(), covariances)
    assert_close(p.covariances, covariances)
    axis = GaussianMixture(p.weights, p.means, torch.diag_embed(p.variances))
    assert axis.basis is None
    assert_close(axis.covariances, torch.diag_embed(p.variances))


def test_singular_covariance_is_allowed_with_smoothing():
    line = torch.tensor([[[1.0, 1.0], [1.0, 1.0]]], dtype=torch.float64)
    p = GaussianMixture(torch.tensor([1.0]), torch.zeros(1, 2).double(), line)
    x = torch.tensor([1.0, -1.0], dtype=torch.float64)  # across the line: variance t only
    assert_close(p.grad(x, 0.01), x / 0.01)


ONE, TWO = torch.tensor([1.0]), torch.tensor([0.5, 0.5])
POINTS = torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("weights", "means", "covariances", "message"),
    [
        (TWO, torch.zeros(2), torch.ones(2), "means must be"),
        (TWO, torch.zeros(2, 2, dtype=torch.long), torch.ones(2), "means must be"),
        (ONE, POINTS, torch.ones(2), "weights must have shape"),
        (TWO + 0.1, POINTS, torch.ones(2), "sum to one"),
        (torch.tensor([1.5, -0.5]), POINTS, torch.ones(2), "non-negative"),
        (torch.tensor([math.nan, 0.5]), POINTS, torch.ones(2), "non-negative"),
        (TWO, POINTS, torch.ones(2, 2), "covariances must have shape"),
        (TWO, POINTS + math.inf, torch.ones(2), "finite"),
        (TWO, POINTS, torch.tensor([math.nan, 1]), "finite"),
        (TWO, POINTS, torch.tensor([-1.0, 1]), "positive semi-definite"),
        (TWO, POINTS, torch.tensor([[1.0, 2], [2, 1]]).expand(2, 2, 2), "positive semi-definite"),
        (TWO, POINTS, torch.tensor([[1.0, 0.5], [0, 1]]).expand(2, 2, 2), "symmetric"),
    ],
)
def test_what_is_no_mixture_is_refused(weights, means, covariances, message):
    with pytest.raises(GncpriorError, match=message):
        GaussianMixture(weights, means, covariances)


def test_bad_arguments_are_refused(example):
    x = torch.zeros(3, 1, dtype=torch.float64)
    diracs = mixtures.empirical(x)
    plane = mixtures.empirical(torch.zeros(1, 2))
    with pytest.raises(GncpriorError, match=r"shape \(\.\.\., 1\)"):
        example.energy(torch.zeros(3, 2, dtype=torch.float64), 0.1)
    with pytest.raises(GncpriorError, match=r"floating-point, not torch\.int64"):
        example.energy(x.long(), 0.1)
    for t in [-0.1, math.nan, torch.tensor([0.1, -0.1, 0.1])]:
        with pytest.raises(GncpriorError, match="t must not be negative"):
            example.energy(x, t)
    with pytest.raises(GncpriorError, match="needs t > 0"):
        diracs.energy(x, 0.0)
    with pytest.raises(GncpriorError, match="t must not be negative"):
        example.sample(3, -1.0)
    with pytest.raises(GncpriorError, match="dimension 1"):
        mixtures.minima_1d(plane, 0.1)
    for points in [torch.zeros(0, 1), torch.zeros(3)]:
        with pytest.raises(GncpriorError, match="n ≥ 1"):
            mixtures.empirical(points)
    for steps in [-1, 1.5]:
        with pytest.raises(GncpriorError, match="whole number"):
            mixtures.gnc_flow(example, x, 1.0, steps)
    with pytest.raises(GncpriorError, match="x_0 must have shape"):
        mixtures.gnc_flow(example, x[0], 1.0, 2)


@every_kind
@pytest.mark.parametrize("t", [0.0, 0.5])
def test_samples_have_the_moments_of_the_mixture(kind, t):
    p, count = random_mixture(kind, 2), 200_000
    y = p.sample(count, t, generator=torch.Generator().manual_seed(0))
    assert torch.equal(y, p.sample(count, t, generator=torch.Generator().manual_seed(0)))
    w = p.weights.unsqueeze(-1)
    mean = (w * p.means).sum(0)
    centred = p.means - mean
    inner = (w.unsqueeze(-1) * p.covariances).sum(0)
    covariance = inner + (w * centred).T @ centred + t * torch.eye(2, dtype=torch.float64)
    # Five standard errors of a mean; those of a covariance are a few times larger.
    assert_close(y.mean(0), mean, rtol=0, atol=5 * float(covariance.max() / count) ** 0.5)
    assert_close(y.T.cov(), covariance, rtol=0, atol=20 * float(covariance.max()) / count**0.5)


def test_samples_have_the_score_of_the_mixture():
    """E[∇F(y)] = 0 and E[⟨y, ∇F(y)⟩] = d for y ~ exp(−F), with a smoothing of its own per sample."""
    p, count = random_mixture("full", 3), 200_000
    t = torch.linspace(0.1, 1, count, dtype=torch.float64)
    y = p.sample(count, t, generator=torch.Generator().manual_seed(1))
    g = p.grad(y, t)
    for values, expected in [(g, torch.zeros(3)), ((y * g).sum(-1), torch.tensor(3.0))]:
        error = 5 * float(values.std(0).max()) / count**0.5
        assert_close(values.mean(0), expected.double(), rtol=0, atol=error)


# -- convexity


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-3, 1e3))
def test_two_diracs_are_convex_from_a_squared_on(a):
    p = mixtures.empirical(torch.tensor([[-a], [a]], dtype=torch.float64))
    x = a * torch.linspace(-3, 3, 601, dtype=torch.float64).unsqueeze(-1)
    assert mixtures.smallest_curvature(p, x, a**2 * (1 + 1e-9)) >= 0
    assert mixtures.smallest_curvature(p, x, a**2 * (1 - 1e-9)) < 0
    assert mixtures.convexity_threshold(p, x) == pytest.approx(a**2, rel=1e-8)
    assert mixtures.unimodality_threshold_1d(p) == pytest.approx(a**2, rel=1e-3)
    assert mixtures.sharp_bound(p) == pytest.approx(a**2, rel=1e-12)
    assert mixtures.paper_bound(p) == pytest.approx(4 * a**2, rel=1e-12)


def test_sharp_bound_on_random_mixtures():
    """Convex at the bound, everywhere; and at 0.9 of it most mixtures of the harder half are not."""
    rng = np.random.default_rng(7)
    violated = 0
    for k in range(2000):
        d, n = 1 + k % 3, int(rng.integers(2, 6))
        covariance = random_covariance(rng, d) * rng.uniform(0, 1)
        means = rng.standard_normal((n, d)) * rng.uniform(0.5, 4)
        weights = rng.dirichlet(np.ones(n))
        hard = k % 2 == 0
        if hard:  # two heavy components along the direction of least variance, the rest between
            weakest = np.linalg.eigh(covariance)[1][:, 0]
            means *= 0.02
            means[:2] = np.outer([-2, 2], weakest)
            weights = np.r_[0.495, 0.495, np.full(n - 2, 0.01 / max(1, n - 2))]
            weights /= weights.sum()
        p = GaussianMixture(
            torch.from_numpy(weights),
            torch.from_numpy(means),
            torch.from_numpy(covariance).expand(n, d, d),
        )
        level = p.diameter() ** 2 / 4
        bound = mixtures.sharp_bound(p)
        assert bound == pytest.approx(max(0, level - float(p.variances.min())), rel=1e-12)
        # Between pairs of means, where the curvature is least, and anywhere around.
        pairs = (p.means[:, None] + p.means[None]).reshape(-1, d) / 2
        around = torch.from_numpy(means.mean(0) + 3 * means.std() * rng.standard_normal((40, d)))
        x = torch.cat([pairs, around])
        assert float(mixtures.smallest_curvature(p, x, bound)) >= -1e-9 / level
        if hard and bound > 0.2 * level:
            violated += float(mixtures.smallest_curvature(p, x, 0.9 * bound)) < 0
    assert violated > 500


def test_no_bound_in_the_diameter_for_unequal_covariances():
    p = GaussianMixture(TWO, torch.zeros(2, 1).double(), torch.tensor([1.0, 100.0]))
    assert p.diameter() == 0
    assert float(mixtures.smallest_curvature(p, 2 * X, 0.1)) < 0
    with pytest.raises(GncpriorError, match="equal covariances only"):
        mixtures.sharp_bound(p)


@dims
def test_paper_bound_holds_on_a_set_that_holds_the_means(d):
    for seed in range(20):
        p = random_mixture("full", d, seed)
        rng = np.random.default_rng(seed)
        inside = torch.from_numpy(rng.dirichlet(np.ones(4), 200)) @ p.means
        t = mixtures.paper_bound(p)
        assert t == pytest.approx(float(torch.pdist(p.means).max()) ** 2)
        assert float(mixtures.smallest_curvature(p, inside, t)) >= 0
        assert mixtures.convexity_threshold(p, inside) <= t
    assert mixtures.paper_bound(p, diameter=10) == 100
    with pytest.raises(GncpriorError, match="apart"):
        mixtures.paper_bound(p, diameter=0.9 * t**0.5)


def test_one_gaussian_is_always_convex():
    p = GaussianMixture(ONE, torch.zeros(1, 1).double(), torch.ones(1))
    assert mixtures.convexity_threshold(p, X) == 0
    assert mixtures.unimodality_threshold_1d(p) == 0
    assert mixtures.sharp_bound(p) == 0
    assert mixtures.minima_1d(p, 0.5).tolist() == pytest.approx([0], abs=1e-12)


# -- minima in one dimension


def test_every_dirac_is_a_minimum_at_tiny_t():
    points = torch.tensor([-1.0, -0.3, 0.1, 0.9], dtype=torch.float64)
    p = mixtures.empirical(points.unsqueeze(-1))
    assert mixtures.count_minima_1d(p, 1e-12) == 4
    assert_close(mixtures.minima_1d(p, 1e-12), points, rtol=0, atol=1e-12)
    assert_close(mixtures.maxima_1d(p, 1e-12), (points[1:] + points[:-1]) / 2, rtol=0, atol=1e-9)
    assert mixtures.basin_1d(p, -2.0, 1e-12) == (-math.inf, pytest.approx(-0.65))
    assert mixtures.basin_1d(p, 0.0, 1e-12) == pytest.approx((-0.1, 0.5))


# -- the example of the paper


def test_example_global_minimum_and_basin(example, basin):
    x_star, energy = mixtures.global_minimum_1d(example, T_MIN)
    assert x_star == pytest.approx(0.499445, abs=1e-5)
    assert energy == pytest.approx(-0.884574, abs=1e-5)
    assert basin == pytest.approx((0.1935, 0.8811), abs=1e-4)


@pytest.mark.parametrize(
    ("t", "count"), [(1e-12, 5), (1e-4, 5), (1e-3, 5), (0.0707, 2), (0.0708, 1), (0.1, 1), (1, 1)]
)
def test_example_number_of_minima(example, t, count):
    assert mixtures.count_minima_1d(example, t) == count
    x = mixtures.minima_1d(example, t).unsqueeze(-1)
    assert len(x) == count
    assert float(example.grad(x, t).abs().max()) < 1e-10
    assert float(example.hessian(x, t).min()) > 0
    assert len(mixtures.maxima_1d(example, t)) == count - 1


def test_example_thresholds(example):
    assert mixtures.convexity_threshold(example, X) == pytest.approx(0.19628, abs=1e-4)
    assert mixtures.unimodality_threshold_1d(example) == pytest.approx(0.07075, abs=1e-4)


def test_example_smallest_second_derivative(example):
    t = torch.tensor([1e-4, 0.01, 0.05, 0.1, 0.2, 0.5], dtype=torch.float64)
    expected = torch.tensor([-186.6, -76, -15, -4.7, 0.058, 0.897], dtype=torch.float64)
    assert_close(mixtures.smallest_curvature(example, X, t), expected, rtol=0.02, atol=0)


# -- Algorithm 1


def test_flow_is_algorithm_1(example):
    t_0, steps, eta = 0.5, 7, 0.8
    x = ENDS.clone()
    for i in range(steps):
        t_i = t_0 ** (1 - i / steps) * T_MIN ** (i / steps)
        x = x - eta * t_i * example.grad(x, t_i)
    assert_close(mixtures.gnc_flow(example, ENDS, t_0, steps, eta=eta), x, rtol=1e-12, atol=1e-12)
    assert torch.equal(mixtures.gnc_flow(example, ENDS, t_0, 0), ENDS)


def test_flow_on_one_gaussian_is_a_product():
    p = GaussianMixture(ONE, torch.zeros(1, 2).double(), torch.tensor([0.3]))
    x_0 = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    t = 10.0 ** torch.tensor([0.0, -1.0, -2.0, -3.0], dtype=torch.float64)
    expected = x_0 * (0.3 / (0.3 + t)).prod()
    assert_close(mixtures.gnc_flow(p, x_0, 1.0, 4, t_min=1e-4), expected)


@dims
def test_flow_over_a_grid_equals_single_flows(d, monkeypatch):
    p = random_mixture("full", d)
    x_0 = torch.from_numpy(np.random.default_rng(8).standard_normal((6, d)))
    t_0 = torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)
    steps = torch.tensor([5, 0, 12, 1])
    kept = x_0.clone()
    grid = mixtures.gnc_flow(p, x_0, t_0.unsqueeze(-1), steps)
    assert torch.equal(x_0, kept)
    assert grid.shape == (3, 4, 6, d)
    for i, j in itertools.product(range(3), range(4)):
        single = mixtures.gnc_flow(p, x_0, float(t_0[i]), int(steps[j]))
        assert_close(grid[i, j], single, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(mixtures, "_CHUNK", 1)
    assert_close(mixtures.gnc_flow(p, x_0, t_0.unsqueeze(-1), steps), grid)
    # Starts of their own for each run.
    many = torch.stack([x_0, x_0 + 1, x_0 - 1])
    own = mixtures.gnc_flow(p, many, t_0, 5)
    assert_close(own[1], mixtures.gnc_flow(p, x_0 + 1, 0.3, 5))


ROW = {1: 10, 0.7: 14, 0.5: 20, 0.4: 25, 0.3: 36, 0.2: 63, 0.15: 106, 0.1: 335, 0.08: 1445}


@pytest.mark.parametrize(("t_0", "fewest"), ROW.items())
def test_fewest_steps_for_all_starts(example, basin, t_0, fewest):
    steps = torch.tensor([fewest - 1, fewest])
    ends = mixtures.gnc_flow(example, STARTS.unsqueeze(-1), t_0, steps)
    attained = in_basin(ends, basin)
    assert not attained[0].all()
    assert attained[1].all()
    # The flow keeps the order of its starts, so the two outermost ones speak for all: no smaller
    # number of steps does.
    outermost = mixtures.gnc_flow(example, ENDS, t_0, torch.arange(fewest))
    assert not in_basin(outermost, basin).all(-1).any()


@pytest.mark.parametrize("t_0", [0.0708, 0.07, 0.06, 0.05, 0.04])
def test_from_two_minima_on_half_of_the_starts_are_lost(example, basin, t_0):
    steps = torch.arange(0, 2001, 20)
    outermost = mixtures.gnc_flow(example, ENDS, t_0, steps)
    assert not in_basin(outermost, basin).all(-1).any()
    rate = mixtures.attainment_rate_1d(
        example, STARTS, t_0, torch.tensor([200, 500, 1000, 2000]), basin
    )
    assert_close(rate, torch.full((4,), 0.53, dtype=torch.float64), rtol=0, atol=0.02)


@pytest.mark.parametrize("n", [1, 2, 17, 200])
def test_attainment_rate_counts_what_the_flow_attains(example, basin, n):
    starts = torch.linspace(-3, 3, n, dtype=torch.float64)
    t_0 = torch.tensor([[1e-3], [0.05], [0.1], [0.4], [1]], dtype=torch.float64)
    steps = torch.tensor([1, 3, 10, 40])
    counted = in_basin(mixtures.gnc_flow(example, starts.unsqueeze(-1), t_0, steps), basin)
    rate = mixtures.attainment_rate_1d(example, starts, t_0, steps, basin)
    assert torch.equal(rate, counted.double().mean(-1))
    nowhere = mixtures.attainment_rate_1d(example, starts, t_0, steps, (7.0, 8.0))
    assert not nowhere.any()
    everywhere = mixtures.attainment_rate_1d(example, starts, t_0, steps, (-8.0, 8.0))
    assert bool((everywhere == 1).all())


def test_flow_keeps_the_order_of_its_starts(example):
    ends = mixtures.gnc_flow(example, STARTS.unsqueeze(-1), 0.3, torch.arange(1, 30)).squeeze(-1)
    assert float(ends.diff(dim=-1).min()) >= 0
