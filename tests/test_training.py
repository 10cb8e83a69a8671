"""Training: it learns, it can be interrupted anywhere, and goes on to the very same result."""

import dataclasses
import errno
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gncprior import GncpriorError, checkpoints, cli, training
from gncprior.checkpoints import load_prior, read_tensors, write_tensors
from gncprior.convexity import smallest_curvature
from gncprior.datasets import Dataset
from gncprior.deepening import deepened
from gncprior.gauges import one_step_psnr
from gncprior.recipes import Recipe, read_recipe, recipe_names
from gncprior.runs import RunFolder
from gncprior.training import State, train
from gncprior.workers import Workers

TINY = Recipe(
    filters=3, first_size=3, x_knots=9, t_knots=4, patch=12, batch=4, steps=24, gain=3.0,
    validate_every=0, log_every=5, save_seconds=0.0, tensorboard=False, calibrate=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny steps: waking other threads would cost more than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def picture(seed: int, size: int = 24) -> np.ndarray:
    """Smooth shapes with an edge: something that can be denoised."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size] / size
    a, b, c, d = rng.uniform(-1, 1, 4)
    wave = 0.5 + 0.2 * np.sin(6 * (a * x + b * y)) + 0.25 * (c * x + d * y > 0)
    return (wave.clip(0, 1) * 255).astype(np.uint8)


def pictures(count: int, first: int = 0) -> Dataset:
    images = tuple(picture(first + k)[None] for k in range(count))
    return Dataset("pictures", tuple(f"{k}.png" for k in range(count)), images)


TRAINING, VALIDATION = pictures(6), pictures(2, first=100)


def tiny(out: Path, recipe: Recipe = TINY, **options) -> training.Outcome:
    return train(recipe, TRAINING, VALIDATION, out, **options)


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def log(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text("utf-8").splitlines()]


def change(**values) -> Recipe:
    return dataclasses.replace(TINY, **values)


# ---------------------------------------------------------------- learning


def test_it_learns_to_denoise_and_leaves_a_prior_with_its_story(tmp_path):
    recipe = change(
        steps=250, batch=8, lr_filters=3e-3, lr_splines=3e-2, average=0.9, validate_every=100,
        save_seconds=60.0, calibrate=True, t_rates=False,
    )  # fmt: skip
    outcome = tiny(tmp_path, recipe)
    untrained = one_step_psnr(State(recipe).prior.requires_grad_(False), VALIDATION)
    noisy = -20 * np.log10(25 / 255)
    assert outcome.scores["psnr_25"] > noisy + 5
    assert outcome.scores["psnr_25"] > untrained["psnr_25"] + 0.5
    prior = load_prior(outcome.prior_file)
    assert one_step_psnr(prior, VALIDATION) == pytest.approx(outcome.scores, abs=1e-9)
    info = prior.info
    assert info["recipe"] == dataclasses.asdict(recipe)
    assert info["scores"] == {"one-step PSNR, pictures": outcome.scores}
    assert (info["steps"], info["seed"], info["data"]["images"]) == (250, 0, 6)
    assert (
        info["calibration"]["mean_time_slope_after"] < info["calibration"]["mean_time_slope_before"]
    )
    events = log(tmp_path)
    assert [e["step"] for e in events if e["event"] == "validation"] == [100, 200, 250]
    assert [e["step"] for e in events if e["event"] == "progress"] == list(range(5, 251, 5))
    losses = [e["loss"] for e in events if e["event"] == "progress"]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


@pytest.mark.parametrize("layers", [1, 2])
def test_a_prior_kept_convex_at_t_max_has_no_negative_curvature_there(tmp_path, layers):
    recipe = change(layers=layers, steps=60, lr_splines=3e-2, t_rates=False)
    x = torch.randn(1, 10, 10, generator=torch.Generator().manual_seed(0))
    free = load_prior(tiny(tmp_path / "free", recipe).prior_file)
    kept = load_prior(tiny(tmp_path / "kept", dataclasses.replace(recipe, convex=True)).prior_file)
    high = kept.t_hat_range[1]
    assert smallest_curvature(free, x, high)[0] < -1e-3
    assert smallest_curvature(kept, x, high)[0] > 0


def test_tweedie_psnr_of_a_known_denoiser():
    """A prior with R = ½‖x‖²/(t+s): x ↦ x·s/(s+t), whose error is known."""
    levels = {}

    class Shrink:
        filters = [torch.zeros(1)]  # noqa: RUF012

        def grad(self, z, t_hat, buffers=None):
            levels[t_hat] = z
            return z / (np.exp(t_hat) + 0.25)

    one = Dataset("one", ("a",), (picture(3)[None],))
    x = one.tensor(0)
    scores = one_step_psnr(Shrink(), one, (25,))
    t = (25 / 255) ** 2
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal(x.shape)).float()
    error = (x + 25 / 255 * noise) * (1 - t / (t + 0.25)) - x
    assert scores == {
        "psnr_25": pytest.approx(float(-10 * error.square().mean().log10()), abs=1e-4)
    }
    assert list(levels) == [pytest.approx(np.log(t))]


def test_one_step_by_hand():
    """State.advance is AdaBelief's first step with the rates of the two groups."""
    recipe = change(lr_filters=0.01, lr_splines=0.1, average=0.5, warmup=1, steps=10, t_rates=False)
    state = State(recipe)
    before = [p.detach().clone() for p in state.params]
    sizes = [p.numel() for p in state.params]
    assert state.advance(torch.ones(sum(sizes)))
    # m̂/√ŝ = 1/0.9 for a first gradient of 1; the warm-up halves the rate; the average keeps 0.1
    for p, old, mean, rate in zip(
        state.params, before, state.average.tensors, (0.01, 0.1), strict=True
    ):
        torch.testing.assert_close(p.detach(), old - 0.5 * rate / 0.9)
        torch.testing.assert_close(mean, old - 0.9 * 0.5 * rate / 0.9)


def test_chunks_give_the_same_gradient():
    def gradient(chunk: int) -> torch.Tensor:
        recipe = change(chunk=chunk, batch=7)
        loop = training._Loop(State(recipe), TRAINING, VALIDATION, Workers("cpu"), None, {})
        return loop._gradient(False)[0]

    whole = gradient(0)
    for chunk in (1, 3, 7):
        torch.testing.assert_close(
            gradient(chunk), whole, rtol=1e-5, atol=1e-6 * float(whole.abs().max())
        )


# ---------------------------------------------------------------- what goes wrong


class Sick:
    """An objective that sometimes gives gradients that are not finite."""

    steps: set[int] = set()  # noqa: RUF012

    def __init__(self, prior, **_):
        self.prior = prior
        self.calls = 0

    def __call__(self, x, noise, t_hat):
        from gncprior.score_matching import Terms

        value = torch.nan if self.calls in self.steps else 0.01
        self.calls += 1
        for p in self.prior.parameters():
            p.grad = torch.full_like(p, value)
        return Terms(value, 0.0, 0.0)


def test_steps_without_a_finite_gradient_are_skipped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "ScoreMatching", Sick)
    monkeypatch.setattr(Sick, "steps", {2, 3, 11})
    tiny(tmp_path)
    events = log(tmp_path)
    assert [e["step"] for e in events if e["event"] == "skipped"] == [3, 4, 12]
    assert [e["skipped"] for e in events if e["event"] == "progress"] == [2, 2, 3, 3, 3]
    assert all(e["loss"] == pytest.approx(0.01) for e in events if e["event"] == "progress")
    assert load_prior(tmp_path / "prior.safetensors").info["skipped"] == 3


def test_many_in_a_row_are_fatal(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "ScoreMatching", Sick)
    monkeypatch.setattr(Sick, "steps", set(range(7, 30)))
    with pytest.raises(GncpriorError, match="not finite in 5 steps in a row, up to step 12"):
        tiny(tmp_path)
    assert not (tmp_path / "prior.safetensors").exists()


def test_a_run_is_not_overwritten_nor_continued_with_other_choices(tmp_path):
    tiny(tmp_path)
    with pytest.raises(GncpriorError, match="holds a run already: go on with --resume"):
        tiny(tmp_path)
    with pytest.raises(GncpriorError, match="other values of batch, lr_splines"):
        tiny(tmp_path, change(lr_splines=0.5, batch=5), resume=True)
    with pytest.raises(GncpriorError, match="started with other images"):
        train(TINY, pictures(5), VALIDATION, tmp_path, resume=True)
    before = sha256(tmp_path / "prior.safetensors")
    again = tiny(tmp_path, change(log_every=7, save_seconds=9.0), resume=True)
    assert again.step == TINY.steps
    first, second = (load_prior(tmp_path / "prior.safetensors").state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(before) == 64


def test_two_runs_cannot_share_a_folder(tmp_path):
    with RunFolder(tmp_path), pytest.raises(GncpriorError, match="Another process is training"):
        tiny(tmp_path)
    assert tiny(tmp_path).step == TINY.steps


def test_a_full_disk_ends_with_a_sentence_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    reference = tmp_path / "whole"
    tiny(reference)
    calls = itertools.count()
    real = os.fsync

    def fsync(descriptor):
        if next(calls) >= 24:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    out = tmp_path / "full"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "fsync", fsync)
        with pytest.raises(
            GncpriorError, match=r"Cannot write .*: No space left on device; make room"
        ):
            tiny(out)
    kept = RunFolder(out).checkpoints()
    assert len(kept) == 2
    step = read_tensors(kept[-1])[1]["counters"][0]
    assert 0 < step < TINY.steps
    assert not list(out.glob("*.part"))
    assert tiny(out, resume=True).step == TINY.steps
    assert sha256(out / "prior.safetensors") == sha256(reference / "prior.safetensors")


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path):
    with RunFolder(tmp_path) as run:
        run.open_log(0, tensorboard=False)
        run._log = Path("/dev/full").open("w")  # noqa: SIM115  (closed below)
        with pytest.raises(GncpriorError, match=r"log\.jsonl: No space left on device"):
            run.note({"event": "x"})
        with pytest.raises(OSError, match="No space"):
            run._log.close()


# ---------------------------------------------------------------- going on


def test_resume_is_bit_identical_and_the_log_is_that_of_one_run(tmp_path):
    recipe = change(validate_every=8)
    whole = tiny(tmp_path / "whole", recipe)

    class StopError(Exception):
        pass

    def stop_at(kind: str, step: int):
        def watch(event):
            if event["event"] == kind and event["step"] == step:
                raise StopError

        return watch

    # after a validation comes a checkpoint, so that these two are logged and then forgotten
    for kind, step in [
        ("step", 3),
        ("validation", 8),
        ("step", 10),
        ("validation", 16),
        ("step", 23),
    ]:
        with pytest.raises(StopError):
            tiny(tmp_path / "parts", recipe, resume=step > 3, watch=stop_at(kind, step))
    parts = tiny(tmp_path / "parts", recipe, resume=True)
    assert sha256(parts.prior_file) == sha256(whole.prior_file)
    kinds = ("validation", "finished")
    one, many = (
        [e for e in log(tmp_path / name) if e["event"] in kinds] for name in ("whole", "parts")
    )
    assert one == many
    assert read_recipe(tmp_path / "parts" / "recipe.toml") == recipe


def test_a_term_signal_saves_and_ends(tmp_path):
    recipe = change(save_seconds=1000.0)
    whole = tiny(tmp_path / "whole", recipe)

    def watch(event):
        if event["event"] == "step" and event["step"] == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    stopped = tiny(tmp_path / "run", recipe, watch=watch)
    assert signal.getsignal(signal.SIGTERM) is before
    assert stopped == training.Outcome(10, {}, None, signal.SIGTERM)
    assert log(tmp_path / "run")[-1] == {"event": "stopped", "step": 10}
    done = tiny(tmp_path / "run", recipe, resume=True)
    assert sha256(done.prior_file) == sha256(whole.prior_file)


def test_the_prior_is_the_average_of_the_weights(tmp_path):
    prior = load_prior(tiny(tmp_path).prior_file)
    tensors, _ = read_tensors(RunFolder(tmp_path).checkpoints()[-1])
    for k, tensor in enumerate(prior.parameters()):
        assert torch.equal(tensor, tensors[f"average.{k}"])
        assert not torch.equal(tensor, tensors[f"weights.{k}"])


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    tiny(tmp_path / "whole")
    out = tmp_path / "parts"
    tiny(out)
    (out / "prior.safetensors").unlink()
    older, newest = RunFolder(out).checkpoints()
    data = bytearray(newest.read_bytes())
    data[-20] ^= 1
    newest.write_bytes(data)
    heard = []
    outcome = tiny(out, resume=True, watch=heard.append)
    assert sha256(outcome.prior_file) == sha256(tmp_path / "whole" / "prior.safetensors")
    told = [event for event in heard if event["event"] == "damaged"]
    assert [event["file"] for event in told] == [newest.name]
    assert (out / newest.name).with_suffix(".damaged").exists()
    assert older.name < newest.name

    for file in RunFolder(out).checkpoints():
        file.write_bytes(b"")
    with pytest.raises(GncpriorError, match=r"All checkpoints in .* are damaged"):
        tiny(out, resume=True)


def test_a_checkpoint_of_another_kind_of_recipe(tmp_path):
    tiny(tmp_path)
    file = RunFolder(tmp_path).checkpoints()[-1]
    tensors, header = read_tensors(file)
    header["recipe"]["flavour"] = 3
    write_tensors(file, tensors, header)
    with pytest.raises(GncpriorError, match="sets flavour, which no recipe has"):
        tiny(tmp_path, resume=True)


# ---------------------------------------------------------------- other processes

# A process that has loaded everything and forks children that train: a start costs milliseconds.
# (It has used no threads before, so forking is safe.)
NURSERY = textwrap.dedent("""
    import os, random, signal, sys, time
    sys.path.insert(0, {tests!r})
    import torch
    torch.set_num_threads(1)
    from dataclasses import replace
    from pathlib import Path
    from test_training import *
    State(TINY)  # what torch loads with its first optimizer, so that children need not

    def child(work):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work()
                code = 0
            except GncpriorError as error:
                print(error, flush=True)
                code = 2
            finally:
                os._exit(code)
        return pid

    def end(pid):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
""")


def nursery(script: str, **environment: str) -> str:
    head = NURSERY.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(script)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_twenty_kills_and_the_same_weights(tmp_path):
    out = nursery(f"""
        folder = Path({str(tmp_path)!r})
        recipe = change(steps=100, save_seconds=0.01)
        assert end(child(lambda: tiny(folder / "whole", recipe))) == 0
        wanted = sha256(folder / "whole" / "prior.safetensors")
        random.seed(7)

        def suicidal(run, call):
            # ends at a given fsync: the file is written and not renamed, or renamed and not settled
            calls = itertools.count()
            real = os.fsync
            def fsync(descriptor):
                if next(calls) == call:
                    os.ftruncate(descriptor, 1000) if call % 2 == 0 else None
                    os.kill(os.getpid(), signal.SIGKILL)
                real(descriptor)
            checkpoints.os.fsync = fsync
            tiny(run, recipe, resume=True)

        kills, inside, run = 0, 0, 0
        while kills < 20:
            run += 1
            here = folder / f"run{{run}}"
            while True:
                if kills >= 20:
                    code = end(child(lambda: tiny(here, recipe, resume=True)))
                elif kills % 3 == 0:
                    # two syncs a file: log, recipe, first checkpoint come before
                    code = end(child(lambda: suicidal(here, random.randrange(4, 16))))
                    inside += code == -signal.SIGKILL
                else:
                    pid = child(lambda: tiny(here, recipe, resume=True))
                    time.sleep(random.uniform(0.02, 0.2))
                    os.kill(pid, signal.SIGKILL)
                    code = end(pid)
                kills += code == -signal.SIGKILL
                if code != -signal.SIGKILL:
                    break
            assert code == 0, code
            assert sha256(here / "prior.safetensors") == wanted
        print(kills, inside, run)
    """)
    kills, inside, runs = map(int, out.split())
    assert (kills, inside) >= (20, 5)
    assert runs >= 1


def test_a_read_only_folder_and_a_disk_that_fills_up(tmp_path):
    """With real system calls: as a user without rights, and under a limit of the size of files."""
    tmp_path.chmod(0o755)
    (tmp_path / "locked").mkdir(mode=0o555)
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    out = nursery(f"""
        import resource
        folder = Path({str(tmp_path)!r})

        def nobody(name):
            if os.geteuid() == 0:
                for parent in folder.parents:  # the folders of tests are closed to others
                    os.stat(parent)
                os.chdir(folder)
                os.setgid(65534)
                os.setuid(65534)
            tiny(Path(name))

        def limited():
            def watch(event):
                if event.get("step") == 12 and event["event"] == "step":
                    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
            tiny(folder / "open" / "run", watch=watch)

        os.chdir(folder)
        print(end(child(lambda: nobody("locked/run"))))
        print(end(child(limited)))
    """)
    first, one, second, two = out.splitlines()
    assert (
        first == "Cannot write locked/run: Permission denied; make room or choose another folder."
    )
    assert re.fullmatch(
        r"Cannot write .*/open/run/\S+: File too large; make room or choose .*", second
    )
    assert (one, two) == ("2", "2")
    kept = RunFolder(tmp_path / "open" / "run").checkpoints()
    assert [read_tensors(file)[1]["counters"][0] for file in kept] == [10, 11]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def test_two_processes_under_torchrun_equal_one(tmp_path):
    for k in range(7):
        Image.fromarray(picture(k)).save(tmp_path / f"{k}.png")
    flags = {
        "filters": 3,
        "first_size": 3,
        "x_knots": 9,
        "t_knots": 4,
        "patch": 12,
        "batch": 8,
        "steps": 20,
        "lr_filters": 1e-3,  # not those of a recipe, which may be tuned
        "lr_splines": 1e-3,
        "t_weight": 1.0,
        "warmup": 0,
    }
    line = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    line += ["--layers=2", "--average=0", "--no-calibrate", "--no-tensorboard", "--t-fraction=1"]
    command = ["-m", "gncprior", "train", f"--data={tmp_path}", *line]
    done = subprocess.run(
        [*TORCHRUN, *command, f"--out={tmp_path / 'two'}"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("wrote") == 1
    assert cli.main([*command[2:], f"--out={tmp_path / 'one'}"]) == 0
    one, two = (load_prior(tmp_path / name / "prior.safetensors") for name in ("one", "two"))
    moved = 0.0
    for name, start in (
        State(read_recipe(tmp_path / "one" / "recipe.toml")).prior.state_dict().items()
    ):
        a, b = one.state_dict()[name], two.state_dict()[name]
        moved = max(moved, float((a - start).norm() / start.norm()))
        assert float((a - b).norm()) <= 1e-5 * float(a.norm())
    assert moved > 1e-3  # twenty steps went somewhere


def test_nothing_holds_the_group_of_processes_after_its_end(tmp_path):
    """A group that is held keeps its threads, and these may abort a process that ends."""
    script = tmp_path / "script.py"
    script.write_text(
        "import weakref\n"
        "import torch\n"
        "from gncprior.optimizers import AdaBelief\n"
        "from gncprior.workers import Workers\n"
        "with Workers('cpu') as workers:\n"
        "    group = weakref.ref(torch.distributed.group.WORLD)\n"
        "    AdaBelief([torch.zeros(1, requires_grad=True)])\n"
        "    assert workers.sum(torch.ones(1)) == 2\n"
        "    assert group() is not None\n"
        "assert group() is None\n",
        "utf-8",
    )
    done = subprocess.run(
        [*TORCHRUN, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- recipes and the command


def test_recipes_of_the_package():
    assert {"fast", "paper"} <= set(recipe_names())
    paper = read_recipe("paper")
    assert (paper.patch, paper.batch, paper.steps) == (96, 128, 100_000)
    assert (paper.lr_filters, paper.lr_splines) == (1e-3, 1e-3)
    assert paper.lr_filters * paper.lr_end == pytest.approx(5e-5)
    assert (paper.filters, paper.first_size, paper.inner_size, paper.x_range) == (48, 7, 3, 3.5)
    assert (paper.t_min, paper.t_max, paper.t_weight, paper.t_fraction) == (1e-4, 1.0, 1.0, 1.0)
    assert [read_recipe(name).layers for name in recipe_names()]


def test_recipes_go_through_toml(tmp_path):
    recipe = change(lr_splines=1e-7, boundary=True, seed=2**40)
    (tmp_path / "r.toml").write_text(recipe.to_toml(), "utf-8")
    assert read_recipe(tmp_path / "r.toml") == recipe


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("patch = 0", "patch must be positive"),
        ("patch = 1.5", "patch must be a whole number"),
        ("boundary = 1", "boundary must be true or false"),
        ("gain = 'x'", "gain must be a number"),
        ("gain = nan", "gain must be a number, not nan"),
        ("channels = 2", "channels must be 1"),
        ("average = 1.0", "average must be in"),
        ("seed = -1", "seed must be 0 or more"),
        ("lr_spline = 1", "lr_spline, which no recipe has; did you mean lr_splines?"),
        ("patch = ", "is not TOML"),
    ],
)
def test_recipes_that_are_wrong(tmp_path, text, words):
    (tmp_path / "r.toml").write_text(text, "utf-8")
    with pytest.raises(GncpriorError) as caught:
        read_recipe(tmp_path / "r.toml")
    assert words in str(caught.value)
    assert "r.toml" in str(caught.value)


def test_recipes_that_do_not_exist(tmp_path):
    with pytest.raises(GncpriorError, match=r"There is no recipe papr: .* did you mean paper\?"):
        read_recipe("papr")
    with pytest.raises(GncpriorError, match=r"Cannot read the recipe .*none.toml: No such file"):
        read_recipe(tmp_path / "none.toml")


@pytest.fixture
def folder(tmp_path) -> Path:
    for k in range(4):
        Image.fromarray(picture(k)).save(tmp_path / f"{k}.png")
    return tmp_path


FLAGS = "--filters 2 --first-size 3 --x-knots 7 --t-knots 3 --patch 12 --batch 2 --no-calibrate"


def test_the_command_trains_resumes_and_says_so(folder, capsys):
    line = f"train --data {folder} --out {folder}/run {FLAGS} --steps 6 --validate-every 3".split()
    assert cli.main(line) == 0
    out, err = capsys.readouterr()
    assert "Training on 3 images (folder" in out
    assert "validating on 1 (1 held out" in out
    assert re.search(
        r"step 3: PSNR at σ = 5, 15, 25, 50/255: [\d.]+  [\d.]+  [\d.]+  [\d.]+ dB", out
    )
    assert f"wrote {folder}/run/prior.safetensors" in out
    assert err == ""
    assert (folder / "run" / "tensorboard").is_dir()
    before = sha256(folder / "run" / "prior.safetensors")
    assert cli.main(["train", "--data", str(folder), "--out", f"{folder}/run", "--resume"]) == 0
    assert sha256(folder / "run" / "prior.safetensors") == before
    capsys.readouterr()
    assert cli.main(line) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert cli.main([*line, "--resume", "--batch", "3"]) == 2


def test_flags_go_on_top_of_a_recipe_and_a_dry_run_writes_nothing(folder, capsys):
    (folder / "mine.toml").write_text("steps = 1000\nbatch = 7\nseed = 5", "utf-8")
    line = f"train --recipe {folder}/mine.toml {FLAGS} --out {folder}/run --dry-run"
    assert cli.main(line.split()) == 0
    out = capsys.readouterr().out
    assert {"steps = 1000", "batch = 2", "seed = 5", "calibrate = false"} <= set(out.splitlines())
    # 2 filters of 3×3, and for each (3+4)·(7+4) weights
    assert re.search(
        r"^172 parameters; \d+ ms a step on noise, so about .* for 1000 steps\.$", out, re.MULTILINE
    )
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": "nowhere"}, "nowhere does not exist"),
        ({"patch": "500"}, "holds a patch of 500×500"),
        ({"recipe": "nonsense"}, "There is no recipe nonsense"),
        ({"batch": "-3"}, "batch must be positive"),
        ({"device": "abacus"}, "The device 'abacus' cannot be used here"),
        ({"out": "0.png"}, "Cannot write 0.png"),
        ({"t-max": "1e-5"}, "ranges of t"),
    ],
)
def test_errors_of_the_command_are_one_sentence(folder, monkeypatch, capsys, changes, words):
    monkeypatch.chdir(folder)
    options = {"data": ".", "out": "run", "filters": "2", "patch": "12", "batch": "2", "steps": "2"}
    line = [f"--{name}={value}" for name, value in (options | changes).items()]
    assert cli.main(["train", *line]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_ctrl_c_ends_the_command_with_the_way_to_go_on(folder, monkeypatch, capsys):
    real = training.train

    def interrupted(*args, watch, **options):
        def hear(event):
            watch(event)
            if event["event"] == "step" and event["step"] == 4:
                os.kill(os.getpid(), signal.SIGINT)

        return real(*args, watch=hear, **options)

    monkeypatch.setattr(training, "train", interrupted)
    with pytest.raises(SystemExit) as caught:
        cli.main(f"train --data {folder} --out {folder}/run {FLAGS} --steps 50".split())
    assert caught.value.code == 130
    assert f"Stopped at step 5; go on with --resume --out {folder}/run." in capsys.readouterr().out
    assert RunFolder(folder / "run").checkpoints()[-1].name == "checkpoint-000000005.safetensors"


def test_training_starts_from_a_prior_of_fewer_layers(tmp_path):
    small = {"filters": 3, "first_size": 3, "x_knots": 9, "t_knots": 4}
    file = tmp_path / "r1.safetensors"
    shallow = State(Recipe(**small, seed=3)).prior
    checkpoints.save_prior(file, shallow)
    started = State(Recipe(**small, layers=2, start=str(file))).prior
    want = deepened(shallow, 2).state_dict()
    assert all(torch.equal(value, want[name]) for name, value in started.state_dict().items())
    assert all(p.requires_grad for p in started.parameters())
    with pytest.raises(GncpriorError, match="the recipe wants"):
        State(Recipe(**small | {"x_knots": 11}, layers=2, start=str(file)))
