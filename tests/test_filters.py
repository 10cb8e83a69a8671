"""Convolutions with symmetric boundary: the definition, the exact transpose, the derivatives."""

import pytest
import torch
from dense import (
    BACK_ENDS,
    EPS,
    as_at_the_start,  # noqa: F401  (a fixture for every test)
    convolution,
    normal,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from gncprior.adjoint import dot_test
from gncprior.filters import (
    convolve,
    convolve_into,
    convolve_transpose,
    convolve_transpose_into,
    dct_filters,
    reflected,
    weight_grad,
    zero_mean,
)
from gncprior.native import kernels

# images, inputs, outputs, height, width, kernel height, kernel width
SIZES = [
    (1, 1, 1, 1, 1, 1, 1),
    (1, 1, 48, 1, 1, 7, 7),  # one pixel under a filter
    (2, 3, 5, 2, 3, 8, 7),  # reflected more than once
    (1, 1, 7, 9, 5, 4, 2),  # even filters
    (2, 3, 13, 17, 23, 3, 5),
    (1, 6, 6, 33, 65, 3, 3),  # one pixel more than whole vectors
    (1, 1, 6, 90, 150, 7, 7),  # more than one tile
    (1, 8, 3, 70, 80, 5, 5),
    (1, 7, 12, 40, 140, 1, 9),
]
sizes = st.tuples(
    st.integers(1, 2), st.integers(1, 8), st.integers(1, 8),
    st.integers(1, 20), st.integers(1, 20), st.integers(1, 8), st.integers(1, 8),
)  # fmt: skip


def tensors(size, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """An image, filters and responses."""
    images, inputs, outputs, height, width, kh, kw = size
    return (
        normal(images, inputs, height, width, seed=1, dtype=dtype),
        normal(outputs, inputs, kh, kw, seed=2, dtype=dtype),
        normal(images, outputs, height, width, seed=3, dtype=dtype),
    )


def check_adjoint(size, dtype: torch.dtype, limit: float) -> None:
    x, w, r = tensors(size, dtype)
    for seed in range(2):
        mismatch = dot_test(
            lambda x: convolve(x, w), lambda r: convolve_transpose(r, w),
            x.shape, r.shape, dtype=dtype, seed=seed,
        )  # fmt: skip
        assert mismatch <= limit
    mismatch = dot_test(  # K x is linear in w too
        lambda w: convolve(x, w), lambda r: weight_grad(x, r, tuple(w.shape[2:])),
        w.shape, r.shape, dtype=dtype,
    )  # fmt: skip
    assert mismatch <= limit


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 12])
def test_reflection_repeats_the_edge_pixel(n, size):
    centre = size // 2
    line = [*range(n), *reversed(range(n))] * (2 * size)
    start = 2 * n * size  # the line is periodic: this is pixel 0 again
    expected = line[start - centre : start - centre + n + size - 1]
    assert reflected(n, size).tolist() == expected


@given(size=sizes)
@settings(max_examples=40, deadline=None)
def test_the_operator_is_its_definition(size):
    x, w, _ = tensors(size)
    torch.testing.assert_close(convolve(x, w), convolution(x, w), rtol=1e-11, atol=1e-11)


@given(size=sizes)
@example(size=SIZES[1])
@example(size=SIZES[2])
@settings(max_examples=40, deadline=None)
def test_the_transpose_is_exact(size):
    check_adjoint(size, torch.float64, 1e-10)


def test_the_adjoint_test_sees_a_wrong_transpose():
    x, w, r = tensors((1, 1, 2, 6, 7, 3, 3))
    padded = torch.nn.functional.conv_transpose2d  # the transpose for zeros around the image

    def wrong(r: Tensor) -> Tensor:
        return padded(r, w, padding=1)

    assert dot_test(lambda x: convolve(x, w), wrong, x.shape, r.shape) > 1e-3
    with pytest.raises(ValueError, match="The operator maps"):
        dot_test(lambda x: convolve(x, w), lambda r: r, x.shape, r.shape)
    assert dot_test(lambda x: 0 * x, lambda y: 0 * y, (3,), (3,)) == 0


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("size", SIZES)
def test_float32_agrees_with_the_definition_within_its_rounding(back_end, size):
    """A sum of n products may lose n·eps of the sum of their magnitudes, whatever its order."""
    kernels.select(back_end)
    x, w, r = tensors(size, torch.float32)
    images, inputs, outputs, height, width, kh, kw = size
    x64, w64, r64 = x.double(), w.double(), r.double()

    def close(ours: Tensor, theirs: Tensor, terms: int, magnitude: Tensor) -> None:
        assert ours.dtype == torch.float32
        assert ((ours - theirs).abs() <= EPS * terms * magnitude + 1e-30).all()

    close(convolve(x, w), convolution(x, w), inputs * kh * kw, convolution(x.abs(), w.abs()))
    # in float64 the transposes are held to the definition by the adjoint test
    back = [convolve_transpose(a, b) for a, b in [(r64, w64), (r64.abs(), w64.abs())]]
    close(convolve_transpose(r, w), back[0], 4 * outputs * kh * kw, back[1])
    gradient = [weight_grad(a, b, (kh, kw)) for a, b in [(x64, r64), (x64.abs(), r64.abs())]]
    close(weight_grad(x, r, (kh, kw)), gradient[0], images * height * width, gradient[1])


@pytest.mark.parametrize("back_end", kernels.supported())
@given(size=sizes)
@settings(max_examples=30, deadline=None)
def test_kernels_are_exact_transposes_for_all_sizes(back_end, size):
    kernels.select(back_end)
    _, inputs, outputs, _, _, kh, kw = size
    check_adjoint(size, torch.float32, EPS * max(inputs, outputs) * kh * kw)
    x, w, _ = tensors(size, torch.float32)
    error = (convolve(x, w) - convolution(x, w)).abs()
    assert (error <= EPS * inputs * kh * kw * convolution(x.abs(), w.abs()) + 1e-30).all()


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_results_land_in_the_given_memory(back_end):
    kernels.select(back_end)
    x, w, r = tensors(SIZES[4], torch.float32)
    to, back = torch.full_like(r, 7.0), torch.full_like(x, 7.0)
    assert convolve_into(x, w, to).data_ptr() == to.data_ptr()
    assert convolve_transpose_into(r, w, back).data_ptr() == back.data_ptr()
    assert torch.equal(to, convolve(x, w))
    assert torch.equal(back, convolve_transpose(r, w))


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_every_layout_gives_the_same_numbers_and_inputs_are_left_alone(back_end):
    kernels.select(back_end)
    x, w, r = tensors((2, 3, 5, 11, 14, 3, 4), torch.float32)
    results = (convolve(x, w), convolve_transpose(r, w), weight_grad(x, r, (3, 4)))
    limit = EPS * 2 * 11 * 14 * 8
    for change in [
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        lambda t: torch.stack([t, t], -1).flatten(3)[..., ::2],
    ]:
        a, b, c = change(x), change(w), change(r)
        before = [t.clone() for t in (a, b, c)]
        again = (convolve(a, b), convolve_transpose(c, b), weight_grad(a, c, (3, 4)))
        for one, other in zip(results, again, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=limit)
        assert all(torch.equal(s, t) for s, t in zip(before, (a, b, c), strict=True))


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
@pytest.mark.parametrize("size", [(1, 2, 2, 3, 2, 2, 3), (2, 1, 1, 1, 1, 3, 3)])
def test_the_three_operators_are_differentiable_in_all_they_take(check, size):
    x, w, r = (t.requires_grad_() for t in tensors(size))
    check(convolve, [x, w])
    check(convolve_transpose, [r, w])
    check(lambda x, r: weight_grad(x, r, tuple(w.shape[2:])), [x, r])


@pytest.mark.parametrize("back_end", kernels.supported())
def test_first_and_second_derivatives_by_the_kernels_are_those_of_the_reference(back_end):
    kernels.select(back_end)
    size = (2, 2, 7, 9, 8, 3, 3)

    def derivatives(dtype: torch.dtype) -> list[Tensor]:
        x, w, r = (t.clone().to(dtype).requires_grad_() for t in tensors(size, torch.float32))
        first = torch.autograd.grad((convolve(x, w) * r).sum(), (x, w, r), create_graph=True)
        again = sum(f.square().sum() for f in first)
        return [*first, *torch.autograd.grad(again, (x, w, r))]

    # two sums after each other, of at most as many terms as there are pixels or taps and channels
    terms = 2 * 2 * 9 * 8 + 7 * 9
    for ours, theirs in zip(derivatives(torch.float32), derivatives(torch.float64), strict=True):
        assert (ours - theirs).norm() <= EPS * terms * theirs.norm()
        assert not torch.equal(ours.double(), theirs)  # the kernels did compute it


def test_no_graph_is_kept_without_grad():
    x, w, r = (t.requires_grad_() for t in tensors((1, 1, 2, 4, 4, 3, 3)))
    with torch.no_grad():
        results = [convolve(x, w), convolve_transpose(r, w), weight_grad(x, r, (3, 3))]
    assert all(t.grad_fn is None for t in results)
    assert convolve_into(x, w, torch.empty_like(r)).grad_fn is None


# ---------------------------------------------------------------- where filters start


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(7, 7), (3, 5), (2, 2), (1, 4)])
def test_dct_filters_are_orthonormal_and_blind_to_a_constant(size, channels):
    w = dct_filters(size, channels)
    n = (size[0] * size[1] - 1) * channels
    assert w.shape == (n, channels, *size)
    gram = w.flatten(1) @ w.flatten(1).T
    torch.testing.assert_close(gram, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-12)
    assert w.mean(dim=(2, 3)).abs().max() < 1e-14
    torch.testing.assert_close(zero_mean(w), w, rtol=0, atol=1e-13)


def test_low_frequencies_come_first():
    w = dct_filters((7, 7))
    responses = [
        (f[0, 1:] - f[0, :-1]).square().sum() + (f[0, :, 1:] - f[0, :, :-1]).square().sum()
        for f in w
    ]
    assert responses[0] == min(responses)
    assert responses[-1] == max(responses)


def test_zero_mean_filters_are_blind_to_a_colour():
    w = zero_mean(normal(4, 3, 5, 5))
    assert w.mean(dim=(2, 3)).abs().max() < 1e-15
    constant = torch.tensor([5.0, -1.0, 0.3], dtype=torch.float64)[None, :, None, None].expand(
        1, 3, 6, 6
    )
    assert convolve(constant, w).abs().max() < 1e-12
