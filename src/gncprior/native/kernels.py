"""Loads the native kernels, or says why not, and calls them on torch tensors.

The package holds up to five builds of the same C++ source (AVX-512 with bfloat16 in tiles (AMX), in
vectors, and without it, AVX2, portable).  The fastest one that this processor runs is taken;
``$GNCPRIOR_KERNELS`` = ``amx``, ``avx512bf16``, ``avx512``, ``avx2``, ``portable`` or ``torch`` asks for
another.  Where none can be loaded the torch reference serves, and :func:`reason` says why.

The functions below are thin: they check shapes and memory layout, hand over pointers and return
the result.  They know nothing of autograd; :mod:`gncprior.splines` and :mod:`gncprior.filters` do.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gncprior.errors import GncpriorError

VARIANTS = ("amx", "avx512bf16", "avx512", "avx2", "portable")  # fastest first
ENVIRONMENT_VARIABLE = "GNCPRIOR_KERNELS"

_HERE = Path(__file__).parent
_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_CONVOLUTION: list[type] = [_POINTER, _POINTER, *[_INT64] * 7, _POINTER, _INT, _INT]
_PASS: list[type] = [*[_POINTER] * 7, *[_INT64] * 4, _INT, ctypes.c_float]
_SIGNATURES: dict[str, list[type]] = {
    "gnc_evaluate": [*[_POINTER] * 3, *[_INT64] * 3, _INT, _INT, *[_POINTER] * 3, _INT],
    "gnc_scatter": [*[_POINTER] * 3, *[_INT64] * 3, _INT, _INT, _POINTER, _INT],
    "gnc_convolve": _CONVOLUTION,
    "gnc_convolve_transpose": _CONVOLUTION,
    "gnc_weight_grad": _CONVOLUTION,
    "gnc_first_layer": [*[_POINTER] * 5, *[_INT64] * 7, _INT, _INT, _POINTER, _POINTER, _INT],
    "gnc_expand": [*[_POINTER] * 3, *[_INT64] * 4, _INT, *[_POINTER] * 3, _INT],
    "gnc_contract": [*[_POINTER] * 3, *[_INT64] * 4, _INT, *[_POINTER] * 4, _INT],
    "gnc_rates": [*_PASS, *[_POINTER] * 2, _INT],
    "gnc_adjoints": [*_PASS, *[_POINTER] * 8, _INT],
    "gnc_read_once_write_twice": [_POINTER, _INT64, _POINTER, _POINTER, _INT],
    "gnc_local_bases": [*[_POINTER] * 3, *[_INT64] * 3, _INT, _POINTER, _POINTER, _INT],
}


@cache
def _open(name: str) -> ctypes.CDLL:
    """The library of one variant; raises OSError with the reason where it cannot be had."""
    files = sorted(
        p for p in _HERE.glob(f"_kernels_{name}.*") if p.suffix in (".so", ".pyd", ".dylib")
    )
    if not files:
        note = _HERE / "build.txt"
        built = note.read_text(encoding="utf-8").strip() if note.exists() else "it was not compiled"
        raise OSError(f"the {name} kernels are not there: {built}")
    library = ctypes.CDLL(str(files[0]))
    for function, arguments in _SIGNATURES.items():
        entry = getattr(library, function)
        entry.argtypes, entry.restype = arguments, None
    return library


@cache
def supported() -> tuple[str, ...]:
    """The variants that are compiled and that this processor runs, fastest first."""
    try:
        flags = _open("portable").gnc_supported()
    except OSError:
        return ()
    bits = {"portable": 1, "avx2": 2, "avx512": 4, "avx512bf16": 8, "amx": 16}
    found = []
    for name in VARIANTS:
        if flags & bits[name]:
            try:
                _open(name)
            except OSError:
                continue
            found.append(name)
    return tuple(found)


class _Choice:
    """Which variant is in use; one per process."""

    def __init__(self) -> None:
        self.library: ctypes.CDLL | None = None
        self.name, self.why = "torch", ""
        self.choose(os.environ.get(ENVIRONMENT_VARIABLE, ""))

    def choose(self, wanted: str) -> None:
        wanted = wanted.strip().lower()
        if wanted not in ("", "torch", *VARIANTS):
            options = ", ".join((*VARIANTS, "torch"))
            raise GncpriorError(f"There are no kernels named '{wanted}': choose one of {options}.")
        names = supported()
        if wanted == "torch":
            name, why = "torch", f"${ENVIRONMENT_VARIABLE} asks for the torch reference."
        elif wanted in names:
            name, why = wanted, f"${ENVIRONMENT_VARIABLE} asks for them."
        elif wanted:
            raise GncpriorError(
                f"The {wanted} kernels cannot be used here: "
                f"{'this processor does not run them' if names else _why_none()}."
            )
        elif names:
            name, why = names[0], "They are the fastest that this processor runs."
        else:
            name, why = "torch", f"The torch reference serves because {_why_none()}."
        self.name, self.why = name, why
        self.library = None if name == "torch" else _open(name)


def _why_none() -> str:
    try:
        _open("portable")
    except OSError as error:
        return str(error).rstrip(".")
    return "none is compiled"


_choice = _Choice()


def variant() -> str:
    """The kernels in use: ``amx``, ``avx512bf16``, ``avx512``, ``avx2``, ``portable``, or ``torch`` for none."""
    return _choice.name


def reason() -> str:
    """One sentence on why :func:`variant` is what it is."""
    return _choice.why


def select(name: str) -> None:
    """Use the named variant from now on (``""`` for the fastest), as the environment variable would."""
    _choice.choose(name)


def serve(*tensors: Tensor) -> bool:
    """Whether the native kernels can take these tensors: float32 in this machine's memory."""
    return _choice.library is not None and _float32(*tensors)


def _float32(*tensors: Tensor | None) -> bool:
    return all(t is None or (t.dtype == torch.float32 and t.device.type == "cpu") for t in tensors)


def _library() -> ctypes.CDLL:
    if _choice.library is None:
        raise GncpriorError(f"No native kernels are loaded. {_choice.why}")
    return _choice.library


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_channels_last(x: Tensor) -> bool:
    if x.is_contiguous() or x.dim() != 4:
        return False
    return x.is_contiguous(memory_format=torch.channels_last)


def _layout(x: Tensor) -> tuple[Tensor, bool]:
    """x in a layout the kernels read as it is, and whether that is channels-last."""
    last = _is_channels_last(x)
    return (x if last else x.contiguous()), last


def empty_like(x: Tensor) -> Tensor:
    """Memory for a result in the layout in which the kernels read x."""
    last = _is_channels_last(x)
    return torch.empty_like(
        x, memory_format=torch.channels_last if last else torch.contiguous_format
    )


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def evaluate(
    x: Tensor, tables: Tensor, inverse_gamma: Tensor, outputs: Sequence[Tensor | None]
) -> None:
    """Write φ, φ' and φ'' of x (B, C, …) into those of the three ``outputs`` that are not None.

    tables (B, C, 5, N+2) and inverse_gamma (B, C) as in :mod:`gncprior.splines`; outputs have the
    layout of x (contiguous or channels-last).
    """
    x, last = _layout(x)
    images, channels = x.shape[:2]
    _check(_float32(x, tables, inverse_gamma), "kernels need float32 arrays")
    _check(tables.shape[:3] == (images, channels, 5), "tables do not fit x")
    _check(inverse_gamma.shape == (images, channels), "inverse_gamma does not fit x")
    for out in outputs:
        if out is not None:
            same = _is_channels_last(out) if last else out.is_contiguous()
            _check(
                out.shape == x.shape and same and _float32(out),
                "an output differs from x in shape, type or layout",
            )
    tables, inverse_gamma = tables.contiguous(), inverse_gamma.contiguous()
    _library().gnc_evaluate(
        x.data_ptr(), tables.data_ptr(), inverse_gamma.data_ptr(), images, channels,
        x[0, 0].numel() if x.numel() else 0, last, tables.shape[3] - 2,
        *map(_pointer, outputs), torch.get_num_threads(),
    )  # fmt: skip


def scatter(x: Tensor, g: Tensor | None, inverse_gamma: Tensor, knots: int) -> Tensor:
    """The moments Σ g s^k of every row, float64 (B, C, 5, N+2); without g the soft histogram."""
    x, last = _layout(x)
    if g is not None:
        g, other = _layout(g)
        _check(g.shape == x.shape, "g does not fit x")
        if other != last:
            g = g.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    images, channels = x.shape[:2]
    _check(_float32(x, g, inverse_gamma), "kernels need float32 arrays")
    _check(inverse_gamma.shape == (images, channels), "inverse_gamma does not fit x")
    moments = torch.empty(images, channels, 5, knots + 2, dtype=torch.float64)
    inverse_gamma = inverse_gamma.contiguous()
    _library().gnc_scatter(
        x.data_ptr(), _pointer(g), inverse_gamma.data_ptr(), images, channels,
        x[0, 0].numel() if x.numel() else 0, last, knots, moments.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return moments


def _convolution(
    name: str, a: Tensor, b: Tensor, sizes: tuple[int, ...], out: Tensor, half: bool
) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    _check(out.is_contiguous() and _float32(a, b, out), "kernels need dense float32 arrays")
    getattr(_library(), name)(
        a.data_ptr(), b.data_ptr(), *sizes, out.data_ptr(), half, torch.get_num_threads()
    )
    return out


def convolve(x: Tensor, w: Tensor, out: Tensor | None = None, half: bool = False) -> Tensor:
    """K x for x (B, I, H, W) and filters w (O, I, kh, kw), symmetric boundary.

    With ``half`` (here and below) the products are of bfloat16, their sums of float32, where the
    variant in use has such products (``amx``, ``avx512bf16``); the others compute in float32 throughout.
    """
    images, inputs, height, width = x.shape
    outputs, also_inputs, kh, kw = w.shape
    _check(inputs == also_inputs, f"filters for {also_inputs} channels met {inputs}")
    out = x.new_empty(images, outputs, height, width) if out is None else out
    _check(out.shape == (images, outputs, height, width), "out has the wrong shape")
    sizes = (images, inputs, outputs, height, width, kh, kw)
    return _convolution("gnc_convolve", x, w, sizes, out, half)


def convolve_transpose(
    r: Tensor, w: Tensor, out: Tensor | None = None, half: bool = False
) -> Tensor:
    """Kᵀ r, the exact transpose of :func:`convolve`."""
    images, outputs, height, width = r.shape
    also_outputs, inputs, kh, kw = w.shape
    _check(outputs == also_outputs, f"{also_outputs} filters met {outputs} channels")
    out = r.new_empty(images, inputs, height, width) if out is None else out
    _check(out.shape == (images, inputs, height, width), "out has the wrong shape")
    sizes = (images, inputs, outputs, height, width, kh, kw)
    return _convolution("gnc_convolve_transpose", r, w, sizes, out, half)


def weight_grad(
    x: Tensor, r: Tensor, kernel: tuple[int, int], out: Tensor | None = None, half: bool = False
) -> Tensor:
    """∂⟨K x, r⟩/∂w for x (B, I, H, W) and r (B, O, H, W)."""
    images, inputs, height, width = x.shape
    outputs = r.shape[1]
    _check(r.shape == (images, outputs, height, width), "r does not fit x")
    out = x.new_empty(outputs, inputs, *kernel) if out is None else out
    _check(out.shape == (outputs, inputs, *kernel), "out has the wrong shape")
    sizes = (images, inputs, outputs, height, width, *kernel)
    return _convolution("gnc_weight_grad", x, r, sizes, out, half)


def first_layer(
    x: Tensor, w: Tensor, tables: Tensor, inverse_gamma: Tensor,
    sum_tables: Sequence[Tensor] = (), grad: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One layer of experts in one pass: ``grad`` ← Kᵀφ'(Kx), and the sums Σψ(Kx), float64 (S, B)."""
    x, w = x.contiguous(), w.contiguous()
    images, channels, height, width = x.shape
    filters, also_channels, kh, kw = w.shape
    _check(channels == also_channels, f"filters for {also_channels} channels met {channels}")
    _check(tables.shape[:3] == (images, filters, 5), "tables do not fit")
    _check(inverse_gamma.shape == (images, filters), "inverse_gamma does not fit")
    _check(all(s.shape == tables.shape for s in sum_tables), "sum_tables do not fit")
    _check(grad is None or (grad.shape == x.shape and grad.is_contiguous()), "grad does not fit x")
    families = torch.stack(list(sum_tables)).contiguous() if sum_tables else None
    _check(_float32(x, w, tables, inverse_gamma, grad, *sum_tables), "kernels need float32 arrays")
    tables, inverse_gamma = tables.contiguous(), inverse_gamma.contiguous()
    sums = torch.empty(len(sum_tables), images, dtype=torch.float64)
    _library().gnc_first_layer(
        x.data_ptr(), w.data_ptr(), tables.data_ptr(), _pointer(families),
        inverse_gamma.data_ptr(), images, channels, filters, height, width, kh, kw,
        tables.shape[3] - 2, len(sum_tables), _pointer(grad), sums.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return sums


def read_once_write_twice(x: Tensor, a: Tensor, b: Tensor) -> None:
    """The floor for spline kernels: a ← x + x, b ← x·x."""
    _check(
        x.is_contiguous() and a.is_contiguous() and b.is_contiguous() and _float32(x, a, b), "dense"
    )
    _library().gnc_read_once_write_twice(
        x.data_ptr(), x.numel(), a.data_ptr(), b.data_ptr(), torch.get_num_threads()
    )


def local_bases(x: Tensor, c: Tensor, inverse_gamma: Tensor, value: Tensor, slope: Tensor) -> None:
    """The usual algorithm for φ and φ', five basis functions a pixel, from coefficients c (B, C, N+4).

    It is what spline kernels are measured against; nothing else uses it.
    """
    arrays = (x, c, inverse_gamma, value, slope)
    _check(_float32(*arrays) and all(t.is_contiguous() for t in arrays), "dense")
    images, channels, coefficients = c.shape
    _check(x.shape[:2] == (images, channels) == inverse_gamma.shape, "coefficients do not fit x")
    _check(x.shape == value.shape == slope.shape, "an output differs from x in shape")
    _library().gnc_local_bases(
        x.data_ptr(), c.data_ptr(), inverse_gamma.data_ptr(), images, channels, x[0, 0].numel(),
        coefficients - 4, value.data_ptr(), slope.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
