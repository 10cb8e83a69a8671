"""The command `gncprior`.

One module per group of commands. A command is a function with a docstring and annotated keywords;
it is registered once, below. Modules of this package import nothing heavy when they are loaded (a
test checks it), so that help and argument errors answer at once: a command imports what it needs
when it runs.

`main` is the one place where failures become words: an expected one is one sentence on stderr and
exit code 2 (1 where the rest of a batch is done), Ctrl-C is exit code 130, and a bug is a traceback.
`--debug` shows every traceback.
"""

import os
import sys
import traceback
from collections.abc import Sequence

from cyclopts import App, CycloptsError, UnusedCliTokensError

from gncprior.cli import (
    batches,
    demo,
    evaluation,
    figures,
    info,
    learning,
    noise,
    restoring,
    schedules,
    shared,
)
from gncprior.errors import GncpriorError

# Optional package -> the extra that brings it.
EXTRAS = {"matplotlib": "plot", "tifffile": "tiff", "tensorboard": "train", "pooch": "train"}


def _version() -> str:
    import gncprior

    return f"gncprior {gncprior.__version__}"


app = App(
    name="gncprior",
    help="""Gradually non-convex image priors: energies that start convex and end sharp.

    Images are on the scale [0, 1]. A noise level σ is a standard deviation on that scale, and
    t = σ² a smoothing variance. `gncprior COMMAND --help` describes a command and shows an example;
    with `--debug` any command shows the traceback of an error.
    """,
    help_format="markdown",
    version=_version,
    suppress_keyboard_interrupt=False,  # main speaks
)
app["--help"].group = app["--version"].group = shared.OPTIONS

app.command(demo.demo, group=shared.START)
app.command(info.info, group=shared.START)
app.command(restoring.denoise, group=shared.RESTORING)
app.command(restoring.inpaint, group=shared.RESTORING)
app.command(restoring.estimate, group=shared.RESTORING)
app.command(learning.train, group=shared.LEARNING)
app.command(learning.calibrate, group=shared.LEARNING)
app.command(learning.inspect, group=shared.LEARNING)
app.command(schedules.learn_schedule, group=shared.LEARNING)
app.command(noise.learn_noise_level, group=shared.LEARNING)
app.command(evaluation.evaluate, group=shared.LEARNING)
app.command(figures.figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the given arguments (those of the process by default); the exit code."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    # Threads of torch that wait would otherwise hold on to the cores that the kernels' threads need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        app(
            [token for token in tokens if token != "--debug"],
            exit_on_error=False,
            print_error=False,
            verbose=False,
            result_action="return_value",
        )
        sys.stdout.flush()  # here, so that a full disk or a closed pipe is met below
    except (Exception, KeyboardInterrupt) as error:
        _forget_unwritten_output()
        if isinstance(error, BrokenPipeError):
            return 128 + 13  # as if ended by SIGPIPE: the reader has seen enough
        sentence = _sentence(error)
        if sentence is None:
            raise
        if "--debug" in tokens:
            traceback.print_exception(error)
        print("gncprior:", " ".join(sentence.split()), file=sys.stderr)
        if isinstance(error, KeyboardInterrupt):
            return 130
        return 1 if isinstance(error, batches.SomeFailedError) else 2
    return 0


def _sentence(error: BaseException) -> str | None:
    """What to tell the user about an expected failure; None if it is a bug."""
    match error:
        case KeyboardInterrupt():
            return "Stopped."
        case UnusedCliTokensError(unused_tokens=[*unused], command_chain=chain):
            command = " ".join(["gncprior", *(chain or ())])
            return f"Unexpected argument {' '.join(unused)!r}; see `{command} --help`."
        case CycloptsError() | GncpriorError():
            return str(error)
        case ModuleNotFoundError(name=str(name)) if (package := name.partition(".")[0]) in EXTRAS:
            what = f"gncprior[{EXTRAS[package]}]"
            return f"{package} is missing: install it with `pip install '{what}'`."
        case OSError(strerror=str(what), filename=None):
            return f"{what}."
        case OSError(strerror=str(what), filename=name):
            return f"{what}: {name}."
    return None


def _forget_unwritten_output() -> None:
    """Where stdout cannot be written any more, let the flush at exit go nowhere."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
