"""A look at a prior: the curves are those of the potentials, and the picture shows all of them."""

import numpy as np
import pytest
import torch
from PIL import Image

from gncprior import cli
from gncprior.checkpoints import save_prior
from gncprior.inspection import CURVES, POINTS, dead_leaves, describe, potential_curves
from gncprior.prior import Architecture, Prior


@pytest.fixture
def prior() -> Prior:
    shape = Architecture(layers=2, filters=6, first_size=5, x_knots=15, t_knots=5, t_min=1e-3)
    return Prior(shape, {"scores": {"val": {"psnr_15": 30.5, "psnr_5": 35.25}}}).start(gain=2.0)


def test_curves_of_the_start_are_lines_and_parabolas(prior):
    t_hats, (first, last) = potential_curves(prior)
    assert torch.allclose(t_hats[[0, -1]], torch.tensor([0.0, np.log(1e-3)], dtype=torch.float32))
    for features, values in (first, last):
        assert features.shape == values.shape == (CURVES, 6, POINTS)
        assert bool((features.diff(dim=-1) > 0).all())
    torch.testing.assert_close(first[1], first[0], rtol=1e-4, atol=1e-4)
    inside = last[0].abs() < 3.5
    ratio = last[1] / last[0].square().clamp_min(1e-6)
    spread = [r[ok & (f.abs() > 0.05)] for r, ok, f in zip(ratio, inside, last[0], strict=True)]
    for constant in spread:  # ½x² times the same factor for all filters at one t̂
        assert float(constant.std() / constant.mean()) < 1e-2


def test_ranges_are_quantiles_and_grow_with_t(prior):
    _, (first, _) = potential_curves(prior)
    width = first[0][..., -1] - first[0][..., 0]
    assert bool((width[:3] > width[1:4]).all())  # t̂ falls; later the picture's edges decide
    clean = torch.from_numpy(dead_leaves()).float()[None, None]
    noise = torch.randn(CURVES, 1, 128, 128, generator=torch.Generator().manual_seed(0))[:1]
    from gncprior.filters import convolve

    u = convolve(clean + noise, prior.kernels()[0].detach())
    inside = (u.flatten(2) >= first[0][:1, :, :1]) & (u.flatten(2) <= first[0][:1, :, -1:])
    assert float(inside.double().mean()) == pytest.approx(0.98, abs=2e-3)


def test_dead_leaves_have_flat_parts_and_edges():
    picture = dead_leaves()
    steps = np.abs(np.diff(picture, axis=1))
    assert 0.5 < (steps == 0).mean() < 0.99
    assert steps.max() > 0.5
    assert (picture.min() >= 0, picture.max() <= 1) == (True, True)


def test_the_command_tells_and_draws(prior, tmp_path, capsys):
    recipe = {"steps": 5, "lr_splines": 1e-3, "layers": 2}
    info = prior.info | {"recipe": recipe, "data": {"title": "pictures", "digest": "abc"}}
    save_prior(tmp_path / "mine.safetensors", prior, info)
    picture = tmp_path / "deep" / "look.png"
    assert cli.main(["inspect", str(tmp_path / "mine.safetensors"), "--out", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "2: 6 filters 5×5×1, 6 filters 3×3×6" in out
    assert "0.001 to 1 (σ = 0.0316228 to 1)" in out
    parameters = 6 * 25 + 36 * 9 + 2 * 6 * 19 * 9
    assert f"{parameters}\n" in out
    assert "psnr_5 35.25, psnr_15 30.5" in out
    assert "lr_splines  0.001" in out
    assert "abc" not in out
    assert f"wrote {picture}" in out
    pixels = np.asarray(Image.open(picture).convert("RGB"))[::3, ::3].astype(int)
    assert len(np.unique(pixels @ [1, 256, 65536])) > 200  # grey filters and coloured curves
    assert picture.with_suffix(".pdf").read_bytes().startswith(b"%PDF")


def test_colour_priors_and_bare_ones_are_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = Prior(Architecture(channels=3, filters=2, first_size=3, x_knots=5, t_knots=3)).start()
    assert list(describe(small)) == ["Architecture"]
    save_prior("colour.safetensors", small, {})
    assert cli.main(["inspect", "colour.safetensors"]) == 0
    assert (tmp_path / "out" / "inspect" / "colour.png").is_file()
    capsys.readouterr()
    assert cli.main(["inspect", "nonsense"]) == 2
    assert "There is no prior 'nonsense'" in capsys.readouterr().err
