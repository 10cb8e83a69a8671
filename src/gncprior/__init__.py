"""Gradually non-convex image priors.

Learned energies R(x, t) of images x that are convex for large smoothing t and sharp for small t,
and the methods that restore images with them. Public names are loaded when they are first used, so
that `import gncprior` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gncprior.checkpoints import load as load
    from gncprior.errors import GncpriorError as GncpriorError
    from gncprior.mixtures import GaussianMixture as GaussianMixture
    from gncprior.mixtures import convexity_threshold as convexity_threshold
    from gncprior.mixtures import empirical as empirical
    from gncprior.mixtures import gnc_flow as gnc_flow
    from gncprior.prior import Architecture as Architecture
    from gncprior.prior import Prior as Prior
    from gncprior.restore import denoise as denoise
    from gncprior.restore import estimate_sigma as estimate_sigma
    from gncprior.restore import inpaint as inpaint

# Public name -> module of the package that defines it. The block above repeats it for type checkers
# and editors; a test compares the two.
_PUBLIC = {
    "GncpriorError": "errors",
    "GaussianMixture": "mixtures",
    "convexity_threshold": "mixtures",
    "empirical": "mixtures",
    "gnc_flow": "mixtures",
    "Architecture": "prior",
    "Prior": "prior",
    "load": "checkpoints",
    "denoise": "restore",
    "estimate_sigma": "restore",
    "inpaint": "restore",
}

__all__ = sorted(_PUBLIC)  # noqa: PLE0605  (the table is the one place to extend)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("gncprior")
    elif name in _PUBLIC:
        value = getattr(import_module(f"gncprior.{_PUBLIC[name]}"), name)
    else:
        raise AttributeError(f"module 'gncprior' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, "__version__"})
