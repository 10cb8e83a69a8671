import numpy as np
import pytest
import torch

from gncprior import plots
from gncprior.checkpoints import load_prior
from gncprior.evaluation import restoration
from gncprior.experiments import attainment
from gncprior.experiments.common import batches, pictures


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    files = attainment.run(
        tmp_path_factory.mktemp("attainment"), quick=True, priors=["r1"], crop=24
    )
    return files, plots.load_data(files[0])


def test_files_and_shapes(quick):
    files, data = quick
    assert [f.name for f in files] == [f"attainment-r1.{kind}" for kind in ["npz", "png", "pdf"]]
    np.testing.assert_allclose(data["t_0"], [1e-4, 1e-2, 1])
    np.testing.assert_array_equal(data["steps"], [1, 3, 9])
    for task in ("denoise", "inpaint"):
        assert data[f"{task}.energy"].shape == data[f"{task}.psnr"].shape == (2, 3, 3, 3)


@pytest.mark.parametrize(("task", "level"), [("denoise", 0.1), ("inpaint", 0.8)])
def test_cells_are_the_results_of_the_methods(quick, task, level):
    """Every cell is what `gncprior evaluate --t0 … --steps …` makes of the image."""
    data, prior = quick[1], load_prior("r1")
    (batch,) = batches(pictures(quick=True), task, level, crop=24)
    for scheme, method in enumerate(["scheduled", "joint"]):
        for row, column in [(1, 1), (2, 2)]:
            t0, steps = float(data["t_0"][row]), int(data["steps"][column])
            solve = restoration(prior, task, level, method, t0=t0, steps=steps)
            x = solve(batch.z, batch.mask)
            error = (x - batch.x).double().square().mean(dim=(1, 2, 3)).numpy()
            found = data[f"{task}.psnr"][scheme, row, column]
            np.testing.assert_allclose(found, -10 * np.log10(error), atol=1e-3)
            energy = prior.energy(x, prior.t_hat_range[0])
            if task == "denoise":
                energy = energy + (x - batch.z).double().square().sum(dim=(1, 2, 3)) / 0.02
            found = data[f"{task}.energy"][scheme, row, column]
            np.testing.assert_allclose(found, energy.numpy() / 24**2, rtol=1e-5)


def test_one_step_is_the_same_for_both_schemes(quick):
    for task in ("denoise", "inpaint"):
        energy = quick[1][f"{task}.energy"][:, :, 0]
        np.testing.assert_allclose(energy[0], energy[1], rtol=1e-6)


def test_more_steps_lower_the_energy_where_the_start_is_smooth(quick):
    energy = quick[1]["denoise.energy"][:, 1]  # t_0 = σ²
    assert (np.diff(energy, axis=1) < 0).all()
    assert (energy[:, -1] < quick[1]["denoise.first"]).all()


def test_rates_by_hand():
    energy = np.array([[[[0.0, 5.0]], [[0.09, 4.0]]], [[[0.11, np.nan]], [[9.0, 4.05]]]])
    # image 1 falls from 10 to 0, image 2 from 9 to 4: within 1 % are 0.1 and 4.05
    rate = attainment.rate(energy, np.array([10.0, 9.0]), 0.01)
    np.testing.assert_array_equal(rate, [[[0.5], [1.0]], [[0.0], [0.5]]])
    # an energy is known up to a constant
    np.testing.assert_array_equal(attainment.rate(energy - 7, np.array([3.0, 2.0]), 0.01), rate)


def test_cells_of_the_map_meet_half_way_in_decades():
    np.testing.assert_allclose(attainment._edges(np.array([1.0, 4.0, 16.0])), [0.5, 2, 8, 32])


def test_every_image_is_attained_by_some_cell(quick):
    for task in ("denoise", "inpaint"):
        data = quick[1]
        assert attainment.rate(data[f"{task}.energy"], data[f"{task}.first"], 0).sum() >= 1 / 3


def test_results_do_not_depend_on_the_batch():
    prior = load_prior("r1")
    alone = attainment.measure(prior, pictures(quick=True, limit=1), 2, (1, 2), crop=16)
    together = attainment.measure(prior, pictures(quick=True), 2, (1, 2), crop=16)
    for key in ("denoise.energy", "inpaint.psnr"):
        np.testing.assert_allclose(alone[key][..., 0], together[key][..., 0], rtol=1e-5)


def test_figure_depends_on_the_saved_data_only(quick, tmp_path):
    files, data = quick
    again = attainment.draw(data, tmp_path)
    assert [f.read_bytes() for f in files[1:]] == [f.read_bytes() for f in again]
    assert torch.is_grad_enabled()
