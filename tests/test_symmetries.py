"""The eight symmetries of a square: a group, and what means over them are for."""

import numpy as np
import pytest
import torch

from gncprior import GncpriorError, denoise, inpaint
from gncprior.evaluation import restoration
from gncprior.symmetries import VIEWS, mean_over, turn, turn_back

SQUARE = torch.arange(4.0).view(2, 2)


@pytest.mark.parametrize("k", range(8))
def test_turns_are_undone(k):
    x = torch.rand(2, 1, 3, 5)
    assert torch.equal(turn_back(turn(x, k), k), x)
    assert turn(x, k).shape == ((2, 1, 3, 5) if k % 2 == 0 else (2, 1, 5, 3))


def test_there_are_eight_turns_and_the_first_four_are_rotations():
    turned = [tuple(turn(SQUARE, k).flatten().tolist()) for k in range(8)]
    assert len(set(turned)) == 8
    assert turned[:4] == [(0, 1, 2, 3), (1, 3, 0, 2), (3, 2, 1, 0), (2, 0, 3, 1)]


@pytest.mark.parametrize("views", VIEWS)
def test_the_mean_over_views(views):
    """Of a function that looks at one corner: each view sees another one, and their mean is spread over them."""
    corner = torch.zeros(2, 2)
    corner[0, 0] = 1.0
    found = mean_over(views, lambda k: corner * turn(SQUARE, k))
    expected = sum(turn_back(corner * turn(SQUARE, k), k) for k in range(views)) / views
    assert torch.equal(found, expected)
    if views == 4:
        assert torch.equal(found, SQUARE / 4)
    assert torch.equal(mean_over(views, lambda k: turn(SQUARE, k)), SQUARE)


def test_other_numbers_of_views_are_refused():
    page = np.random.default_rng(0).random((12, 14)).astype(np.float32)
    with pytest.raises(GncpriorError, match="views is 1, 2, 4 or 8, not 3"):
        denoise(page, 0.1, views=3)


@pytest.mark.parametrize(("views", "rotation"), [(4, 1), (8, 2)])
def test_what_sees_all_rotations_does_not_depend_on_the_position(views, rotation):
    rng = np.random.default_rng(1)
    page, mask = rng.random((20, 26)), rng.random((20, 26)) < 0.4
    kinds = {"quality": "fast", "views": views}
    one = np.rot90(denoise(page, 0.1, **kinds), rotation)
    other = denoise(np.rot90(page, rotation).copy(), 0.1, **kinds)
    assert np.abs(one - other).max() < 1e-5
    alone = np.rot90(denoise(page, 0.1, quality="fast"), rotation)
    assert np.abs(one - alone).max() > 1e-4
    filled = inpaint(page, mask, **kinds)
    assert np.array_equal(filled[~mask], page[~mask])
    turned = inpaint(np.rot90(page, rotation).copy(), np.rot90(mask, rotation).copy(), **kinds)
    assert np.abs(np.rot90(filled, rotation) - turned).max() < 1e-4


def test_views_are_the_same_for_files_and_for_evaluation():
    from gncprior.checkpoints import load_prior
    from gncprior.unrolled import load_schedules, schedules_path

    page = np.random.default_rng(2).random((18, 25)).astype(np.float32)
    prior = load_prior("r1")
    learned = load_schedules(schedules_path("r1", "denoise", 10), prior)
    restore = restoration(prior, "denoise", 0.1, "learned", learned=learned, views=2)
    expected = restore(torch.from_numpy(page)[None, None], None)[0, 0].numpy()
    assert np.abs(denoise(page, 0.1, prior="r1", views=2) - expected).max() < 1e-6
