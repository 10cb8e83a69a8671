"""`gncprior train`: what it says, and how it ends."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image
from test_training import picture, sha256

from gncprior import cli, training
from gncprior.checkpoints import load_prior
from gncprior.runs import RunFolder

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_a_prior_is_calibrated_and_balanced_on_a_folder(folder, capsys):
    flags = FLAGS.replace(" --no-calibrate", "")
    train = f"train --data {folder} --out {folder}/run {flags} --steps 6 --convex"
    assert cli.main(train.split()) == 0
    before = load_prior(folder / "run" / "prior.safetensors")
    line = f"calibrate --prior {folder}/run/prior.safetensors --data {folder} --out {folder}/b.safetensors"
    assert cli.main([*line.split(), "--balance", "100"]) == 0
    out = capsys.readouterr().out
    assert f"wrote {folder}/b.safetensors" in out
    after = load_prior(folder / "b.safetensors")
    facts = after.info["calibration"]
    assert facts["balance"] == 100
    assert facts["spread_after"] < facts["spread_before"]
    assert after.info["recipe"] == before.info["recipe"]
    assert torch.equal(after.filters[0], before.filters[0])
    assert not torch.equal(after.splines[0].weight, before.splines[0].weight)
    assert cli.main([*line.split(), "--balance", "-1"]) == 2
    assert "--balance must be 0 or more" in capsys.readouterr().err
