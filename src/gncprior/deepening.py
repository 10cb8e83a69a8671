r"""A deeper prior that begins where a shallower one ended.

A new layer goes in before the last potentials ψ.  Either of two starts leaves the energy as it was:

* K = δ and φ the identity.  It is a saddle.  An odd change of φ does what a change of ψ does as well; an even
  one does nothing to first order, for ψ is even and features are as often positive as negative.  Training
  is slow to bend φ, and what it gains at first are larger filters.
* K = δ and φ folded: φ(u) = √(u²+ε²) − ε, which is nearly |u|, with ψ(√((v+ε)² − ε²)) for the potentials, so
  that the two together are ψ where it is even.  The new features are magnitudes, and what K adds up are those
  of neighbouring pixels and filters: in images they are large together, which no sum of functions of
  single filters can say.

In v between −2ε and 0, where no u leads to, the potentials go on as ψ(0) + ½ψ''(0)u² with u² = (v+ε)² − ε².  At
t_max, where inner functions are kept lines (:mod:`gncprior.convexity`), the start is the identity.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gncprior.errors import GncpriorError
from gncprior.prior import Prior
from gncprior.splines import Splines, differentiate, evaluate, quartic, tables_of

SAMPLES = 2001  # of a function that a spline is fitted to


@torch.no_grad()
def deepened(prior: Prior, layers: int, *, fold: bool = False) -> Prior:
    """About the same energy as a prior of more layers; exactly the same without ``fold``.

    New layers are identities, and with ``fold`` the last of them is folded.
    """
    a = prior.architecture
    if layers < a.layers or (fold and layers == a.layers):
        raise GncpriorError(
            f"A prior of {a.layers} layers cannot start one of {layers}{', folded' if fold else ''}."
        )
    if a.scaled and layers > a.layers:
        # its first functions take √(s²+t) off, so an identity there would change the energy
        raise GncpriorError("The scaled variant cannot be made deeper.")
    deep = Prior(replace(a, layers=layers)).to(prior.filters[0])
    for new, old in zip(deep.filters, prior.filters, strict=False):
        new.copy_(old)
    for w in list(deep.filters)[a.layers :]:
        centre = a.inner_size // 2
        w[:, :, centre, centre] = torch.eye(a.filters)
    mine, others = prior._splines(), deep._splines()
    known = [*mine[:-1], *[None] * (layers - a.layers), mine[-1]]
    for splines, old_splines in zip(others, known, strict=True):
        if old_splines is None:
            splines.start_identity()
        else:
            splines.weight.copy_(old_splines.weight)
    if mine[0].spread is not None and others[0].spread is not None:
        others[0].spread.copy_(mine[0].spread)
    if fold:
        _fold(others[-2], others[-1])
    return deep


def _fold(inner: Splines, last: Splines) -> None:
    """Fold the identity of ``inner`` and unfold the potentials, at all knots in t̂ below t̂_max."""
    grid = inner.x_grid
    epsilon, edge = grid.gamma, grid.high + grid.gamma / 2
    v = torch.linspace(-edge, edge, SAMPLES, dtype=torch.float64)
    basis = quartic((v[:, None] - grid.centres()) / grid.gamma)
    importance = 1 / (v.abs() + epsilon)[:, None]  # most features are small

    def fitted(values: Tensor) -> Tensor:
        """Weights of the splines closest to (SAMPLES, C) values."""
        return torch.linalg.lstsq(basis * importance, values * importance).solution.T

    inverse = torch.full((1, len(last.weight)), 1 / grid.gamma, dtype=torch.float64)
    square = (v + epsilon) ** 2 - epsilon**2  # u²
    u = square.clamp(min=0).sqrt().expand(1, len(last.weight), 1, -1)
    folded = fitted(((v**2 + epsilon**2).sqrt() - epsilon)[:, None]).to(inner.weight)
    for o, t_hat in enumerate(inner.t_grid.centres().tolist()):
        if t_hat > inner.t_grid.high - inner.t_grid.gamma / 2:
            break
        tables = tables_of(last.weight[None, :, o].double())
        psi = 0.5 * (evaluate(u, tables, inverse) + evaluate(-u, tables, inverse))[0, :, 0]
        second = differentiate(differentiate(tables, inverse), inverse)
        curvature = evaluate(torch.zeros_like(u[..., :1]), second, inverse)[0, :, 0]
        inner.weight[:, o] = folded
        last.weight[:, o] = fitted((psi + 0.5 * curvature * square.clamp(max=0)).T).to(last.weight)
