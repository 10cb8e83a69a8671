"""Recipes: those of the package, and what is refused."""

import pytest

from gncprior import GncpriorError
from gncprior.recipes import Recipe, read_recipe, recipe_names


def test_recipes_of_the_package():
    assert {"fast", "paper"} <= set(recipe_names())
    paper = read_recipe("paper")
    assert (paper.patch, paper.batch, paper.steps) == (96, 128, 100_000)
    assert (paper.lr_filters, paper.lr_splines) == (1e-3, 1e-3)
    assert paper.lr_filters * paper.lr_end == pytest.approx(5e-5)
    assert (paper.filters, paper.first_size, paper.inner_size, paper.x_range) == (48, 7, 3, 3.5)
    assert (paper.t_min, paper.t_max, paper.t_weight, paper.t_fraction) == (1e-4, 1.0, 1.0, 1.0)
    assert [read_recipe(name).layers for name in recipe_names()]


def test_recipes_go_through_toml(tmp_path):
    recipe = Recipe(lr_splines=1e-7, boundary=True, seed=2**40)
    (tmp_path / "r.toml").write_text(recipe.to_toml(), "utf-8")
    assert read_recipe(tmp_path / "r.toml") == recipe


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("patch = 0", "patch must be positive"),
        ("patch = 1.5", "patch must be a whole number"),
        ("boundary = 1", "boundary must be true or false"),
        ("gain = 'x'", "gain must be a number"),
        ("gain = nan", "gain must be a number, not nan"),
        ("channels = 2", "channels must be 1"),
        ("average = 1.0", "average must be in"),
        ("seed = -1", "seed must be 0 or more"),
        ("lr_spline = 1", "lr_spline, which no recipe has; did you mean lr_splines?"),
        ("patch = ", "is not TOML"),
    ],
)
def test_recipes_that_are_wrong(tmp_path, text, words):
    (tmp_path / "r.toml").write_text(text, "utf-8")
    with pytest.raises(GncpriorError) as caught:
        read_recipe(tmp_path / "r.toml")
    assert words in str(caught.value)
    assert "r.toml" in str(caught.value)


def test_recipes_that_do_not_exist(tmp_path):
    with pytest.raises(GncpriorError, match=r"There is no recipe papr: .* did you mean paper\?"):
        read_recipe("papr")
    with pytest.raises(GncpriorError, match=r"Cannot read the recipe .*none.toml: No such file"):
        read_recipe(tmp_path / "none.toml")
