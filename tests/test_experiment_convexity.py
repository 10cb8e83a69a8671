"""The figure `convexity`, and what it shows of the shipped priors: convex at t_max, not at t_min."""

import numpy as np
import pytest

from gncprior import plots
from gncprior.checkpoints import load_prior, save_prior, shipped
from gncprior.experiments import convexity
from gncprior.experiments.common import pictures
from gncprior.prior import Architecture, Prior

SMALL = [image[:, :24, :24] for image in (pictures(quick=True).tensor(k)[0] for k in range(3))]


def test_quick_figure_of_a_prior_known_in_advance(tmp_path):
    """At the start of training R(x,t) = ½s(t)‖Kx‖², so t∇²R is t R(x,t) of any x times one operator."""
    start = Prior(Architecture(filters=8, first_size=3)).start(gain=2.0).requires_grad_(False)
    save_prior(tmp_path / "start.safetensors", start)
    files = convexity.run(tmp_path, quick=True, priors=[str(tmp_path / "start.safetensors")])
    assert [f.name for f in files] == [f"convexity.{kind}" for kind in ("npz", "png", "pdf")]
    data = plots.load_data(files[0])
    (label,) = data["priors"]
    t, smallest = np.exp(data[f"{label}.t_hat"]), data[f"{label}.smallest"]
    assert smallest.shape == (4, 3)
    assert (smallest > 0).all()
    energies = [float(start.energy(SMALL[0][None], t_hat)) for t_hat in np.log(t)]
    ratio = smallest / (t * energies)[:, None]
    np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-3)


@pytest.mark.parametrize("name", [name for name in shipped() if "denoise" not in name])
def test_shipped_priors_are_convex_at_t_max_and_clearly_not_at_t_min(name):
    prior = load_prior(name)
    channels = prior.architecture.channels
    images = [x.expand(channels, -1, -1) for x in SMALL]
    t_hats, smallest = convexity.measure(prior, images, 2)
    assert list(t_hats) == pytest.approx(prior.t_hat_range)
    assert (smallest[1] >= 0).all()
    assert (smallest[0] < -0.02).all()
