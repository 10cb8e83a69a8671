r"""How close two images are: PSNR and SSIM, with the range of the data always said.

.. math:: \mathrm{PSNR} = 10 \log_{10}\frac{r^2}{\mathrm{mean}\,(x-y)^2},\qquad
          \mathrm{SSIM} = \mathrm{mean}\,
          \frac{(2μ_xμ_y + C_1)(2σ_{xy} + C_2)}{(μ_x^2+μ_y^2+C_1)(σ_x^2+σ_y^2+C_2)}

with r the ``data_range`` of the images (1 in this package), C_1 = (0.01 r)², C_2 = (0.03 r)² and local
means, variances and covariance under a Gaussian window of 11 × 11 pixels and σ = 1.5, at every place
where the window lies inside the image (Wang et al. 2004).

Images are shaped (…, C, H, W), or (H, W); the result has the leading axes, in float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gncprior.errors import GncpriorError

WINDOW = 11
WINDOW_SIGMA = 1.5


def psnr(x: Any, reference: Any, *, data_range: float) -> Tensor:
    """The peak signal-to-noise ratio in dB; ∞ for equal images."""
    x, reference = _pair(x, reference, data_range)
    error = (x - reference).square().mean(dim=(-3, -2, -1))
    return 10 * (2 * math.log10(data_range) - error.log10())


def ssim(x: Any, reference: Any, *, data_range: float) -> Tensor:
    """The structural similarity, at most 1; channels are averaged."""
    x, y = _pair(x, reference, data_range)
    if min(x.shape[-2:]) < WINDOW:
        size = "×".join(map(str, x.shape[-2:]))
        raise GncpriorError(f"SSIM needs images of {WINDOW}×{WINDOW} pixels or more, not {size}.")
    mean_x, mean_y = _local_mean(x), _local_mean(y)
    var_x = _local_mean(x * x) - mean_x**2
    var_y = _local_mean(y * y) - mean_y**2
    covariance = _local_mean(x * y) - mean_x * mean_y
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    value = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    value = value / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return value.mean(dim=(-3, -2, -1))


def _pair(x: Any, y: Any, data_range: float) -> tuple[Tensor, Tensor]:
    x, y = torch.as_tensor(x).double(), torch.as_tensor(y).double()
    if x.shape != y.shape or x.dim() < 2 or x.numel() == 0:
        raise GncpriorError(
            "Images are compared pixel by pixel and must have one shape, (…, C, H, W) or (H, W), "
            f"not {tuple(x.shape)} and {tuple(y.shape)}."
        )
    if not 0 < data_range < math.inf:
        raise GncpriorError(f"The range of the data must be a positive number, not {data_range}.")
    return (x[None], y[None]) if x.dim() == 2 else (x, y)


def _local_mean(x: Tensor) -> Tensor:
    """The average under the window, which is a product of two 1-D windows."""
    offsets = torch.arange(WINDOW, dtype=x.dtype, device=x.device) - WINDOW // 2
    window = torch.exp(-0.5 * (offsets / WINDOW_SIGMA) ** 2)
    window = window / window.sum()
    flat = x.reshape(-1, 1, *x.shape[-2:])
    flat = F.conv2d(F.conv2d(flat, window.view(1, 1, -1, 1)), window.view(1, 1, 1, -1))
    return flat.view(*x.shape[:-2], *flat.shape[-2:])
