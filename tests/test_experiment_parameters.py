import numpy as np
import pytest
import torch

from gncprior import plots
from gncprior.checkpoints import load_prior, save_prior
from gncprior.errors import GncpriorError
from gncprior.experiments import parameters
from gncprior.experiments.common import batches, open_priors, pictures
from gncprior.prior import Architecture, Prior


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """R_1 as it is shipped, and an R_2 as training starts it: identities, then parabolas."""
    folder = tmp_path_factory.mktemp("parameters")
    start = Prior(Architecture(layers=2, filters=12)).start(gain=2.0)
    save_prior(folder / "start.safetensors", start)
    files = parameters.run(
        folder / "new", quick=True, priors=["r1", str(folder / "start.safetensors")]
    )
    return files, plots.load_data(files[0])


def test_files(quick):
    files, data = quick
    assert [file.name for file in files] == [f"parameters.{kind}" for kind in ["npz", "png", "pdf"]]
    assert sorted(files[0].parent.iterdir()) == sorted(files)
    assert list(data["priors"]) == ["r1", "start"]


def test_functions_at_the_start_of_training_are_identities_and_parabolas(quick):
    data = quick[1]
    identity = data["start.features.1"]
    np.testing.assert_allclose(data["start.values.1"], identity, rtol=2e-5, atol=1e-5)
    assert data["start.departure.1"].max() < 1e-6
    assert data["start.departure.2"].max() < 1e-6
    assert data["start.minima"].max() == 1


def test_features_of_noise_have_the_range_of_a_normal_law():
    # K_1 starts as orthonormal filters times 2; a constant picture leaves the noise alone
    start = Prior(Architecture(filters=12)).start(gain=2.0)
    facts = parameters.measure(start, torch.full((4, 1, 128, 128), 0.5))
    width = facts["features.1"][..., -1] - facts["features.1"][..., 0]
    expected = 2 * 2.3263 * 2.0 * np.exp(facts["t_hat"] / 2)
    np.testing.assert_allclose(width, np.tile(expected[:, None], 12), rtol=0.06)


def test_curves_are_the_functions_of_the_prior(quick):
    """Of an image of one bright pixel R_1 is the sum of φ over the weights of all filters."""
    from scipy.interpolate import CubicSpline

    data, prior = quick[1], load_prior("r1")
    np.testing.assert_array_equal(data["r1.filters.1"], prior.kernels()[0].numpy())
    x = torch.zeros(1, 1, 15, 15)
    for i in (0, 2, 4):  # where the points of a curve are denser than the knots
        t_hat = float(data["r1.t_hat"][i])
        energies = []
        for value in (0.0, 0.02):
            x[..., 7, 7] = value
            energies.append(float(prior.energy(x, t_hat)))
        change = 0.0
        for j, kernel in enumerate(data["r1.filters.1"]):
            phi = CubicSpline(data["r1.features.1"][i, j], data["r1.values.1"][i, j])
            change += (phi(0.02 * kernel) - phi(0.0)).sum()
        assert change == pytest.approx(energies[1] - energies[0], rel=5e-3)  # float32


def test_the_papers_observation_of_the_shipped_prior(quick):
    """Last potentials are closer to parabolas at t̂_max than at t̂_min, over a wider range."""
    data = quick[1]
    share = np.median(data["r1.departure.1"], axis=1)
    assert share[-1] < 0.2 * share[0]
    features = data["r1.features.1"]
    assert (np.diff(np.median(features[..., -1] - features[..., 0], axis=1)) > 0).all()


def test_departures_in_closed_form():
    x = np.linspace(-1, 1, 20001)
    # of |x| on [−1, 1] the best parabola leaves 1/16 of the variance, of x³ the best line 4/25
    assert parameters.departure(x, np.abs(x), 2) == pytest.approx(1 / 16, rel=1e-3)
    assert parameters.departure(x, x**3, 1) == pytest.approx(4 / 25, rel=1e-3)
    assert parameters.departure(3 * x, 2 + x - 5 * x**2, 2) < 1e-20
    assert parameters.departure(x, np.ones_like(x), 2) < 1e-20
    np.testing.assert_array_equal(
        parameters.count_minima(np.stack([np.cos(4 * np.pi * x), x**2, x])), [4, 1, 0]
    )


def test_figure_depends_on_the_saved_data_only(quick, tmp_path):
    files, data = quick
    again = parameters.draw(data, tmp_path)
    assert [f.read_bytes() for f in files[1:]] == [f.read_bytes() for f in again]


def test_observations_are_those_of_the_protocol_cropped():
    images = pictures(quick=True)
    (batch,) = batches(images, "denoise", 0.1, crop=20)
    assert batch.x.shape == (3, 1, 20, 20) and batch.mask is None
    noise = np.random.default_rng(2).standard_normal((48, 48))
    expected = images.images[2] / 255.0 + 0.1 * noise
    np.testing.assert_array_equal(batch.z[2].numpy(), expected[:, 14:34, 14:34].astype(np.float32))
    whole = list(batches(images, "inpaint", 0.8, size=2, stride=5))
    assert [b.index for b in whole] == [(0, 1), (2,)]
    unknown = np.random.default_rng(1010).random((48, 48)) < 0.8  # image 2 · 5 of the protocol
    np.testing.assert_array_equal(whole[1].mask[0, 0].numpy(), unknown)
    assert (whole[1].z[whole[1].mask] == 0).all()


def test_wrong_choices_are_one_sentence():
    with pytest.raises(GncpriorError, match="At least one image"):
        pictures(limit=0, quick=True)
    with pytest.raises(GncpriorError, match="no prior 'r9'"):
        open_priors(["r9"])
