"""`gncprior demo`: the shortest way to see something."""

import time
from pathlib import Path

from gncprior.cli.shared import Out, report

SIGMA = 25 / 255  # of the noise in the bundled picture


def demo(*, out: Out = Path("out/demo")) -> None:
    """Restore a small picture that comes with the package, and say where to see it.

    Removes noise of σ = 25/255 from it, told only that there is some, and fills in scratches; PSNR
    is in dB and tells how close the result is to the picture as it was drawn.

    **Example:** `gncprior demo --out out/demo`
    """
    begin = time.perf_counter()
    print("Restoring the bundled picture of a harbour ...", flush=True)
    import numpy as np

    import gncprior
    from gncprior.metrics import psnr
    from gncprior.picture_files import Picture, read_picture, side_by_side, write_picture

    folder = Path(gncprior.__file__).parent / "pictures"
    clean, noisy, scratches = (
        read_picture(folder / f"{name}.png").pages[0]
        for name in ("harbour", "harbour-noisy", "scratches")
    )
    mask = scratches > 0
    scratched = np.where(mask, np.uint8(255), clean)
    sigma = gncprior.estimate_sigma(noisy)
    denoised = gncprior.denoise(noisy, sigma)
    inpainted = gncprior.inpaint(clean, mask)

    files = []
    for name, before, after in [
        ("denoised", noisy, denoised),
        ("inpainted", scratched, inpainted),
    ]:
        was, became = (float(psnr(x, clean, data_range=255.0)) for x in (before, after))
        print(f"  {name:<10} PSNR {was:5.2f} dB before, {became:5.2f} dB after")
        files.append(out / f"{name}.png")
        write_picture(files[-1], Picture((side_by_side((before, after, clean)),)))
    print(f"  noise level estimated {sigma * 255:.1f}/255, truly {SIGMA * 255:.0f}/255")
    print(
        f"Done in {time.perf_counter() - begin:.1f} s; before, after and the original side by side:"
    )
    report(files)
    print("Your own picture: gncprior denoise IN OUT")
