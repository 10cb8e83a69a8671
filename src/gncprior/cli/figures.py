"""`gncprior figure NAME`: the figures of the paper, one command each."""

from pathlib import Path

from cyclopts import App

from gncprior.cli.shared import FIGURES, Out, Quick, report

figure = App(
    name="figure",
    help="Draw a figure of the paper, with its data beside it.",
    group=FIGURES,
)


@figure.command
def mixture(*, out: Out = Path("out/figures"), quick: Quick = False) -> None:
    """Energies, attainment rates and convexity of a smoothed 1-D Gaussian mixture.

    Left to right: the energy F(x, t) over x in [-3, 3] for smoothing variances t in [1e-4, 1]; the
    share of 1000 starts that reach the global minimum, over the first smoothing t_0 and the number
    of steps I; the smallest second derivative of F, with its convex and non-convex ranges of t.

    **Example:** `gncprior figure mixture --out figures`
    """
    from gncprior.experiments.mixture import run

    report(run(out, quick=quick))
