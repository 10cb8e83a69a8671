"""What other methods reach on BSDS68: the numbers that ours stand beside.

"Measured" means by the protocol of :mod:`gncprior.evaluation`, PSNR not clipped.  "Published" are the
values that the literature gives for BSDS68, by protocols that differ a little: noise, clipping.  Models
that were trained for σ = 25/255 were given the image scaled by 25/25.5.  Seconds are of one thread and an
image of 481×321 pixels, good to a factor of two.
"""

from typing import NamedTuple


class Denoiser(NamedTuple):
    """PSNR in dB, published at 15, 25, 50 of 255 and measured at σ = 0.1 (None: not known)."""

    name: str
    published: tuple[float | None, float | None, float | None]
    measured: float | None
    seconds: float | None
    parameters: str
    kind: str


NONE = (None, None, None)
DENOISERS = (
    Denoiser("DRUNet", (31.91, 29.48, 26.59), None, None, "32.6 M", "supervised network"),
    Denoiser("TDV, 3 scales, for 25/255", NONE, 29.27, 27, "387 k", "supervised regulariser"),
    Denoiser("DnCNN-S, for 25/255", (31.73, 29.23, 26.23), 29.14, 2.8, "555 k", "supervised network"),
    Denoiser("TNRD 7×7, for 25/255", (31.42, 28.92, 25.97), 28.82, 1.8, "27 k", "supervised diffusion"),
    Denoiser("VN 7×7, 48 filters, 5 steps, for 25/255", NONE, 28.81, 1.5, "19 k", "supervised"),
    Denoiser("MFoE", NONE, 28.75, 27, "13.6 k", "bilevel, all σ"),
    Denoiser("VN 5×5, 24 filters", NONE, 28.66, 0.6, "6.7 k", "supervised"),
    Denoiser("WCRR", (31.21, 28.68, None), 28.59, 9, "13.8 k", "bilevel, all σ"),
    Denoiser("WNNM", (31.37, 28.83, 25.87), None, None, "–", "classical"),
    Denoiser("EPLL", (31.21, 28.68, 25.67), None, None, "–", "patch prior"),
    Denoiser("BM3D (bm3d 4.0.3)", (31.07, 28.57, 25.62), 28.52, 7, "–", "classical"),
    Denoiser("non-local means (scikit-image, tuned)", NONE, 27.57, 0.15, "–", "classical"),
    Denoiser("PoGMDM GMM15, one step", NONE, 27.44, 1.3, "78 k", "score matching, all σ"),
    Denoiser("total variation (scikit-image, tuned)", NONE, 27.38, 0.14, "–", "classical"),
    Denoiser("wavelets, BayesShrink", NONE, 26.16, 0.01, "–", "classical"),
)  # fmt: skip

# Measured with 80 % of the pixels missing: name, PSNR, seconds.
INPAINTERS = (
    ("biharmonic (scikit-image)", 25.68, 2.7),
    ("linear interpolation", 25.37, 0.4),
    ("Navier–Stokes (OpenCV)", 24.72, 0.1),
    ("Telea (OpenCV)", 24.42, 0.1),
)

# Mean |σ̂−σ|/σ in % at these σ, measured.
NOISE_LEVELS = (0.02, 0.05, 0.1, 0.2, 0.4)
ESTIMATE_SIGMA = (37.0, 10.0, 2.8, 0.83, 0.86)
