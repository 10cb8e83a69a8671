"""Training in processes of its own: killed anywhere, without room or rights, and under torchrun."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from PIL import Image
from test_training import picture

from gncprior import cli
from gncprior.checkpoints import load_prior, read_tensors
from gncprior.recipes import read_recipe
from gncprior.runs import RunFolder
from gncprior.training import State

pytestmark = pytest.mark.usefixtures("one_thread")

# A process that has loaded everything and forks children that train: a start costs milliseconds.
# (It has used no threads before, so forking is safe.)
NURSERY = textwrap.dedent("""
    import itertools, os, random, signal, sys, time
    sys.path.insert(0, {tests!r})
    import torch
    torch.set_num_threads(1)
    from pathlib import Path
    from gncprior import GncpriorError, checkpoints
    from gncprior.training import State
    from test_training import TINY, change, sha256, tiny
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
