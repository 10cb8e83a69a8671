"""Restoration of arrays: what goes in comes out, and no detail of how it is stored matters."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gncprior
from gncprior import GncpriorError, checkpoints, denoise, estimate_sigma, inpaint, restore, unrolled
from gncprior.fidelity import Denoising, Inpainting
from gncprior.native import kernels
from gncprior.restore import Scheme, noise_levels
from gncprior.tiles import ENOUGH, TiledEnergy, halo, reach, tiles

DTYPES = ("uint8", "uint16", "float16", "float32", "float64")
TOP = {"uint8": 255, "uint16": 65535}
few = settings(max_examples=25, deadline=None)


def scene(height: int = 24, width: int = 30, seed: int = 0, sigma: float = 0.1) -> np.ndarray:
    """Waves and an edge with noise, in [0, 1]."""
    y, x = np.mgrid[:height, :width]
    clean = 0.5 + 0.2 * np.sin(x / 5 + seed) * np.cos(y / 4) + 0.2 * (x > width / 2)
    noise = np.random.default_rng(seed).standard_normal(clean.shape)
    return np.clip(clean + sigma * noise, 0, 1)


def stored(values: np.ndarray, dtype: str, kind: str):
    """The same picture as another type of pixel and array."""
    top = TOP.get(dtype)
    array = np.rint(values * top).astype(dtype) if top else values.astype(dtype)
    return torch.from_numpy(array) if kind == "torch" else array


def floats(array) -> np.ndarray:
    dtype = str(array.dtype).removeprefix("torch.")
    array = array.numpy() if isinstance(array, torch.Tensor) else array
    return array.astype(np.float64) / TOP.get(dtype, 1)


def same_kind(a, b) -> bool:
    return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape


@few
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(["numpy", "torch"]),
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from([None, 0, 1, 2, -1, -3]),
    st.integers(1, 4),
    st.booleans(),
)
def test_kind_type_shape_and_values(dtype, kind, height, width, axis, channels, stack):
    page = scene(height, width)
    if axis is not None:
        page = np.stack([page * (c + 1) / channels for c in range(channels)], axis)
    if stack and axis in (None, -1, -3):
        page = np.stack([page, page[..., ::-1]] if axis is None else [page, 1 - page])
    y = stored(page, dtype, kind)
    untouched = floats(y).copy()
    x = denoise(y, 0.1, channel_axis=axis)
    assert same_kind(x, y)
    assert np.array_equal(floats(y), untouched)  # the input is left alone
    exact = denoise(page, 0.1, channel_axis=axis)
    rounding = {"uint8": 0.02, "float16": 0.005}.get(dtype, 1e-3)
    assert np.abs(floats(x) - np.clip(exact, 0, 1 if dtype in TOP else 9)).max() <= rounding
    if axis is not None and channels in (2, 4):
        last = [slice(None)] * y.ndim
        last[axis if axis >= 0 else y.ndim + axis] = slice(-1, None)
        assert np.array_equal(floats(x)[tuple(last)], floats(y)[tuple(last)])  # alpha


@few
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(["numpy", "torch"]),
    st.sampled_from([None, 0, -1]),
    st.floats(0, 0.95),
)
def test_inpainting_keeps_what_is_known_bit_by_bit(dtype, kind, axis, share):
    page = scene(12, 15)
    if axis is not None:
        page = np.stack([page, 1 - page, page**2], axis)
    mask = np.random.default_rng(0).random((12, 15)) < share
    y = stored(page, dtype, kind)
    x = inpaint(y, mask, channel_axis=axis, quality="fast")
    assert same_kind(x, y)
    whole = mask if axis is None else np.broadcast_to(np.expand_dims(mask, axis), page.shape)
    assert np.array_equal(floats(x)[~whole], floats(y)[~whole])
    full = inpaint(y, np.array(whole), channel_axis=axis, quality="fast")
    assert np.array_equal(floats(x), floats(full))


def test_unknown_pixels_may_hold_anything():
    page, mask = scene(), np.random.default_rng(1).random((24, 30)) < 0.5
    filled = inpaint(page, mask)
    for value in (np.nan, np.inf, 1e9):
        assert np.array_equal(inpaint(np.where(mask, value, page), mask), filled)
    assert np.abs(filled - scene(sigma=0))[mask].mean() < 0.15


@pytest.mark.parametrize("quality", ["fast", "best"])
@pytest.mark.parametrize("value", [0, 77, 255])
@pytest.mark.parametrize("sigma", [None, 0.02, 0.1])
def test_a_flat_picture_comes_back(quality, value, sigma):
    flat = np.full((20, 26), value, np.uint8)
    assert np.array_equal(denoise(flat, sigma, quality=quality), flat)
    filled = inpaint(flat, np.random.default_rng(0).random(flat.shape) < 0.7, quality=quality)
    assert np.array_equal(filled, flat)


@pytest.mark.parametrize("prior", ["r1", "r2", "r3", "r1-inpaint", "r2-inpaint", "r3-inpaint"])
@pytest.mark.parametrize("missing", [0.3, 0.5, 0.8, 0.9])
def test_learned_steps_of_inpainting_do_not_blow_up_a_flat_picture(prior, missing):
    """No unevenness beyond a fifth of a grey level, where longer steps made it two."""
    flat = np.full((48, 60), 0.3)
    mask = np.random.default_rng(1).random(flat.shape) < missing
    filled = inpaint(flat, mask, prior=prior, method="learned")
    assert np.abs(filled - flat).max() < 0.2 / 255


@pytest.mark.parametrize("quality", ["fast", "best"])
@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.4])
def test_a_flat_colour_comes_back(quality, sigma):
    flat = np.broadcast_to(np.array([200, 30, 90], np.uint8), (20, 26, 3)).copy()
    assert np.array_equal(denoise(flat, sigma, channel_axis=-1, quality=quality), flat)
    mask = np.random.default_rng(0).random(flat.shape[:2]) < 0.7
    assert np.array_equal(inpaint(flat, mask, channel_axis=-1, quality=quality), flat)


@settings(max_examples=8, deadline=None)
@given(st.integers(25, 60), st.integers(30, 80), st.integers(30, 80), st.integers(0, 9))
def test_tiles_do_not_matter(side, height, width, seed):
    page = scene(height, width, seed)
    for quality in ("fast", "best"):
        whole = denoise(page, 0.1, quality=quality)
        assert np.abs(denoise(page, 0.1, quality=quality, tile=side) - whole).max() < 1e-5
    mask = np.random.default_rng(seed).random(page.shape) < 0.6
    whole = inpaint(page, mask, quality="fast")
    assert np.abs(inpaint(page, mask, quality="fast", tile=side) - whole).max() < 1e-5


def test_the_halo_is_enough_for_many_steps():
    """30 steps of R_1 look 180 pixels far; cut at the halo, what is missed is below 1e-5."""
    prior = gncprior.load("r1")
    assert (reach(prior), halo(prior, 4), halo(prior, 30)) == (6, 24, ENOUGH)
    page = torch.from_numpy(scene(60, 460)).float()[None]
    scheme = Scheme(prior, torch.linspace(2 * math.log(0.1), math.log(1e-4), 30), None)
    mask = torch.rand(page.shape, generator=torch.Generator().manual_seed(0)) < 0.8
    for term in (
        lambda z, _: Denoising(z, 0.1),
        lambda z, _: Inpainting(z, mask[:, None, :, : z.shape[-1]]),
    ):
        whole = scheme.run(page, term, None)
        part = scheme.run(page[..., : 230 + ENOUGH], term, None)
        assert float((whole[..., :230] - part[..., :230]).abs().max()) < 1e-5
        short = scheme.run(page[..., : 230 + 6], term, None)
        assert float((whole[..., :230] - short[..., :230]).abs().max()) > 1e-5  # it can fail


@settings(deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 40), st.integers(0, 9))
def test_tiles_cover_every_pixel_once(height, width, side, width_of_halo):
    seen = np.zeros((height, width), int)
    for tile in tiles((height, width), side, width_of_halo):
        seen[tile.inner] += 1
        index = np.arange(height * width).reshape(height, width)
        assert np.array_equal(index[tile.outer][tile.crop], index[tile.inner])
        assert max(index[tile.inner].shape) <= side
    assert (seen == 1).all()


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_gradient_in_tiles_is_the_gradient(layers):
    architecture = gncprior.Architecture(layers=layers, filters=8)
    prior = gncprior.Prior(architecture).start().requires_grad_(False)
    x = torch.from_numpy(scene(50, 61)).float()[None, None]
    tiled = TiledEnergy(prior, side=17).grad(x, -4.0)
    whole = prior.grad(x, -4.0)
    assert float((tiled - whole).abs().max()) < 1e-5 * float(whole.abs().max())


@pytest.mark.parametrize("prior", ["r2", "r3"])
def test_half_products_change_a_fraction_of_a_grey_level(prior):
    """Where the processor has them, and else nothing."""
    y = scene(60, 70)
    mask = np.random.default_rng(0).random(y.shape) < 0.5
    for run in (lambda **how: denoise(y, 0.1, **how), lambda **how: inpaint(y, mask, **how)):
        full, rough = run(prior=prior), run(prior=prior, half=True)
        assert np.abs(rough - full).max() < 0.5 / 255
        assert np.sqrt(np.mean((rough - full) ** 2)) < 0.05 / 255
        has_them = kernels.variant() in ("amx", "avx512bf16")
        assert np.array_equal(rough, full) != has_them


def test_stacks_and_batches_do_not_matter():
    pages = np.stack([scene(seed=k) for k in range(6)]).reshape(2, 3, 24, 30)
    together = denoise(pages)
    for index in np.ndindex(2, 3):
        assert np.array_equal(together[index], denoise(pages[index]))
    colour = denoise(pages[0], 0.1, channel_axis=0, prior="r1")
    assert np.array_equal(colour[1], denoise(pages[0, 1], 0.1, prior="r1"))  # one by one


def test_layouts_of_memory_do_not_matter():
    page = scene()
    expected = denoise(page, 0.1)
    wide = np.zeros((48, 60))
    wide[::2, ::2] = page
    frozen = page.copy()
    frozen.flags.writeable = False
    for same in (np.asfortranarray(page), wide[::2, ::2], frozen, page.astype(">f8")):
        assert np.array_equal(denoise(same, 0.1), expected)
        assert denoise(same, 0.1).dtype == same.dtype
    tensor = torch.from_numpy(page.T.copy()).T.requires_grad_()
    assert np.array_equal(denoise(tensor, 0.1).numpy(), expected)


def test_the_scale_of_floats_is_said():
    page = scene()
    assert np.allclose(
        denoise(page * 255, 0.1, data_range=255), denoise(page, 0.1) * 255, atol=1e-3
    )
    shifted = denoise(page + 3, 0.1)  # values outside [0, 1] are legal
    assert np.allclose(shifted - 3, denoise(page, 0.1), atol=1e-4)


def test_it_denoises_and_the_learned_schedule_is_better_than_one_step():
    clean, noisy = scene(64, 80, sigma=0), scene(64, 80)
    error = [np.mean((denoise(noisy, 0.1, method=m) - clean) ** 2) for m in ("tweedie", "learned")]
    assert error[1] < error[0] < 0.3 * np.mean((noisy - clean) ** 2)
    blind = np.mean((denoise(noisy) - clean) ** 2)
    assert blind < 1.1 * error[1]


@pytest.mark.parametrize("sigma", [0.05, 0.1, 0.2])
def test_estimates_with_error_bars(sigma):
    noise = np.random.default_rng(0).standard_normal((2, 96, 96)) * sigma
    y = scene(96, 96, sigma=0) + noise
    level, error = noise_levels(y)
    assert level.shape == error.shape == (2,)
    assert np.abs(level - sigma).max() < 3 * error.max()
    assert estimate_sigma(y[0]) == level[0]
    assert estimate_sigma(torch.from_numpy(y[0])) == level[0]


def test_histories_and_progress():
    histories, told = [], []
    denoise(scene(), 0.1, method="scheduled", tile=15, trace=histories,
            progress=lambda k, n: told.append((k, n)))  # fmt: skip
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert len(histories) == 4
    assert bool((histories[0].t_hat.diff(dim=0)[:-1] < 0).all())


PAGE = np.zeros((5, 6))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: denoise([[1.0]]), "numpy array or a torch tensor, not list"),
        (lambda: denoise(PAGE.astype(int)), "type int64 have no known range"),
        (lambda: denoise(PAGE[0]), "2 axes or more"),
        (lambda: denoise(PAGE[:0]), "at least one pixel"),
        (lambda: denoise(PAGE, channel_axis=-1), "3 axes or more"),
        (lambda: denoise(PAGE[None], channel_axis=3), "no channel axis 3"),
        (lambda: denoise(PAGE, 0), "must be positive and finite, not 0"),
        (lambda: denoise(PAGE, math.nan), "must be positive and finite, not nan"),
        (lambda: denoise(PAGE, data_range=0), "data range must be a positive number"),
        (lambda: denoise(PAGE, quality="worst"), 'The quality is "fast" or "best"'),
        (lambda: denoise(PAGE, prior="r99"), "r99"),
        (lambda: denoise(PAGE + 1e300), "row 0, column 0 is inf"),
        (lambda: denoise(np.stack([PAGE, PAGE - np.inf])), "column 0 of picture 1 is -inf"),
        (lambda: inpaint(PAGE, PAGE), "must be boolean"),
        (lambda: inpaint(PAGE, PAGE[1:] > 0), r"mask of shape \(4, 6\) does not fit .*\(5, 6\)"),
        (lambda: inpaint(PAGE, PAGE == 0), "every pixel as unknown"),
        (lambda: inpaint(PAGE, PAGE > 0, method="tweedie"), "Tweedie"),
        (lambda: denoise(PAGE, 0.1, tile=0), "at least one pixel"),
    ],
)  # fmt: skip
def test_errors(call, sentence):
    with pytest.raises(GncpriorError, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_the_first_bad_pixel_is_named():
    page = np.zeros((2, 5, 6, 3))
    page[1, 2, 4, 1] = np.nan
    with pytest.raises(GncpriorError, match="row 2, column 4, channel 1 of picture 1 is nan"):
        denoise(page, 0.1, channel_axis=-1, tile=3)


# ---------------------------------------------------------------- which prior


def test_the_best_prior_is_the_one_that_scored_best_of_those_with_a_schedule(tmp_path, monkeypatch):
    monkeypatch.setattr(restore, "WEIGHTS", tmp_path)
    scores = {"r1": 27.0, "r3": 28.0, "r4": 27.5, "r1-denoise": 27.2, "r2-rgb": 30.0}
    monkeypatch.setattr(restore, "_score", lambda name, _: scores.get(name, 0.0))

    def ship(*names):
        for name in names:
            (tmp_path / f"{name}.safetensors").touch()

    with pytest.raises(GncpriorError, match="No prior is shipped"):
        restore._best("best", 1, "denoise")
    ship("r1", "r3", "r1-denoise-10", "r1-rgb")
    assert restore._best("best", 1, "denoise") == "r1"
    ship("r3-denoise-30")
    assert restore._best("best", 1, "denoise") == "r3"
    assert restore._best("best", 3, "denoise") == "r3"  # no schedule for colour
    assert restore._best("fast", 1, "denoise") == "r1"
    assert restore._best("best", 1, "inpaint") == "r1"
    ship("r4", "r4-denoise-10")  # deeper, but not better
    assert restore._best("best", 1, "denoise") == "r3"
    ship("r1-rgb-denoise-10", "r2-rgb", "r2-rgb-denoise-10", "r4-rgb")
    assert restore._best("best", 3, "denoise") == "r2-rgb"
    assert restore._best("fast", 3, "denoise") == "r1-rgb"
    assert restore._best("best", 3, "inpaint") == "r1"
    assert restore._best("best", 1, "denoise") == restore._best("best", 5, "denoise") == "r3"
    ship("r1-denoise", "r1-denoise-denoise-10", "r3-denoise")  # fine-tuned; one without schedules
    assert restore._best("fast", 1, "denoise") == "r1-denoise"
    assert restore._best("fast", 1, "denoise", "tweedie") == "r1"  # whose t is a noise level
    assert restore._best("best", 1, "denoise") == "r3"  # which is better still
    scores["r1-denoise"] = 28.5
    assert restore._best("best", 1, "denoise") == "r1-denoise"
    assert restore._best("best", 3, "denoise") == "r2-rgb"
    assert restore._best("best", 1, "inpaint") == "r1"


def test_scores_are_those_of_the_files():
    info = unrolled.load_schedules(unrolled.schedules_path("r1", "denoise", 10)).info
    mean = np.mean([level["validation"] for level in info["scores"].values()])
    assert restore._score("r1", "denoise") == pytest.approx(mean)
    assert restore._score("r2", "denoise") > restore._score("r1", "denoise") > 25
    assert restore._score("nothing", "denoise") == 0


@pytest.fixture
def small_priors(tmp_path, monkeypatch):
    """r1, and r1-rgb and r2-rgb for colour, each with a schedule of its own for denoising."""
    for module in (restore, checkpoints, unrolled):
        monkeypatch.setattr(module, "WEIGHTS", tmp_path)
    monkeypatch.setattr(restore, "_load", checkpoints.load_prior)  # which keeps none
    for k, (name, layers, channels) in enumerate(
        [("r1", 1, 1), ("r1-rgb", 1, 3), ("r2-rgb", 2, 3)]
    ):
        architecture = gncprior.Architecture(layers, channels, filters=6, first_size=3, t_knots=5)
        prior = gncprior.Prior(architecture).start()
        checkpoints.save_prior(tmp_path / f"{name}.safetensors", prior)
        t_hats = torch.tensor([[-4.0 - k, -5.0], [-4.0 - k, -5.0]])
        info = {"prior_sha256": unrolled.fingerprint(prior)}
        schedules = unrolled.Schedules(
            "denoise", torch.tensor([0.05, 0.2]), t_hats, 0.1 * t_hats.exp(), info
        )
        schedules.save(unrolled.schedules_path(name, "denoise", 2))
    return tmp_path


@pytest.mark.parametrize(("quality", "name"), [("best", "r2-rgb"), ("fast", "r1-rgb")])
def test_colours_are_restored_together_by_a_prior_for_colour(small_priors, quality, name):
    page = np.dstack([scene(seed=k) for k in range(4)])  # the last is alpha
    x = denoise(page, 0.1, channel_axis=-1, quality=quality)
    model = checkpoints.load_prior(name)
    z = torch.from_numpy(page[..., :3]).float().permute(2, 0, 1)[None]
    schedule = unrolled.load_schedules(unrolled.schedules_path(name, "denoise", 2), model).at(0.1)
    expected = unrolled.unroll(model, Denoising(z, 0.1), z, schedule)[0].permute(1, 2, 0).numpy()
    assert np.abs(x[..., :3] - expected).max() < 1e-6
    assert np.array_equal(x[..., 3], page[..., 3])
    one_by_one = denoise(page, 0.1, channel_axis=-1, quality=quality, prior="r1")
    assert np.abs(x - one_by_one).max() > 1e-3


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_grey_stored_as_colour_is_grey_in_a_stack_too(small_priors, kind):
    """Its noise is the same in all channels, which is not what priors for colour expect."""
    grey = np.dstack([scene(seed=0)] * 3 + [scene(seed=1)])  # the last is alpha
    stack = np.stack([np.dstack([scene(seed=k) for k in range(4)]), grey])
    x = np.asarray(denoise(kind(stack), 0.1, channel_axis=-1))
    assert np.array_equal(x[1], np.asarray(denoise(kind(grey), 0.1, channel_axis=-1)))
    assert np.abs(x[1, ..., 0] - denoise(grey[..., 0], 0.1)).max() < 1e-6
    assert np.array_equal(x[1, ..., 0], x[1, ..., 1])
    assert np.abs(x[0] - denoise(stack[0], 0.1, channel_axis=-1, prior="r1")).max() > 1e-3


def test_colours_are_restored_one_by_one_where_no_schedule_is_for_colour(small_priors):
    page = np.dstack([scene(seed=k) for k in range(3)])
    for file in small_priors.glob("*-rgb-denoise-*"):
        file.unlink()
    x = denoise(page, 0.1, channel_axis=-1)
    for channel in range(3):
        assert np.abs(x[..., channel] - denoise(page[..., channel], 0.1)).max() < 1e-6
    mask = np.random.default_rng(0).random(page.shape[:2]) < 0.5
    filled = inpaint(page, mask, channel_axis=-1, quality="fast")
    assert np.abs(filled[..., 1] - inpaint(page[..., 1], mask, quality="fast")).max() < 1e-5


def test_a_prior_for_colour_is_for_three_channels():
    prior = gncprior.Prior(gncprior.Architecture(channels=3, filters=4, first_size=3)).start()
    with pytest.raises(GncpriorError, match="for pictures of 3 channels, not 1"):
        denoise(scene(), 0.1, prior=prior.requires_grad_(False))
