"""The native kernels: which are in use, and that neither variant nor threads change a result."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from dense import (
    EPS,
    as_at_the_start,  # noqa: F401  (a fixture for every test)
    normal,
    random_prior,
    spline_rounding,
)
from torch import Tensor

from gncprior.errors import GncpriorError
from gncprior.native import kernels
from gncprior.splines import Grid, differentiate, tables_of

GRID = Grid(63, -3.5, 3.5)
JOBS = ("evaluate", "evaluate last", "scatter", "scatter last", "histogram",
        "convolve", "convolve few", "transpose", "transpose few", "weights", "first layer",
        "convolve half", "convolve few half", "transpose half", "weights half")  # fmt: skip


@cache  # made once: the products that build tables may round differently on more threads
def experts(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    tables = tables_of(normal(2, 3, GRID.weights, seed=seed, dtype=torch.float32))
    inverse = torch.full((2, 3), 1 / GRID.gamma)
    return tables, differentiate(tables, inverse), inverse


def run(job: str, seed: int = 0) -> list[Tensor]:
    """Every kernel once, on arrays large enough for several tasks."""

    def array(*shape: int, which: int = 0) -> Tensor:
        return normal(*shape, seed=seed + which, dtype=torch.float32)

    tables, slopes, inverse = experts(seed)
    u, g = 2 * array(2, 3, 90, 150, which=1), array(2, 3, 90, 150, which=2)
    if job.endswith("last"):
        u, g = (t.to(memory_format=torch.channels_last) for t in (u, g))
    match job.split(maxsplit=1)[0]:
        case "evaluate":
            outputs = [torch.empty_like(u) for _ in range(3)]
            kernels.evaluate(u, tables, inverse, outputs)
            return outputs
        case "scatter":
            return [kernels.scatter(u, g, inverse, GRID.knots)]
        case "histogram":
            return [kernels.scatter(u, None, inverse, GRID.knots)]
        case "first":
            x, w = array(2, 1, 180, 260, which=3), 0.2 * array(3, 1, 7, 7, which=4)
            grad = torch.empty_like(x)
            return [kernels.first_layer(x, w, tables, inverse, (tables, slopes), grad), grad]
    inputs, half = 1 if "few" in job else 9, job.endswith("half")
    x, w = array(2, inputs, 80, 140, which=3), array(13, inputs, 3, 5, which=4)
    r = array(2, 13, 80, 140, which=5)
    if job.startswith("convolve"):
        return [kernels.convolve(x, w, half=half)]
    if job.startswith("transpose"):
        return [kernels.convolve_transpose(r, w, half=half)]
    return [kernels.weight_grad(x, r, (3, 5), half=half)]


def test_this_machine_runs_kernels():
    """All tests of variants below would be empty otherwise."""
    assert "portable" in kernels.supported()
    assert set(kernels.supported()) <= set(kernels.VARIANTS)
    assert kernels.serve(torch.zeros(1)) == (kernels.variant() != "torch")


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("variant", kernels.supported())
@pytest.mark.parametrize("job", JOBS)
def test_the_number_of_threads_changes_no_bit(variant, job):
    kernels.select(variant)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(job))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("job", [job for job in JOBS if not job.endswith("half")])
def test_variants_differ_by_rounding_only(job):
    """They order their sums differently: n·eps of the sum of magnitudes, here of all arrays' norms."""
    results = []
    for variant in kernels.supported():
        kernels.select(variant)
        results.append(run(job))
    # sums of at most 1·7·7, 13·3·5 or 9·3·5 products; moments and weights are sums over pixels
    terms = 2 * 90 * 150 if job.split()[0] in ("scatter", "histogram", "weights") else 13 * 15 + 63
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a - b).norm() <= terms * EPS * a.norm()


@pytest.mark.parametrize("variant", kernels.supported())
@pytest.mark.parametrize("size", [(80, 140), (46, 46), (13, 33), (5, 16), (3, 7)])
@pytest.mark.parametrize("inputs", [1, 2, 7, 12, 33])
def test_half_products_are_exact_products_of_rounded_factors(variant, size, inputs):
    """A product of two bfloat16 fits a float32, so only the order of the sums may differ.

    Variants without such products compute as if ``half`` had not been said.
    """
    kernels.select(variant)
    x, w = (normal(*shape, seed=k, dtype=torch.float32) for k, shape in
            enumerate([(2, inputs, *size), (13, inputs, 3, 5)]))  # fmt: skip
    r = normal(2, 13, *size, seed=2, dtype=torch.float32)
    if variant in ("amx", "avx512bf16"):
        rounded = [t.to(torch.bfloat16).float() for t in (x, w, r)]
    else:
        rounded = [x, w, r]
    few = inputs < 6  # then the transpose is a sum for each input, in float32
    pairs = [
        (kernels.convolve(x, w, half=True), kernels.convolve(*rounded[:2]), inputs * 15),
        (
            kernels.convolve_transpose(r, w, half=True),
            kernels.convolve_transpose(*((r, w) if few else (rounded[2], rounded[1]))),
            13 * 15,
        ),
        (
            kernels.weight_grad(x, r, (3, 5), half=True),
            kernels.weight_grad(rounded[0], rounded[2], (3, 5)),
            2 * size[0] * size[1],
        ),
    ]
    for got, expected, terms in pairs:
        assert (got - expected).norm() <= terms * EPS * expected.norm()


@pytest.mark.parametrize("variant", kernels.supported())
@pytest.mark.parametrize("pixels", [1, 7, 15, 16, 17, 31, 127, 129, 4095, 4097])
def test_tails_of_vectors_and_pieces(variant, pixels):
    """Whatever the length, all numbers are written and none beyond."""
    kernels.select(variant)
    c = normal(1, 1, GRID.weights, dtype=torch.float32)
    tables, inverse = tables_of(c), torch.full((1, 1), 1 / GRID.gamma)
    x = 2 * normal(1, 1, pixels + 32, seed=1, dtype=torch.float32)
    whole = torch.empty_like(x)
    kernels.evaluate(x, tables, inverse, (whole, None, None))
    out = torch.full_like(x, 7.0)
    some = out[..., :pixels]
    kernels.evaluate(x[..., :pixels], tables, inverse, (some, None, None))
    bound = spline_rounding(x, c, GRID)  # the end of a vector may be computed by other instructions
    assert ((some - whole[..., :pixels]).abs() <= 2 * bound[..., :pixels]).all()
    assert (out[..., pixels:] == 7).all()


@pytest.mark.parametrize("variant", kernels.supported())
def test_arrays_beyond_the_caches(variant):
    """Large outputs are written past the caches, by other instructions."""
    kernels.select(variant)
    torch.set_num_threads(2)
    tables = tables_of(normal(1, 1, GRID.weights, dtype=torch.float32))
    inverse = torch.full((1, 1), 1 / GRID.gamma)
    small = 2 * normal(1, 1, 1024, 16, seed=1, dtype=torch.float32)
    large = small.expand(1, 1, 1024, 16).repeat(1, 1, 520, 1)  # 8.5 million
    for unaligned in (0, 1):
        memory = torch.empty(2, large.numel() + 16)
        outputs = [m[unaligned:][: large.numel()].view_as(large) for m in memory]
        kernels.evaluate(large, tables, inverse, (outputs[0], outputs[1], None))
        expected = [torch.empty_like(small) for _ in range(2)]
        kernels.evaluate(small, tables, inverse, (expected[0], expected[1], None))
        for a, b in zip(outputs, expected, strict=True):
            assert torch.equal(a, b.repeat(1, 1, 520, 1))


@pytest.mark.parametrize("variant", kernels.supported())
def test_several_python_threads_may_call_at_once(variant):
    kernels.select(variant)
    torch.set_num_threads(2)
    work = [(job, seed) for seed in range(3) for job in JOBS]
    expected = [run(*item) for item in work]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda item: run(*item), work))
    for one, other in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


FORK = """
import os, sys, torch
from gncprior.native import kernels

torch.set_num_threads(2)
x = torch.arange(4 * 64 * 64, dtype=torch.float32).view(1, 4, 64, 64) / 9999
w = torch.ones(6, 4, 3, 3)
before, after = (torch.empty(1, 6, 64, 64) for _ in range(2))
kernels.convolve(x, w, before)  # threads of the parent wait in the pool
child = os.fork()
kernels.convolve(x, w, after)
same = torch.equal(before, after)
if child == 0:
    os._exit(0 if same else 7)
_, status = os.waitpid(child, 0)
sys.exit(0 if same and status == 0 else 1)
"""


def test_a_forked_child_gets_its_own_threads():
    done = subprocess.run([sys.executable, "-c", FORK], timeout=60, check=False)
    assert done.returncode == 0


def test_local_bases_compute_the_same_spline():
    """The yardstick of the benchmarks must do the same work to be one."""
    c = normal(2, 3, GRID.weights, dtype=torch.float32)
    inverse = torch.full((2, 3), 1 / GRID.gamma)
    x = normal(2, 3, 20, 30, seed=1, dtype=torch.float32).clamp(-3.5, 3.5)
    for variant in kernels.supported():
        kernels.select(variant)
        a, b = ([torch.empty_like(x), torch.empty_like(x)] for _ in range(2))
        kernels.evaluate(x, tables_of(c), inverse, (*a, None))
        kernels.local_bases(x, c, inverse, *b)
        for order, (one, other) in enumerate(zip(a, b, strict=True)):
            assert ((one - other).abs() <= 2 * spline_rounding(x, c, GRID, order)).all()
        with pytest.raises(ValueError, match="fit"):
            kernels.local_bases(x, c[:1], inverse, *b)


def test_the_floor_reads_once_and_writes_twice():
    x = normal(1000, dtype=torch.float32)
    for variant in kernels.supported():
        kernels.select(variant)
        a, b = torch.empty_like(x), torch.empty_like(x)
        kernels.read_once_write_twice(x, a, b)
        assert torch.equal(a, 2 * x)
        assert torch.equal(b, x * x)


def test_arrays_that_do_not_fit_are_refused():
    x, w, r = torch.zeros(1, 2, 5, 5), torch.zeros(3, 2, 3, 3), torch.zeros(1, 3, 5, 5)
    tables, inverse = torch.zeros(1, 3, 5, 9), torch.ones(1, 3)
    for call in [
        lambda: kernels.convolve(x, w[:, :1]),
        lambda: kernels.convolve(x, w, torch.empty(1, 3, 5, 4)),
        lambda: kernels.convolve(x, w, torch.empty(1, 5, 5, 3).permute(0, 3, 1, 2)),
        lambda: kernels.convolve(x.double(), w),
        lambda: kernels.convolve_transpose(r[:, :2], w),
        lambda: kernels.convolve_transpose(r, w, torch.empty(2, 2, 5, 5)),
        lambda: kernels.weight_grad(x, r[..., :4], (3, 3)),
        lambda: kernels.weight_grad(x, r, (3, 3), torch.empty(3, 2, 3, 4)),
        lambda: kernels.first_layer(x[:, :1], w, tables, inverse),
        lambda: kernels.first_layer(x, w, tables[:, :2], inverse),
        lambda: kernels.first_layer(x, w, tables, inverse[:, :2]),
        lambda: kernels.first_layer(x, w, tables, inverse, (tables[..., :8],)),
        lambda: kernels.first_layer(x, w, tables, inverse, (), torch.empty(1, 2, 5, 4)),
        lambda: kernels.first_layer(x, w, tables.double(), inverse),
        lambda: kernels.first_layer(x, w, tables, inverse.double()),
        lambda: kernels.first_layer(x, w, tables, inverse, (), x.double()),
        lambda: kernels.evaluate(r, tables.double(), inverse, (r, None, None)),
        lambda: kernels.scatter(r, r.double(), inverse, 7),
        lambda: kernels.scatter(r, None, inverse[:, :2], 7),
    ]:
        with pytest.raises(ValueError, match=r"\w"):
            call()


# ---------------------------------------------------------------- the choice


def test_the_reference_serves_when_it_is_asked_for():
    kernels.select("torch")
    assert kernels.variant() == "torch"
    assert not kernels.serve(torch.zeros(1))
    with pytest.raises(GncpriorError, match=r"No native kernels are loaded\. .*asks for the torch"):
        kernels.convolve(torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 3, 3))
    prior = random_prior(torch.float32, filters=2, first_size=3, x_knots=5, t_knots=3)
    assert prior.energy(torch.zeros(1, 1, 4, 4), -1.0).isfinite().all()


@pytest.mark.parametrize("variant", kernels.supported())
def test_a_variant_can_be_chosen(variant):
    kernels.select(f" {variant.upper()} ")
    assert kernels.variant() == variant
    assert kernels.reason() == "$GNCPRIOR_KERNELS asks for them."
    kernels.select("")
    assert kernels.variant() == kernels.supported()[0]
    assert "fastest" in kernels.reason()


def test_a_wrong_choice_is_refused_and_changes_nothing():
    before = kernels.variant()
    with pytest.raises(
        GncpriorError, match="no kernels named 'sse9': choose one of amx, avx512bf16, "
    ):
        kernels.select("sse9")
    assert kernels.variant() == before


def test_what_this_machine_cannot_run_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "supported", lambda: ("portable",))
    with pytest.raises(GncpriorError, match="avx512 kernels cannot be used here: this processor"):
        kernels.select("avx512")
    kernels.select("")
    assert kernels.variant() == "portable"


def test_without_compiled_kernels_the_reference_serves_and_says_why(monkeypatch, tmp_path):
    (tmp_path / "build.txt").write_text("portable: not built: no compiler\n", "utf-8")
    monkeypatch.setattr(kernels, "_HERE", tmp_path)
    kernels._open.cache_clear()
    kernels.supported.cache_clear()
    try:
        kernels.select("")
        assert kernels.variant() == "torch"
        assert "not built: no compiler" in kernels.reason()
        assert kernels.reason().count("\n") == 0
        with pytest.raises(GncpriorError, match="avx2 kernels cannot be used here"):
            kernels.select("avx2")
    finally:
        monkeypatch.undo()
        kernels._open.cache_clear()
        kernels.supported.cache_clear()


def test_the_environment_variable_chooses():
    code = "from gncprior.native import kernels; print(kernels.variant(), kernels.reason())"

    def start(value: str, *command: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {kernels.ENVIRONMENT_VARIABLE: value}
        return subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
        )

    done = start("portable", "-c", code)
    assert done.stdout == "portable $GNCPRIOR_KERNELS asks for them.\n"
    wrong = start("nonsense", "-m", "gncprior", "info")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    assert "There are no kernels named 'nonsense': choose one of" in wrong.stderr
