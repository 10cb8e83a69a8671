"""The command: quick, helpful, and honest about failures."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from gncprior import GncpriorError, cli

HEAVY = ["matplotlib", "numpy", "PIL", "safetensors", "scipy", "torch"]

# Two commands that only the tests know, to try a real process: one waits, one prints for ever.
PROCESS = """
import sys, time
from gncprior import cli

@cli.app.command
def wait():
    print("ready", flush=True)
    time.sleep(60)

@cli.app.command
def chatter():
    while True:
        print("more")

sys.exit(cli.main())
"""


def commands(app: App = cli.app, chain: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command as its words; the bare command first."""
    yield chain
    for name in app:
        if not name.startswith("-"):
            yield from commands(app[name], (*chain, name))


def run(*args: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gncprior", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def start(name: str, **options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def one_sentence(err: str) -> str:
    """The text of stderr, which must be a single line in the command's name."""
    assert re.fullmatch(r"gncprior: [^\n]+[.?]\n", err), err
    assert "Traceback" not in err
    return err.removeprefix("gncprior: ").rstrip()


def test_help_and_argument_errors_import_nothing_heavy():
    lines = [[*chain, "--help"] for chain in commands()]
    lines += [["--version"], [], ["figur"], ["figure", "mixture", "--outt", "x"], ["demo", "x"]]
    script = (
        "import sys\n"
        "from gncprior import cli\n"
        f"codes = [cli.main(line) for line in {lines!r}]\n"
        f"print(codes, [m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    codes = [0] * (len(lines) - 3) + [2] * 3
    assert done.stdout.splitlines()[-1] == f"{codes} []"


def test_import_of_the_package_imports_nothing_heavy():
    script = f"import gncprior, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("args", [["--help"], ["figure", "mixture", "--outt", "x"]])
def test_answers_within_half_a_second(args):
    def seconds() -> float:
        # Time of the processor: all that the start-up does is compute, and a busy machine must not
        # fail the test.
        before = os.times()
        run(*args)
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])

    assert min(seconds() for _ in range(5)) < 0.5


@pytest.mark.parametrize("chain", [c for c in commands() if c], ids=" ".join)
def test_every_command_has_a_help_with_an_example_that_parses(chain, capsys):
    assert cli.main([*chain, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"Usage: gncprior {' '.join(chain)}")
    children = [child[-1] for child in commands() if child[:-1] == chain]
    if children:  # each has its own example
        assert all(child in text for child in children)
    else:
        example = re.search(r"Example: gncprior (.*?)(?= ╭|$)", text)
        words = shlex.split(example[1])
        assert tuple(words[: len(chain)]) == chain
        cli.app.parse_args(words, exit_on_error=False, print_error=False)


def test_help_is_grouped(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    titles = re.findall(r"╭─ (.*?) ─", out)
    assert (titles[0], titles[-1]) == ("Start here", "Options")
    assert "Figures of the paper" in titles
    assert "--debug" in out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"gncprior \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("figur", ['"figur"', 'Did you mean "figure"?']),
        ("figure mixtur", ['"mixtur"', 'Did you mean "mixture"?']),
        ("figure mixture --outt x", ["--outt", "Did you mean --out?"]),
        ("figure mixture --quik", ["--quik", "Did you mean --quick?"]),
        ("demo surplus", ["Unexpected argument 'surplus'", "gncprior demo --help"]),
        ("demo --out", ["--out"]),
    ],
)
def test_argument_errors(line, words, capsys):
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    sentence = one_sentence(err)
    assert all(word in sentence for word in words), sentence


def test_module_and_exit_code_of_the_process():
    done = run("figur")
    assert done.returncode == 2
    assert "figure" in one_sentence(done.stderr)


def failing(error: BaseException):
    def app(*args, **kwargs):
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (
            GncpriorError("The mask is empty:\n choose another."),
            2,
            "The mask is empty: choose another.",
        ),
        (OSError(28, "No space left on device", "a.png"), 2, "No space left on device: a.png."),
        (PermissionError(13, "Permission denied"), 2, "Permission denied."),
        (
            ModuleNotFoundError("No module named 'matplotlib.pyplot'", name="matplotlib.pyplot"),
            2,
            "matplotlib is missing: install it with `pip install 'gncprior[plot]'`.",
        ),
        (KeyboardInterrupt(), 130, "Stopped."),
    ],
)
def test_expected_failures_are_one_sentence(error, code, sentence, monkeypatch, capsys):
    monkeypatch.setattr(cli, "app", failing(error))
    assert cli.main([]) == code
    assert one_sentence(capsys.readouterr().err) == sentence
    assert cli.main(["--debug"]) == code
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith(f"\ngncprior: {sentence}\n")


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), ModuleNotFoundError("x", name="gncprior.x")]
)
def test_bugs_keep_their_traceback(error, monkeypatch):
    monkeypatch.setattr(cli, "app", failing(error))
    with pytest.raises(type(error)):
        cli.main([])


def test_extras_named_in_errors_exist():
    from importlib.metadata import metadata

    assert set(cli.EXTRAS.values()) <= set(metadata("gncprior").get_all("Provides-Extra"))


def test_ctrl_c_ends_cleanly():
    # A shell may have left SIGINT ignored for its background jobs.
    restore = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    with start("wait", preexec_fn=restore) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (130, "")
    assert one_sentence(err) == "Stopped."


def test_closed_pipe_ends_silently():
    with start("chatter") as process:
        assert process.stdout.readline() == "more\n"
        process.stdout.close()
        assert process.wait(timeout=10) == 128 + signal.SIGPIPE
        assert process.stderr.read() == ""


def test_full_disk_is_one_sentence():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", PROCESS, "chatter"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert one_sentence(done.stderr) == "No space left on device."


def test_figure_hands_its_options_on_and_says_where_the_files_are(tmp_path, monkeypatch, capsys):
    from gncprior.experiments import mixture

    calls = []

    def draw(out: Path, quick: bool = False) -> list[Path]:
        calls.append((out, quick))
        return [out / "mixture.png"]

    monkeypatch.setattr(mixture, "run", draw)
    for line in ["figure mixture", f"figure mixture --quick --out {tmp_path}"]:
        assert cli.main(line.split()) == 0
        assert str(calls[-1][0] / "mixture.png") in capsys.readouterr().out
    assert calls == [(Path("out/figures"), False), (tmp_path, True)]


def test_demo_restores_the_bundled_picture(tmp_path, capsys):
    assert cli.main(["demo", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    before, after = zip(
        *re.findall(r"PSNR +([\d.]+) dB before, +([\d.]+) dB after", out), strict=True
    )
    assert [float(x) for x in before] == pytest.approx(
        [20.27, 17.22], abs=0.01
    )  # the drawn pictures
    assert float(after[0]) > 29 and float(after[1]) > 37
    for name in ("denoised", "inpainted"):
        assert str(tmp_path / f"{name}.png") in out and (tmp_path / f"{name}.png").is_file()


def test_info_names_what_runs_here(monkeypatch, capsys):
    import torch

    import gncprior

    monkeypatch.setenv("GNCPRIOR_DATA", os.devnull)
    assert cli.main(["info"]) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert facts["gncprior"] == f"{gncprior.__version__} in {Path(gncprior.__file__).parent}"
    assert facts["torch"] == f"{torch.__version__}, {torch.get_num_threads()} threads"
    assert re.match(r"(amx|avx512bf16|avx512|avx2|portable|torch): \w", facts["kernels"])
    assert facts["data"] == f"{os.devnull} (GNCPRIOR_DATA), which does not exist"


def test_waiting_threads_leave_the_cores_to_others_unless_the_user_wants_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert cli.main(["--version"]) == 0
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert cli.main(["--version"]) == 0
    assert os.environ["OMP_WAIT_POLICY"] == "active"
