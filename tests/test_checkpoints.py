"""Priors as files: exact round trips, and one sentence about whatever is wrong with a file."""

import dataclasses
import errno
import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import gncprior
from gncprior import GncpriorError, checkpoints
from gncprior.checkpoints import load_prior, read_tensors, save_prior, shipped, write_tensors
from gncprior.prior import Architecture, Prior

SMALL = Architecture(layers=2, filters=3, first_size=3, x_knots=7, t_knots=3)


def small(**changes) -> Prior:
    return Prior(dataclasses.replace(SMALL, **changes)).start(seed=1)


def sentence(what, *args) -> str:
    with pytest.raises(GncpriorError) as caught:
        what(*args)
    text = str(caught.value)
    assert "\n" not in text
    assert text[-1] in ".?"
    return text


@pytest.fixture
def saved(tmp_path) -> Path:
    file = tmp_path / "small.safetensors"
    save_prior(file, small(), {"steps": 7, "scores": {"psnr": 30.25}, "note": "größer"})
    return file


@pytest.mark.parametrize("scaled", [False, True])
def test_a_prior_comes_back_bit_for_bit_and_fixed(tmp_path, scaled):
    prior = small(scaled=scaled)
    save_prior(tmp_path / "a.safetensors", prior, {"steps": 7})
    again = load_prior(tmp_path / "a.safetensors")
    assert again.architecture == prior.architecture
    assert again.info["steps"] == 7
    state = prior.state_dict()
    assert list(again.state_dict()) == list(state)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert not again.training
    assert not any(p.requires_grad for p in again.parameters())
    x = torch.rand(2, 1, 8, 9, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # with a graph torch may order a sum differently
        assert torch.equal(again.energy(x, -3.0), prior.energy(x, -3.0))


def test_the_header_is_kept_and_saved_again(saved, tmp_path):
    prior = load_prior(saved)
    assert (prior.info["scores"], prior.info["note"]) == ({"psnr": 30.25}, "größer")
    save_prior(tmp_path / "again.safetensors", prior)
    assert (tmp_path / "again.safetensors").read_bytes() == saved.read_bytes()


def test_the_same_content_gives_the_same_bytes_and_no_other_file(tmp_path):
    for name in "ab":
        save_prior(tmp_path / f"{name}.safetensors", small(), {"b": 1, "a": 2})
    a, b = sorted(tmp_path.iterdir())
    assert a.read_bytes() == b.read_bytes()


def test_shipped_priors_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "WEIGHTS", tmp_path)
    assert "none is shipped" in sentence(load_prior, "r2")
    for name in ("r1", "r2", "r2-tuned"):
        save_prior(tmp_path / f"{name}.safetensors", small(), {"name": name})
    checkpoints.write_tensors(tmp_path / "r2-denoise-10.safetensors", {}, {"kind": "schedules"})
    assert shipped() == ["r1", "r2", "r2-tuned"]
    assert gncprior.load("r2").info["name"] == "r2"
    assert "r1, r2, r2-tuned; did you mean 'r2'?" in sentence(load_prior, "R2x")
    assert "give the path" in sentence(load_prior, "nonsense")


def test_every_shipped_prior_loads():
    # those of the package, whichever this version brings
    assert shipped() == [load_prior(name) and name for name in shipped()]
    assert "r1" in shipped()


class Bomb:
    """Whoever unpickles it is found out."""

    def __reduce__(self):
        return os._exit, (99,)


def test_a_pickle_is_never_opened(tmp_path):
    for name in ("weights.pt", "weights.safetensors", "weights"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
        sentence(load_prior, tmp_path / name)
    torch.save({"w": torch.zeros(1)}, tmp_path / "torch.pt")
    assert "pickle" in sentence(load_prior, tmp_path / "torch.pt")


def test_folders_and_missing_files(tmp_path, saved):
    assert "is a folder" in sentence(load_prior, tmp_path)
    assert "There is no file" in sentence(load_prior, tmp_path / "none.safetensors")


def test_every_truncation_and_every_damaged_byte_is_noticed(saved, tmp_path):
    good = saved.read_bytes()
    bad = tmp_path / "bad.safetensors"
    for length in [*range(40), *range(40, len(good), 97), len(good) - 1]:
        bad.write_bytes(good[:length])
        sentence(load_prior, bad)
    for place in [*range(16), *range(16, len(good), 89), len(good) - 1]:
        bad.write_bytes(good[:place] + bytes([good[place] ^ 0x41]) + good[place + 1 :])
        sentence(load_prior, bad)
    bad.write_bytes(good)
    assert load_prior(bad).info["steps"] == 7


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4000) + b"[" * 4000,
        save({"a": torch.zeros(2)}),
        save({"a": torch.zeros(2)}, {"gncprior": "[" * 100_000}),
        save({"a": torch.zeros(2)}, {"gncprior": "7"}),
    ],
    ids=["empty", "noise", "huge", "list", "deep", "bare", "deep header", "number"],
)
def test_absurd_files(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    assert str(tmp_path / "a.safetensors") in sentence(load_prior, tmp_path / "a.safetensors")


def rewritten(saved: Path, change) -> str:
    """What is said of a file whose content was changed and whose checksum was made to fit."""
    tensors, header = read_tensors(saved)
    change(tensors, header)
    write_tensors(saved, tensors, header)
    return sentence(load_prior, saved)


def test_headers_that_do_not_fit(saved):
    absurd = [
        ("layers", 10**9, "tensors"),
        ("layers", True, "layers = True"),
        ("filters", 10**6, "does not fit its own header"),
        ("filters", -1, "impossible architecture"),
        ("t_max", "1", "t_max = '1'"),
        ("t_max", float("nan"), "impossible architecture"),
        ("t_max", 10**400, "impossible architecture"),
        ("x_knots", 9, "splines.0.weight"),
        ("surprise", 1, "in the words of this version"),
    ]
    good = saved.read_bytes()
    for name, value, words in absurd:
        saved.write_bytes(good)
        text = rewritten(saved, lambda _, h: h["architecture"].update({name: value}))  # noqa: B023
        assert words in text, (name, text)
    for changes, words in [
        ({"format": 2}, "has format 2"),
        ({"kind": "schedule"}, "'schedule' and not a prior"),
        ({"architecture": None}, "does not say its architecture"),
    ]:
        saved.write_bytes(good)
        assert words in rewritten(saved, lambda _, h: h.update(changes))  # noqa: B023


def test_tensors_that_do_not_fit(saved):
    good = saved.read_bytes()
    for change, words in [
        (lambda t, _: t.pop("filters.0"), "filters.0 should be"),
        (lambda t, _: t.update({"other": t.pop("filters.0")}), "filters.0 should be"),
        (lambda t, _: t.update({"filters.0": t["filters.0"].double()}), "must be float32"),
        (lambda t, _: t["filters.0"].view(-1)[3:4].fill_(float("inf")), "not finite"),
        (lambda t, _: t.update({"filters.0": t["filters.0"][:2]}), "(2, 1, 3, 3)"),
    ]:
        saved.write_bytes(good)
        assert words in rewritten(saved, change)


def test_what_is_not_finite_is_not_saved(tmp_path):
    prior = small()
    with torch.no_grad():
        prior.filters[0][0, 0, 0, 0] = torch.nan
    assert "not finite" in sentence(save_prior, tmp_path / "a.safetensors", prior, {})
    assert not list(tmp_path.iterdir())


def test_tensors_of_other_kinds_with_any_header(tmp_path):
    tensors = {
        "eta": torch.linspace(0, 1, 5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "strided": torch.arange(12.0).view(3, 4).T,
        "number": torch.tensor(3),
    }
    write_tensors(tmp_path / "deep" / "s.safetensors", tensors, {"kind": "schedule", "n": [1, 2]})
    again, header = read_tensors(tmp_path / "deep" / "s.safetensors")
    assert header == {"format": 1, "kind": "schedule", "n": [1, 2]}
    assert set(again) == set(tensors)
    assert all(torch.equal(again[n], t) and again[n].dtype == t.dtype for n, t in tensors.items())


def test_a_full_disk_keeps_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints.os, "fsync", full)
    text = sentence(save_prior, saved, small(layers=1), {})
    assert text.startswith(f"Cannot write {saved}: No space left on device")
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]


def test_a_file_is_replaced_and_never_written_over(saved, tmp_path):
    before = saved.read_bytes()
    os.link(saved, tmp_path / "second name")
    save_prior(saved, small(layers=1), {})
    assert load_prior(saved).architecture.layers == 1
    assert (tmp_path / "second name").read_bytes() == before


def test_a_folder_that_is_a_file(saved):
    assert "Cannot write" in sentence(save_prior, saved / "inside.safetensors", small(), {})


def test_the_header_can_be_read_by_anyone(saved):
    """The file is plain safetensors: 8 bytes of length, JSON, data."""
    data = saved.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    assert json.loads(metadata["gncprior"])["architecture"] == dataclasses.asdict(SMALL)


def test_what_was_read_does_not_change_with_the_file(tmp_path):
    path = tmp_path / "p.safetensors"
    save_prior(path, Prior(Architecture(filters=4, first_size=3)).start())
    prior = load_prior(path)
    before = {name: tensor.clone() for name, tensor in prior.state_dict().items()}
    with path.open("r+b") as file:  # in place, as cp does
        file.write(b"\xff" * path.stat().st_size)
    for name, tensor in prior.state_dict().items():
        assert torch.equal(tensor, before[name])
