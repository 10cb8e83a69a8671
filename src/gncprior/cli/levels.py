"""Noise levels and shares as people write them: 0.1, 25/255, 15/255,25/255,50/255."""

import math

from gncprior.errors import GncpriorError


def parse_level(text: str, what: str = "noise level") -> float:
    """A positive number, or a quotient of two."""
    over, _, under = text.partition("/")
    try:
        value = float(over) / float(under or 1)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not 0 < value < math.inf:
        raise GncpriorError(
            f"A {what} must be a positive number such as 0.1 or 25/255, not {text!r}."
        )
    return value


def parse_levels(text: str, what: str = "noise level") -> list[float]:
    """Several of them, separated by commas."""
    return [parse_level(part, what) for part in text.split(",")]


def parse_start(text: str | None) -> tuple[float | None, bool]:
    """A first smoothing variance, and whether it is a multiple of that of the noise: 0.003, or 0.3v."""
    if text is None:
        return None, False
    return parse_level(text.removesuffix("v"), "smoothing variance"), text.endswith("v")


def parse_shares(text: str) -> list[float]:
    """Shares of missing pixels, below 1."""
    shares = parse_levels(text, "share of missing pixels")
    if max(shares) >= 1:
        raise GncpriorError(
            "Where all pixels are missing nothing can be restored: give a share below 1."
        )
    return shares
