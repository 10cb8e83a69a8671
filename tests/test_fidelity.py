"""Data terms: every prox is the minimiser it claims to be, and bad input is named."""

import math

import pytest
import torch

from gncprior import GncpriorError
from gncprior.fidelity import Denoising, Inpainting, NoisyInpainting

SHAPE = (2, 3, 5, 4)


def random(seed=0, shape=SHAPE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


MASK = random(5) > 0.3
MAP = 0.1 + random(6, (1, 1, 5, 4)).abs()

TERMS = {
    "one sigma": lambda z: Denoising(z, 0.3),
    "per image": lambda z: Denoising(z, torch.tensor([0.2, 0.7])),
    "map": lambda z: Denoising(z, MAP),
    "plane": lambda z: Denoising(z, MAP[0, 0]),
    "noisy inpainting": lambda z: NoisyInpainting(z, MASK, 0.3),
    "noisy inpainting, map": lambda z: NoisyInpainting(z, MASK[:, :1], MAP),
    "inpainting": lambda z: Inpainting(z, MASK),
    "inpainting, one mask": lambda z: Inpainting(z, MASK[0, 0]),
}
TAUS = [0.05, 3.0, torch.tensor([0.1, 2.0])]

terms = pytest.mark.parametrize("make", TERMS.values(), ids=TERMS)
taus = pytest.mark.parametrize("tau", TAUS, ids=["0.05", "3", "per image"])


def test_iterations_start_from_what_is_observed_and_its_mean():
    z = random(2)
    assert torch.equal(Denoising(z, 0.3).start(), z)
    x = Inpainting(z, MASK).start()
    assert torch.equal(x[~MASK], z[~MASK])
    mean = z[1, 2][~MASK[1, 2]].mean()
    torch.testing.assert_close(x[1, 2][MASK[1, 2]], mean.expand(int(MASK[1, 2].sum())))
    torch.testing.assert_close(Inpainting(z + 7, MASK).start(), x + 7)


@terms
@taus
def test_prox_minimises(make, tau):
    """No perturbation, small or large, lowers τD(x) + ½‖x − v‖² of any image."""
    v, term = random(1), make(random(2))
    before = v.clone()
    x = term.prox(v, tau)
    assert torch.equal(v, before)

    def objective(x):
        return torch.as_tensor(tau) * term.value(x) + (x - v).square().flatten(1).sum(1) / 2

    least = objective(x)
    assert least.isfinite().all()
    for seed in range(50):
        step = random(100 + seed)
        if isinstance(term, Inpainting):
            assert (objective(x + step) == math.inf).all()  # observed pixels must not move
            step = step * term.mask
        for size in (1e-4, 1e-2, 1.0):
            assert (objective(x + size * step) > least).all()


@terms
@taus
def test_prox_in_place_is_the_same_in_the_memory_of_v(make, tau):
    v, term = random(1), make(random(2))
    expected = term.prox(v, tau)
    result = term.prox_(v, tau)
    assert result.data_ptr() == v.data_ptr()
    assert torch.equal(result, expected)


@terms
@taus
def test_prox_adjoint_is_the_derivative(make, tau):
    v, term, w = random(1), make(random(2)), random(3)
    tau = torch.as_tensor(tau, dtype=torch.float64).expand(2).clone().requires_grad_()
    v.requires_grad_()
    # autograd cannot follow the in-place forms, so the closed form is written out
    if isinstance(term, Inpainting):
        x = torch.where(term.mask, v, term.z) + 0 * tau.sum()
    else:
        a = tau.view(-1, 1, 1, 1) * term.precision
        x = (v + a * term.z) / (1 + a)
    torch.testing.assert_close(x.detach(), term.prox(v.detach(), tau.detach()))
    (x * w).sum().backward()
    back, dtau = term.prox_adjoint(x.detach(), tau.detach(), w)
    torch.testing.assert_close(back, v.grad)
    torch.testing.assert_close(dtau, tau.grad)


@pytest.mark.parametrize("name", [n for n in TERMS if not n.startswith("inpainting")])
def test_grad_is_the_derivative_of_the_value(name):
    term = TERMS[name](random(2))
    x = random(1).requires_grad_()
    term.value(x).sum().backward()
    torch.testing.assert_close(term.grad(x.detach()), x.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_inpainting_returns_observed_pixels_bit_for_bit(dtype):
    z = random(2).to(dtype)
    z[..., 0, 0] = torch.finfo(dtype).tiny  # a number that arithmetic would lose
    x = Inpainting(z, MASK).prox(random(1).to(dtype), 1.0)
    assert torch.equal(x[~MASK], z[~MASK])
    assert torch.equal(x[MASK], random(1).to(dtype)[MASK])


def test_unknown_pixels_may_hold_anything():
    z = random(2)
    clean = NoisyInpainting(z, MASK, 0.1).prox(random(1), 1.0)
    z = z.masked_fill(MASK, math.nan)
    assert torch.equal(NoisyInpainting(z, MASK, 0.1).prox(random(1), 1.0), clean)
    assert torch.equal(clean[MASK], random(1)[MASK])
    assert Inpainting(z, MASK).prox(random(1), 1.0).isfinite().all()


Z = torch.zeros(SHAPE)
BAD_PIXEL = Z.clone()
BAD_PIXEL[1, 2, 3, 0] = math.nan


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Denoising(Z, 0.0), "sigma must be positive and finite, not 0.0"),
        (lambda: Denoising(Z, -1), "sigma must be positive and finite, not -1.0"),
        (lambda: Denoising(Z, math.nan), "sigma must be positive and finite, not nan"),
        (lambda: Denoising(Z, torch.zeros(2)), "sigma must be positive and finite everywhere"),
        (lambda: Denoising(Z, torch.ones(3)), r"sigma must be a number.*not \(3,\)"),
        (lambda: Denoising(Z, torch.ones(4, 5)), r"map that fits .*not \(4, 5\)"),
        (lambda: Denoising(BAD_PIXEL, 0.1), r"row 3, column 0 \(image 1, channel 2\) is nan"),
        (lambda: Denoising(Z[0], 0.1), "must be shaped"),
        (lambda: Denoising(Z[:, :, :0], 0.1), r"hold pixels, not \(2, 3, 0, 4\)"),
        (lambda: Denoising(Z.int(), 0.1), "must be floating-point, not torch.int32"),
        (lambda: Inpainting(Z, Z), "must be boolean, True where unknown, not torch.float32"),
        (lambda: Inpainting(Z, MASK[..., :3]), r"mask of shape \(2, 3, 5, 3\) does not fit"),
        (lambda: Inpainting(Z, MASK[:1, :1, :1, :1]), r"shape \(1, 1, 1, 1\) does not fit"),
        (lambda: Inpainting(Z, Z == Z), "marks every pixel of an image as unknown"),
        (lambda: NoisyInpainting(BAD_PIXEL, Z != Z, 0.1), "is nan: mark such pixels as unknown"),
        (lambda: Inpainting(Z[:, :, :0], Z[:, :, :0] == 0), "hold pixels"),
    ],
)
def test_bad_input(make, sentence):
    with pytest.raises(GncpriorError, match=sentence) as caught:
        make()
    assert str(caught.value).count(". ") == 0
