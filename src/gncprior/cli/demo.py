"""`gncprior demo`: the shortest way to see something."""

import time
from pathlib import Path

from gncprior.cli.shared import Out, report


def demo(*, out: Out = Path("out/demo")) -> None:
    """Show the idea on a small example, and where its picture is.

    Smooths a Gaussian mixture on the line by t in [1e-4, 1] (a variance) until its energy is
    convex, follows the minimiser back to the sharp energy from many starts, and draws it all.

    **Example:** `gncprior demo --out out/demo`
    """
    begin = time.perf_counter()
    print("Smoothing a Gaussian mixture and following its minimisers ...", flush=True)
    from gncprior.experiments.mixture import run

    files = run(out, quick=True)
    print(f"Done in {time.perf_counter() - begin:.1f} s:")
    report(files)
    print("The same at full size: gncprior figure mixture")
