"""φ(x, t̂): agrees with its definition, on every back end, with all its derivatives."""

import math
from itertools import pairwise

import pytest
import torch
from dense import (
    BACK_ENDS,
    EPS,
    KNOTS,
    as_at_the_start,  # noqa: F401  (a fixture for every test)
    bspline,
    grid_points,
    normal,
    spline_rounding,
    splines,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from gncprior.native import kernels
from gncprior.splines import (
    Grid,
    Splines,
    differentiate,
    differentiate_transpose,
    euler,
    evaluate,
    evaluate_into,
    quartic,
    scatter,
    soft_histogram,
    tables_of,
    time_basis,
)

T_GRID = Grid(13, math.log(1e-4), 0.0)


def grid_of(knots: int) -> Grid:
    return Grid(knots, -3.5, 3.5)


def inverse_gamma(grid: Grid, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full(shape, 1 / grid.gamma, dtype=dtype)


def derivative(x: Tensor, tables: Tensor, inverse: Tensor, order: int) -> Tensor:
    for _ in range(order):
        tables = differentiate(tables, inverse)
    return evaluate(x, tables, inverse)


def smooth_points(grid: Grid, order: int) -> Tensor:
    """Points where the order-th derivative is continuous: it need not be at ends and half-knots."""
    x = grid_points(grid)
    z = (x - grid.low) / grid.gamma
    if order >= 2:
        x = x[torch.minimum(z.abs(), (z - grid.knots + 1).abs())[: len(x)] > 1e-6]
        z = (x - grid.low) / grid.gamma
    if order == 4:
        x = x[((z - 0.5) - (z - 0.5).round()).abs() > 1e-6]
    return x


def layer(channels: int = 3, knots: int = 9, scaled: bool = False, seed: int = 0) -> Splines:
    spread = 0.1 + normal(channels, seed=seed + 1).abs() if scaled else None
    phi = Splines(channels, grid_of(knots), T_GRID, spread).double()
    with torch.no_grad():
        phi.weight.copy_(normal(*phi.weight.shape, seed=seed))
    return phi


# ---------------------------------------------------------------- the definition


@pytest.mark.parametrize("order", range(5))
def test_the_printed_basis_function_and_its_derivatives(order):
    x = torch.linspace(-3.1, 3.1, 207, dtype=torch.float64, requires_grad=True)
    y = quartic(x)
    for _ in range(order):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(y, bspline(x, order), rtol=0, atol=1e-12)


@pytest.mark.parametrize("knots", KNOTS)
@pytest.mark.parametrize("order", range(5))
def test_values_and_derivatives_are_those_of_the_definition(knots, order):
    grid = grid_of(knots)
    c = normal(2, 3, grid.weights, seed=knots)
    x = smooth_points(grid, order).expand(2, 3, -1)
    ours = derivative(x, tables_of(c), inverse_gamma(grid, 2, 3), order)
    theirs = splines(x, c, grid, order)
    size = 1 + theirs.abs()
    torch.testing.assert_close(ours / size, theirs / size, rtol=0, atol=1e-10)


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("knots", KNOTS)
def test_float32_agrees_with_the_definition_within_its_rounding(back_end, knots):
    kernels.select(back_end)
    grid = grid_of(knots)
    c = normal(2, 3, grid.weights, seed=knots, dtype=torch.float32)
    inverse = inverse_gamma(grid, 2, 3, dtype=torch.float32)
    for order in range(3):
        x = smooth_points(grid, order).float().expand(2, 3, -1).contiguous()
        x = x + 0.01 * normal(*x.shape, seed=order, dtype=torch.float32)
        outputs: list[Tensor | None] = [None, None, None]
        outputs[order] = torch.empty_like(x)
        evaluate_into(x, tables_of(c), inverse, *outputs)
        bound = spline_rounding(x, c, grid, order)
        error = outputs[order].double() - splines(x.double(), c.double(), grid, order)
        assert (error.abs() <= bound).all(), (error.abs() / bound).max()
        error = derivative(x, tables_of(c), inverse, order).double() - outputs[order].double()
        assert (error.abs() <= bound).all()


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_any_subset_of_value_slope_and_curvature_comes_out_the_same(back_end):
    kernels.select(back_end)
    grid = grid_of(63)
    c = normal(1, 2, grid.weights, dtype=torch.float32)
    x = normal(1, 2, 7, 5, seed=1, dtype=torch.float32) * 2
    arguments = (tables_of(c), inverse_gamma(grid, 1, 2, dtype=torch.float32))
    whole = [torch.empty_like(x) for _ in range(3)]
    evaluate_into(x, *arguments, *whole)
    for wanted in range(1, 8):
        some = [torch.empty_like(x) if wanted >> k & 1 else None for k in range(3)]
        evaluate_into(x, *arguments, *some)
        for part, of_whole in zip(some, whole, strict=True):
            assert part is None or torch.equal(part, of_whole)
        in_place = x.clone()  # an output may be x itself
        k = wanted.bit_length() - 1
        evaluate_into(in_place, *arguments, *[in_place if k == i else None for i in range(3)])
        assert torch.equal(in_place, whole[k])


# ---------------------------------------------------------------- exact starts, partition of unity


@pytest.mark.parametrize("knots", KNOTS)
@pytest.mark.parametrize("t_hat", [-20.0, math.log(1e-4), -4.321, 0.0, 3.0])
def test_starts_are_exact_everywhere(knots, t_hat):
    phi = Splines(2, grid_of(knots), T_GRID).double()
    x = grid_points(phi.x_grid).expand(1, 2, -1)
    for start, function in [
        (phi.start_constant, torch.ones_like),
        (phi.start_identity, lambda x: x),
        (phi.start_quadratic, lambda x: x**2 / 2),
    ]:
        start()
        at_t = phi.collapse(torch.tensor([t_hat], dtype=torch.float64), derivatives=2)
        y = evaluate(x, at_t.tables[0], at_t.inverse_gamma)
        # far out a rounding error of the curvature counts (x/γ)² times
        assert ((y - function(x)).abs() <= 1e-14 * (1 + x.abs() / phi.x_grid.gamma) ** 2).all()
        for table in at_t.tables[1:]:  # and they do not depend on t̂
            rate = evaluate(x, table, at_t.inverse_gamma)
            assert (rate.abs() <= 1e-12 * (1 + x**2)).all()


@given(
    knots=st.integers(2, 100),
    where=st.floats(0, 1),
    value=st.floats(-10, 10),
)
@settings(max_examples=50, deadline=None)
def test_the_basis_sums_to_one_on_the_whole_grid(knots, where, value):
    grid = grid_of(knots)
    x = torch.tensor([grid.low + where * (grid.high - grid.low)], dtype=torch.float64)
    assert float(quartic((x - grid.centres()) / grid.gamma).sum()) == pytest.approx(1, abs=1e-13)
    assert float(time_basis(x, grid).sum()) == pytest.approx(1, abs=1e-13)
    c = torch.full((1, 1, grid.weights), value, dtype=torch.float64)
    y = evaluate(x[None, None], tables_of(c), inverse_gamma(grid, 1, 1))
    assert float(y) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("knots", KNOTS)
def test_three_derivatives_are_continuous_across_pieces(knots):
    """On both sides of every half-knot, with weights for which the fourth derivative jumps."""
    grid = grid_of(knots)
    tables = tables_of(normal(grid.weights)[None, None])[0, 0]
    inside = tables[:, 1:-1]  # (5, N)
    half = torch.tensor(0.5, dtype=torch.float64)
    for order in range(4):
        k = torch.arange(order, 5)
        factor = torch.tensor([math.perm(int(n), order) for n in k], dtype=torch.float64)[:, None]

        def end(s: Tensor, k=k, order=order, factor=factor) -> Tensor:
            return (inside[k] * factor * s ** (k[:, None] - order)).sum(0)

        torch.testing.assert_close(end(half)[:-1], end(-half)[1:], rtol=0, atol=1e-12)
    assert (inside[4, 1:] - inside[4, :-1]).abs().min() > 1e-6


def test_the_energy_does_not_fall_off_where_the_end_of_the_grid_is_concave():
    grid = grid_of(9)
    c = -0.5 * (grid.centres() ** 2 - 5 * grid.gamma**2 / 12) + 3 * grid.centres()
    x = torch.tensor([[[-100.0, 100.0]]], dtype=torch.float64)
    y = evaluate(x, tables_of(c[None, None]), inverse_gamma(grid, 1, 1))
    # −½x²+3x has slope −x+3 at the ends ∓3.5 and is continued by straight lines
    ends = torch.tensor([-0.5 * 3.5**2 - 3 * 3.5, -0.5 * 3.5**2 + 3 * 3.5], dtype=torch.float64)
    lines = ends + torch.tensor([6.5 * -96.5, -0.5 * 96.5], dtype=torch.float64)
    torch.testing.assert_close(y[0, 0], lines, rtol=1e-12, atol=0)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_huge_numbers_stay_finite_and_nan_stays_where_it_is(back_end):
    kernels.select(back_end)
    phi = Splines(1, grid_of(63), T_GRID)
    phi.start_quadratic()
    at_t = phi.collapse(torch.zeros(1))
    far = torch.tensor([-1e6, -1e4, 1e4, 1e6])
    strange = torch.tensor([math.nan, math.inf, -math.inf])
    x = torch.cat([far, strange, torch.arange(-3.0, 4.0), strange, far]).view(1, 1, 3, -1)
    y, slope = torch.empty_like(x), torch.empty_like(x)
    evaluate_into(x, at_t.tables[0].detach(), at_t.inverse_gamma, y, slope)
    finite = x.isfinite()
    mu = phi.x_grid.centres()
    for order, (ours, theirs) in enumerate([(y, x**2 / 2), (slope, x)]):
        bound = spline_rounding(x, mu**2 / 2, phi.x_grid, order)
        assert ((ours - theirs).abs() <= bound)[finite].all()
    assert not y[~finite].isfinite().any()
    moments = scatter(x, torch.ones_like(x), at_t.inverse_gamma, 63)  # must come back, no more
    assert moments.shape == (1, 1, 5, 65)
    counted = scatter(x[..., :4], x[..., :4] * 0 + 1, at_t.inverse_gamma, 63)[0, 0, 0].sum()
    assert counted.isnan() == x[..., :4].isnan().any()


# ---------------------------------------------------------------- derivatives of the primitives


def primitive_inputs(knots: int = 6, images: int = 2, channels: int = 2, pixels: int = 5):
    """Generic points inside and outside of the grid, tables that need not belong to a spline."""
    grid = Grid(knots, -1.3, 1.3)
    x = normal(images, channels, pixels, seed=3)
    inverse = inverse_gamma(grid, images, channels) * (1 + 0.1 * normal(images, channels, seed=4))
    tables = normal(images, channels, 5, knots + 2, seed=5)
    g = normal(images, channels, pixels, seed=6)
    return x, tables, g, inverse


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_evaluate_is_differentiable_in_all_it_takes(check):
    x, tables, _, inverse = primitive_inputs()
    check(evaluate, [t.requires_grad_() for t in (x, tables, inverse)])


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_scatter_is_differentiable_in_all_it_takes(check):
    x, _, g, inverse = primitive_inputs()
    check(lambda *a: scatter(*a, 6), [t.requires_grad_() for t in (x, g, inverse)])


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_tables_are_differentiable_in_the_weights(check):
    c = normal(2, 9).requires_grad_()
    x, _, _, inverse = primitive_inputs(knots=5)

    def slope(c: Tensor) -> Tensor:
        tables = tables_of(c).expand(2, 2, 5, 7)
        return evaluate(x, differentiate(tables, inverse), inverse)

    check(slope, [c])


@pytest.mark.parametrize("back_end", kernels.supported())
def test_first_and_second_derivatives_by_the_kernels_are_those_of_the_reference(back_end):
    """In float32, where finite differences say nothing: against the same graph in float64."""
    kernels.select(back_end)
    grid = grid_of(31)
    c = normal(2, 2, grid.weights, dtype=torch.float32)
    x = normal(2, 2, 9, 7, seed=1, dtype=torch.float32)
    g, h = normal(*x.shape, seed=2).float(), normal(*x.shape, seed=3).float()

    def derivatives(dtype: torch.dtype) -> list[Tensor]:
        inputs = [t.clone().to(dtype).requires_grad_() for t in (x, c)]
        y = evaluate(inputs[0], tables_of(inputs[1]), inverse_gamma(grid, 2, 2, dtype=dtype))
        first = torch.autograd.grad((y * g.to(dtype)).sum(), inputs, create_graph=True)
        again = (first[0] * h.to(dtype)).sum() + (first[1] * c.to(dtype)).sum()
        return [y, *first, *torch.autograd.grad(again, inputs)]

    # Σ|terms| of every result times the roundings of one term: the slope's bound for a sum over pixels
    n = x[0, 0].numel()
    for ours, theirs, order, terms in zip(
        derivatives(torch.float32), derivatives(torch.float64),
        [0, 1, 0, 2, 1], [1, 1, n, n, n], strict=True,
    ):  # fmt: skip
        bound = spline_rounding(x, c.abs() + 1, grid, order).max() * terms * 10
        assert (ours - theirs).abs().max() <= bound
        assert theirs.abs().max() > 100 * bound / terms  # the bound is no free pass


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("knots", KNOTS)
def test_scatter_is_the_transpose_of_evaluate(back_end, knots):
    kernels.select(back_end)
    grid = grid_of(knots)
    x = 2 * normal(2, 3, 37, 11, dtype=torch.float32)
    g = normal(*x.shape, seed=1, dtype=torch.float32)
    inverse = inverse_gamma(grid, 2, 3, dtype=torch.float32)
    c = normal(2, 3, grid.weights, seed=2, dtype=torch.float32)
    tables = tables_of(c)
    lhs = (evaluate(x, tables, inverse).double() * g).flatten(2).sum(2)
    moments = scatter(x, g, inverse, knots)
    rhs = (moments.double() * tables).sum((2, 3))
    bound = (spline_rounding(x, c, grid) * g.abs()).flatten(2).sum(2) * 4
    assert ((lhs - rhs).abs() <= bound).all()
    # the moments themselves, row by row, without the few pixels that may fall into either of two rows
    z = x.double() / grid.gamma + (knots - 1) / 2
    g = g * ((2 * z - (2 * z).round()).abs() > 1e-3)
    moments = scatter(x, g, inverse, knots)
    theirs = scatter(x.double(), g.double(), inverse.double(), knots)
    s = (z - z.clamp(0, knots - 1).round()).abs().clamp(min=1)
    lost = EPS * 8 * (knots + x[0, 0].numel()) * (g.abs() * s**4).flatten(2).sum(2)
    assert ((moments - theirs).abs().amax((2, 3)) <= lost).all()


def test_derivative_of_tables_and_its_transpose():
    tables, moments = normal(2, 3, 5, 8), normal(2, 3, 5, 8, seed=1)
    inverse = normal(2, 3, seed=2).abs() + 0.1
    lhs = (differentiate(tables, inverse) * moments).sum()
    rhs = (tables * differentiate_transpose(moments, inverse)).sum()
    torch.testing.assert_close(lhs, rhs, rtol=1e-12, atol=1e-12)


def test_euler_is_x_times_the_slope():
    grid = grid_of(7)
    tables = tables_of(normal(1, 2, grid.weights))
    inverse = inverse_gamma(grid, 1, 2)
    x = (grid_points(grid) + 0.001).expand(1, 2, -1)
    slope = evaluate(x, differentiate(tables, inverse), inverse)
    torch.testing.assert_close(
        evaluate(x, euler(tables), inverse), x * slope, rtol=1e-10, atol=1e-10
    )


# ---------------------------------------------------------------- soft histogram


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_every_sum_of_splines_is_a_product_with_the_soft_histogram(back_end):
    kernels.select(back_end)
    phi = layer(channels=2, knots=31).float()
    x = 1.5 * normal(3, 2, 20, 17, dtype=torch.float32)
    at_t = phi.collapse(torch.tensor([-7.0, -3.3, -0.1]), derivatives=2)
    histogram = soft_histogram(x, at_t.inverse_gamma, 31)
    assert histogram.dtype == torch.float64
    torch.testing.assert_close(histogram[:, :, 0].sum(-1), torch.full((3, 2), 340.0).double())
    for table in at_t.tables:
        sums = evaluate(x.double(), table.double(), at_t.inverse_gamma.double())
        bound = spline_rounding(x, table.abs().amax() * torch.ones(1), phi.x_grid) * 4
        error = (table.double() * histogram).sum((2, 3)) - sums.flatten(2).sum(2)
        assert (error.abs() <= bound.flatten(2).sum(2)).all()


# ---------------------------------------------------------------- collapse in t̂


@pytest.mark.parametrize("order", range(3))
def test_collapse_is_the_sum_over_knots_in_t(order):
    phi = layer(knots=9)
    t_hat = torch.tensor([-9.0, -4.4, -1e-3], dtype=torch.float64)
    basis = bspline((t_hat[:, None] - T_GRID.centres()) / T_GRID.gamma, order) / T_GRID.gamma**order
    c = torch.einsum("bo,jol->bjl", basis, phi.weight)
    at_t = phi.collapse(t_hat, derivatives=2)
    x = torch.linspace(-3.4, 3.4, 41, dtype=torch.float64).expand(3, 3, -1)
    ours = evaluate(x, at_t.tables[order], at_t.inverse_gamma)
    torch.testing.assert_close(ours, splines(x, c, phi.x_grid), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scaled", [False, True])
def test_rates_in_t_are_the_derivatives_of_the_collapsed_function(scaled):
    """By autograd and by finite differences, in the tails too."""
    phi = layer(scaled=scaled)
    t_hat = torch.tensor([-8.8, -4.3, -0.7], dtype=torch.float64, requires_grad=True)
    x = torch.linspace(-6, 6, 31, dtype=torch.float64).expand(3, 3, -1)

    def function(t_hat: Tensor, order: int = 0) -> Tensor:
        at_t = phi.collapse(t_hat, derivatives=order)
        return evaluate(x, at_t.tables[order], at_t.inverse_gamma)

    rates = [function(t_hat, order) for order in range(3)]
    g = normal(*x.shape, seed=7)
    for lower, higher in pairwise(rates):
        (autograd,) = torch.autograd.grad((lower * g).sum(), t_hat, retain_graph=True)
        torch.testing.assert_close(autograd, (higher * g).sum((1, 2)), rtol=1e-10, atol=1e-10)
    h = 1e-5
    for order in range(2):
        with torch.no_grad():
            slope = (function(t_hat + h, order) - function(t_hat - h, order)) / (2 * h)
        size = 1 + rates[order + 1].abs()
        torch.testing.assert_close(slope / size, rates[order + 1] / size, rtol=0, atol=1e-7)


def test_the_scaled_variant_is_the_plain_one_of_the_scaled_feature():
    scaled = layer(scaled=True)
    plain = Splines(3, scaled.x_grid, T_GRID).double()
    plain.load_state_dict({"weight": scaled.weight})
    t_hat = torch.tensor([-6.0, -0.5], dtype=torch.float64)
    x = normal(2, 3, 40)
    a, b = scaled.collapse(t_hat), plain.collapse(t_hat)
    v = x / (scaled.spread**2 + t_hat.exp()[:, None]).sqrt()[..., None]
    torch.testing.assert_close(
        evaluate(x, a.tables[0], a.inverse_gamma), evaluate(v, b.tables[0], b.inverse_gamma),
        rtol=1e-11, atol=1e-11,
    )  # fmt: skip


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_collapse_is_differentiable_in_t_and_in_the_weights(scaled, check):
    spread = torch.tensor([0.3], dtype=torch.float64) if scaled else None
    phi = Splines(1, grid_of(2), Grid(2, -9.0, 0.0), spread).double()
    weight = normal(*phi.weight.shape).requires_grad_()
    t_hat = torch.tensor([-6.4], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([[[0.1, 5.0]]], dtype=torch.float64)

    def function(t_hat: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        at_t = torch.func.functional_call(Collapse(phi), {"phi.weight": weight}, (t_hat,))
        return tuple(evaluate(x, table, at_t.inverse_gamma) for table in at_t.tables)

    check(function, [t_hat, weight])


class Collapse(torch.nn.Module):
    def __init__(self, phi: Splines) -> None:
        super().__init__()
        self.phi = phi

    def forward(self, t_hat: Tensor):
        return self.phi.collapse(t_hat, derivatives=2)


@pytest.mark.parametrize("scaled", [False, True])
@given(beyond=st.floats(1e-6, 1e3), above=st.booleans())
@settings(max_examples=25, deadline=None)
def test_t_outside_its_range_counts_as_the_nearest_end(scaled, beyond, above):
    phi = layer(scaled=scaled)
    end = T_GRID.high if above else T_GRID.low
    out = torch.tensor([end + beyond if above else end - beyond], dtype=torch.float64)
    a = phi.collapse(out, derivatives=2)
    b = phi.collapse(torch.tensor([end], dtype=torch.float64))
    assert torch.equal(a.tables[0], b.tables[0])
    assert torch.equal(a.inverse_gamma, b.inverse_gamma)
    assert all((rate == 0).all() for rate in a.tables[1:])


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("channels", [1, 3, 17])
def test_every_layout_gives_the_same_numbers(back_end, channels):
    kernels.select(back_end)
    grid = grid_of(63)
    tables = tables_of(normal(2, channels, grid.weights, dtype=torch.float32))
    inverse = inverse_gamma(grid, 2, channels, dtype=torch.float32)
    x = normal(2, channels, 13, 11, seed=1, dtype=torch.float32)
    g = normal(*x.shape, seed=2, dtype=torch.float32)
    value, moments = evaluate(x, tables, inverse), scatter(x, g, inverse, 63)
    views = {
        "channels last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(2, 3).contiguous().transpose(2, 3),
        "strided": torch.stack([x, x], -1).flatten(3)[..., ::2],
        "batch last": x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
        "turned twice": x.flip(3).flip(3),
    }
    for name, view in views.items():
        for other in (g, g.to(memory_format=torch.channels_last)):
            torch.testing.assert_close(
                evaluate(view, tables, inverse), value, rtol=0, atol=0, msg=name
            )
            close = EPS * 13 * 11 * g.abs().amax()
            torch.testing.assert_close(
                scatter(view, other, inverse, 63), moments, rtol=0, atol=float(close), msg=name
            )
    expanded = x[:, :1].expand(2, channels, 13, 11)
    torch.testing.assert_close(
        evaluate(expanded, tables, inverse), evaluate(expanded.contiguous(), tables, inverse)
    )
    flat = evaluate(x.flatten(2), tables, inverse)
    assert torch.equal(flat.view_as(value), value)


@pytest.mark.parametrize("back_end", kernels.supported())
def test_channels_last_is_kept_and_not_copied(back_end, monkeypatch):
    kernels.select(back_end)
    grid = grid_of(63)
    tables = tables_of(normal(2, 5, grid.weights, dtype=torch.float32))
    inverse = inverse_gamma(grid, 2, 5, dtype=torch.float32)
    x = normal(2, 5, 8, 6, seed=1, dtype=torch.float32).to(memory_format=torch.channels_last)
    copied = []
    contiguous = Tensor.contiguous

    def watch(self: Tensor, *args, **options) -> Tensor:
        result = contiguous(self, *args, **options)
        if result.data_ptr() != self.data_ptr():
            copied.append(self.shape)
        return result

    monkeypatch.setattr(Tensor, "contiguous", watch)
    y = evaluate(x, tables, inverse)
    scatter(x, y, inverse, 63)
    evaluate_into(x, tables, inverse, y)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert x.shape not in copied
    x.transpose(2, 3).contiguous()  # the watch sees a copy where there is one
    assert copied[-1] == (2, 5, 6, 8)


@pytest.mark.parametrize("back_end", kernels.supported())
def test_outputs_that_do_not_fit_are_refused(back_end):
    kernels.select(back_end)
    grid = grid_of(5)
    tables = tables_of(torch.ones(1, 3, grid.weights))
    inverse = inverse_gamma(grid, 1, 3, dtype=torch.float32)
    x = torch.zeros(1, 3, 4, 6)
    for out in [
        torch.empty(1, 3, 6, 4),
        torch.empty(1, 3, 4, 6, dtype=torch.float64),
        torch.empty(1, 3, 6, 4).transpose(2, 3),
        torch.empty_like(x, memory_format=torch.channels_last),
    ]:
        with pytest.raises(ValueError, match="output"):
            evaluate_into(x, tables, inverse, out)
    with pytest.raises(ValueError, match="tables"):
        evaluate(x, tables[:, :2], inverse)
    with pytest.raises(ValueError, match="inverse_gamma"):
        evaluate(x, tables, inverse[:, :2])
    with pytest.raises(ValueError, match="g does not fit"):
        scatter(x, x[..., :2], inverse, 5)


def test_a_grid_must_be_one():
    for arguments in [(1, 0.0, 1.0), (5, 1.0, 1.0), (5, 2.0, 1.0)]:
        with pytest.raises(ValueError, match="two knots or more"):
            Grid(*arguments)


def test_inputs_are_left_alone_and_no_graph_is_kept():
    x, tables, g, inverse = primitive_inputs()
    for dtype in (torch.float32, torch.float64):
        inputs = [t.to(dtype) for t in (x, tables, g, inverse)]
        before = [t.clone() for t in inputs]
        inputs[1].requires_grad_()
        with torch.no_grad():
            y = evaluate(inputs[0], inputs[1], inputs[3])
            m = scatter(inputs[0], inputs[2], inputs[3], 6)
        assert y.grad_fn is None
        assert m.grad_fn is None
        evaluate(inputs[0], inputs[1], inputs[3]).sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_inference_mode_leaves_nothing_behind_that_autograd_refuses():
    c = normal(1, 1, 4 + 77).requires_grad_()  # a grid that no other test has asked for
    with torch.inference_mode():
        tables_of(c)
    tables_of(c).sum().backward()
    assert c.grad is not None
