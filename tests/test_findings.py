"""What the paper finds about the three ways to choose t, on small pictures with the shipped R_1."""

import numpy as np
import pytest

from gncprior.checkpoints import load_prior
from gncprior.experiments import schedules
from gncprior.experiments.common import SIGMA, batches, learned_schedules, pictures
from gncprior.schedules import linear
from gncprior.solvers import solve_joint, solve_scheduled
from gncprior.unrolled import DENOISE, INPAINT

STEPS = 1000  # what is left between the two energies falls with it: 2.3 % of the way at 300, 0.8 % at 2400


@pytest.fixture(scope="module")
def prior():
    return load_prior("r1").requires_grad_(False)


@pytest.mark.parametrize(("task", "level"), [(DENOISE, SIGMA), (INPAINT, 0.5)])
def test_from_large_t_0_and_with_enough_steps_joint_and_predefined_reach_the_same_energy(
    prior, task, level
):
    low, high = prior.t_hat_range
    for batch in batches(pictures(quick=True), task, level):
        fidelity = batch.fidelity(level)
        x_0 = fidelity.start()

        def energy(x, fidelity=fidelity):
            return (prior.energy(x, low) + fidelity.value(x)) / x[0].numel()

        joint = solve_joint(prior, fidelity, x_0, high, max_iter=STEPS).x
        predefined = solve_scheduled(prior, fidelity, x_0, linear(high, low, STEPS)).x
        way = energy(x_0) - energy(predefined)
        assert (way > 0.5).all()  # nats per pixel
        assert ((energy(joint) - energy(predefined)).abs() < 0.02 * way).all()


@pytest.fixture(scope="module")
def traces(prior):
    """Energy at t_min and PSNR after every step, means over the pictures."""
    learned = learned_schedules("r1", prior, DENOISE, 10)
    found = {}
    for scheme in ("predefined", "joint", "learned"):
        parts = [
            schedules.trace(prior, batch, scheme, learned, steps=200)
            for batch in batches(pictures(quick=True), DENOISE, SIGMA)
        ]
        found[scheme] = {
            key: np.concatenate([part[key] for part in parts], axis=1).mean(1)
            for key in ("energy", "psnr")
        }
    return found


@pytest.mark.parametrize("scheme", ["predefined", "joint"])
def test_in_denoising_psnr_peaks_before_the_minimum_of_the_energy(traces, scheme):
    trace = traces[scheme]
    assert trace["psnr"].argmax() < trace["energy"].argmin() / 2
    assert trace["psnr"].max() > trace["psnr"][-1] + 0.5


@pytest.mark.parametrize("scheme", ["predefined", "joint"])
def test_the_learned_schedule_ends_at_higher_energy_and_higher_psnr(traces, scheme):
    assert traces["learned"]["energy"][-1] > traces[scheme]["energy"][-1] + 0.1
    assert traces["learned"]["psnr"][-1] > traces[scheme]["psnr"][-1] + 0.5
