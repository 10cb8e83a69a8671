"""Training: it learns, it can be interrupted anywhere, and goes on to the very same result."""

import dataclasses
import errno
import hashlib
import itertools
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from gncprior import GncpriorError, checkpoints, training
from gncprior.checkpoints import load_prior, read_tensors, write_tensors
from gncprior.convexity import smallest_curvature
from gncprior.datasets import Dataset
from gncprior.deepening import deepened
from gncprior.gauges import one_step_psnr
from gncprior.recipes import Recipe, read_recipe
from gncprior.runs import RunFolder
from gncprior.training import State, train
from gncprior.workers import Workers

TINY = Recipe(
    filters=3, first_size=3, x_knots=9, t_knots=4, patch=12, batch=4, steps=24, gain=3.0,
    validate_every=0, log_every=5, save_seconds=0.0, tensorboard=False, calibrate=False,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


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
