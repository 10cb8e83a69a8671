"""`gncprior learn-noise-level`: how the noise level of a picture is read off the energy."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gncprior.cli.evaluation import Threads, progress_bar, use_threads


def learn_noise_level(
    *,
    prior: Annotated[
        str, Parameter(help="Name of a shipped prior of one layer, or a file.")
    ] = "r1",
    data: Annotated[
        Path | None,
        Parameter(help="Folder of images, or of BSDS500; else $GNCPRIOR_DATA, else a download."),
    ] = None,
    levels: Annotated[int, Parameter(help="Noise levels for every image.")] = 16,
    seed: Annotated[int, Parameter(help="Of crops and noise.")] = 0,
    threads: Threads = None,
    out: Annotated[
        Path | None, Parameter(help="File for the result. [default: beside the prior]")
    ] = None,
) -> None:
    """Learn to read the noise level of a picture off the terms of a prior's energy.

    The terms of all filters are weighed by least squares on crops of clean images with noise of many
    levels. `denoise` and `estimate` use the file that stands beside the prior r1.

    **Example:** `gncprior learn-noise-level --prior r1 --data pictures`
    """
    from gncprior.checkpoints import load_prior
    from gncprior.datasets import open_dataset
    from gncprior.noise_reading import learn, reading_path

    use_threads(threads)
    model = load_prior(prior)
    file = reading_path(prior) if out is None else out
    training, _ = open_dataset(data, model.architecture.channels)
    with progress_bar(len(training), "images") as advance:
        reading = learn(model, training.images, levels=levels, seed=seed, done=advance)
    reading.save(file)
    print(f"  wrote {file}")
