"""Small priors and images, for tests that learn something."""

import torch

from gncprior.datasets import Dataset
from gncprior.prior import Architecture, Prior


def tiny(layers, dtype=torch.float64, **shape):
    """A prior whose functions are anything but linear or quadratic."""
    shape = {"filters": 5, "first_size": 3, "t_knots": 5, "x_knots": 15, "x_range": 2.0, **shape}
    prior = Prior(Architecture(layers=layers, **shape)).start(gain=1.0).to(dtype)
    generator = torch.Generator().manual_seed(layers)
    with torch.no_grad():
        for splines in prior.splines:
            noise = torch.randn(splines.weight.shape, generator=generator, dtype=dtype)
            splines.weight.add_(0.1 * splines.weight.abs().mean() * noise)
    return prior.requires_grad_(False)


def smooth_images():
    """Discs and ramps: something that a smoothing prior improves."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
    pictures = [(x * (k - 2) + y + 3) / 8 + 0.3 * (x**2 + y**2 < 0.1 * k) for k in range(1, 6)]
    names = tuple(f"{k}.png" for k in range(len(pictures)))
    bytes_ = tuple((255 * p.clamp(0, 1)).byte()[None].numpy() for p in pictures)
    return Dataset("discs", names, bytes_)
