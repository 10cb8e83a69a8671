import math

import numpy as np
import pytest
import torch

from gncprior import plots
from gncprior.checkpoints import load_prior
from gncprior.evaluation import restoration
from gncprior.experiments import schedules
from gncprior.experiments.common import batches, learned_schedules, pictures
from gncprior.unrolled import Schedules


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    files = schedules.run(tmp_path_factory.mktemp("schedules"), quick=True, priors=["r1"], crop=32)
    return files, plots.load_data(files[0])


def test_files_and_shapes(quick):
    files, data = quick
    assert [file.name for file in files] == [f"schedules.{kind}" for kind in ["npz", "png", "pdf"]]
    assert data["r1.predefined.psnr"].shape == data["r1.joint.energy"].shape == (31, 3)


def test_the_curves_end_where_the_methods_do(quick):
    """The last point is the result of `gncprior evaluate` with the same method."""
    data, prior = quick[1], load_prior("r1")
    (batch,) = batches(pictures(quick=True), "denoise", 0.1, crop=32)
    low = prior.t_hat_range[0]
    for method, scheme in [("scheduled", "predefined"), ("joint", "joint")]:
        x = restoration(prior, "denoise", 0.1, method, steps=30)(batch.z, None)
        error = (x - batch.x).double().square().mean(dim=(1, 2, 3))
        np.testing.assert_allclose(
            data[f"r1.{scheme}.psnr"][-1], -10 * np.log10(error.numpy()), atol=1e-3
        )
        fit = ((x - batch.z) ** 2).double().sum(dim=(1, 2, 3)) / (2 * 0.1**2)
        energy = (prior.energy(x, low) + fit) / 32**2
        np.testing.assert_allclose(data[f"r1.{scheme}.energy"][-1], energy.numpy(), rtol=1e-5)


def test_all_schemes_start_from_the_noisy_images(quick):
    data = quick[1]
    schemes = [s for s in schedules.SCHEMES if f"r1.{s}.psnr" in data]
    for scheme in schemes:
        np.testing.assert_array_equal(data[f"r1.{scheme}.psnr"][0], data["r1.joint.psnr"][0])
        np.testing.assert_allclose(data[f"r1.{scheme}.psnr"][0], 20, atol=0.5)  # σ = 0.1
    t_hat = data["r1.predefined.t_hat"]
    expected = np.linspace(math.log(0.01), math.log(1e-4), 30)
    np.testing.assert_allclose(t_hat[1:, 0], expected, atol=1e-5)


def test_the_papers_findings(quick):
    """Joint and predefined come to the same energy, and PSNR is highest before the energy is lowest."""
    data = quick[1]
    joint, predefined = data["r1.joint.energy"], data["r1.predefined.energy"]
    descent = predefined[0] - predefined[-1]
    assert (np.abs(joint[-1] - predefined[-1]) < 0.02 * descent).all()
    mean = data["r1.predefined.psnr"].mean(1)
    assert mean.argmax() < 30 and predefined.mean(1).argmin() == 30


def test_learned_steps_are_taken_as_they_are_given():
    prior = load_prior("r1")
    t_hats, etas = torch.tensor([[-4.0, -6.0]]), torch.tensor([[0.004, 0.002]])
    learned = Schedules("denoise", torch.tensor([0.1]), t_hats, etas)
    facts = schedules.measure(prior, pictures(quick=True, limit=1), learned, crop=24, steps=2)
    (batch,) = batches(pictures(quick=True, limit=1), "denoise", 0.1, crop=24)
    x = batch.z
    for i in range(2):
        tau, eta = float(t_hats[0, i]), float(etas[0, i])
        v = x - eta * prior.grad(x, tau)
        x = (v + eta * batch.z / 0.01) / (1 + eta / 0.01)
        error = float((x - batch.x).square().mean())
        assert facts["learned.psnr"][i + 1, 0] == pytest.approx(-10 * math.log10(error), abs=1e-3)
    np.testing.assert_allclose(facts["learned.t_hat"][1:, 0], t_hats[0])


def test_schedules_that_are_missing(tmp_path):
    prior = load_prior("r1")
    assert learned_schedules(str(tmp_path / "own.safetensors"), prior, "denoise", 30) is None
    facts = schedules.measure(prior, pictures(quick=True, limit=1), None, crop=16, steps=1)
    assert {key.partition(".")[0] for key in facts} == {"predefined", "joint"}


def test_figure_depends_on_the_saved_data_only(quick, tmp_path):
    files, data = quick
    again = schedules.draw(data, tmp_path)
    assert [f.read_bytes() for f in files[1:]] == [f.read_bytes() for f in again]
