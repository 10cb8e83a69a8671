import math

import numpy as np
import pytest
import torch

from gncprior import plots
from gncprior.checkpoints import load_prior
from gncprior.experiments import sampling
from gncprior.mixtures import GaussianMixture, example_1d
from gncprior.schedules import linear


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    files = sampling.run(tmp_path_factory.mktemp("sampling"), quick=True, priors=["r1"])
    return files, plots.load_data(files[0])


def test_files_and_shapes(quick):
    files, data = quick
    assert [file.name for file in files] == [f"sampling.{kind}" for kind in ["npz", "png", "pdf"]]
    assert data["r1.samples"].shape == (4, 24, 24)
    assert data["r1.t"][[0, -1]] == pytest.approx([1.0, 1e-4])
    np.testing.assert_allclose(data["r1.samples"].mean((1, 2)), 0.5, atol=1e-5)


def test_a_gaussian_has_the_law_that_the_steps_say():
    """s ← (1 − δ/v)² s + 2δ with v = 0.3 + t, from s = 1, in two dimensions."""
    gaussian = GaussianMixture(torch.ones(1), torch.zeros(1, 2), torch.tensor([0.3]))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20000, 2, dtype=torch.float64, generator=generator)
    t_hats = linear(0.0, math.log(1e-3), 6).tolist()
    variances = []
    x = sampling.langevin(
        lambda x, t_hat: gaussian.grad(x, math.exp(t_hat)),
        x,
        t_hats,
        repeats=3,
        rate=0.2,
        generator=generator,
        look=lambda _, x: variances.append(float(x.var())),
    )
    s, expected = 1.0, []
    for t_hat in t_hats:
        delta, v = 0.2 * math.exp(t_hat), 0.3 + math.exp(t_hat)
        for _ in range(3):
            s = (1 - delta / v) ** 2 * s + 2 * delta
        expected.append(s)
    # 40 000 numbers: a variance is known to 0.7 %
    np.testing.assert_allclose(variances, expected, rtol=0.03)


def test_samples_of_a_mixture_have_its_law():
    """The distribution function of the 1-D example, which has five parts, within 3 %."""
    mixture = example_1d()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 1, dtype=torch.float64, generator=generator)
    t_hats = linear(0.0, math.log(1e-3), 60).tolist()
    x = sampling.langevin(
        lambda x, t_hat: mixture.grad(x, math.exp(t_hat)),
        x,
        t_hats,
        repeats=15,
        generator=generator,
    )
    points = torch.linspace(-1.5, 1.5, 25, dtype=torch.float64)
    found = (x < points).double().mean(0)
    spread = (mixture.variances[:, 0] + 1e-3).sqrt()[:, None]
    parts = torch.special.ndtr((points - mixture.means) / spread)
    expected = (mixture.weights[:, None] * parts).sum(0)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=0.03)


def test_snapshots_come_from_the_first_sample(quick):
    """At t_max they differ by the noise, E|n − n'| = 2/√π = 1.13, and at t_min by far less."""
    data = quick[1]
    steps = np.abs(np.diff(data["r1.snapshots"], axis=-1)).mean((1, 2))
    assert steps[0] == pytest.approx(2 / math.sqrt(math.pi), rel=0.15)
    assert steps[-1] < 0.25 * steps[0]
    prior = load_prior("r1")
    again = sampling.sample(prior, 30, 10, 24)
    np.testing.assert_allclose(again["samples"], data["r1.samples"], atol=1e-4)
    # the last snapshot and the sample are one step of Tweedie's formula apart, at σ = 0.01
    assert np.abs(data["r1.snapshots"][-1] - data["r1.samples"][0]).max() < 0.1


def test_samples_stay_among_noisy_images():
    x = torch.tensor([-9.0, -1.4, 0.3, 2.6, 9.0])
    kept = sampling.among_images(x, math.log(0.25))
    np.testing.assert_allclose(kept.numpy(), [-1.5, -1.4, 0.3, 2.5, 2.5], atol=1e-6)
    far = sampling.langevin(
        lambda x, t_hat: -x / math.exp(t_hat),  # an energy that falls without end
        x[:, None],
        [math.log(0.25)],
        repeats=200,
        keep=sampling.among_images,
    )
    assert far.min() >= -1.5 and far.max() <= 2.5


def test_densities_integrate_to_one_and_know_a_ramp():
    width = np.diff(sampling.BINS)
    rng = np.random.default_rng(0)
    assert (sampling.difference_density([rng.random((9, 9))]) * width).sum() == pytest.approx(1)
    ramp = sampling.difference_density([np.tile(np.arange(10) * 0.05, (3, 1))])
    assert np.flatnonzero(ramp).tolist() == [np.searchsorted(sampling.BINS, 0.05) - 1]


def test_figure_depends_on_the_saved_data_only(quick, tmp_path):
    files, data = quick
    again = sampling.draw(data, tmp_path)
    assert [f.read_bytes() for f in files[1:]] == [f.read_bytes() for f in again]
