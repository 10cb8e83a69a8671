"""Priors and other tensors as files: safetensors with a JSON header, never a pickle.

A file holds named tensors and, in its metadata under ``gncprior``, a JSON object that says what they
are: ``format``, ``kind``, whatever the writer knows (architecture, recipe, data, scores), and
``sha256``, a digest over all of that and over name, type, shape and bytes of every tensor.
A file is written beside its place and renamed into it when it is safe on the disk, so that there is
the old file or the new one and never half of one; a file that was damaged later does not pass the
digest.  Whatever is wrong with a file is said in one sentence.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gncprior.errors import GncpriorError
from gncprior.prior import Architecture, Prior

FORMAT = 1
SUFFIX = ".safetensors"
WEIGHTS = Path(__file__).parent / "weights"


# ---------------------------------------------------------------- tensors and a header


def write_file(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` such that, whatever happens, the old content or the new one is there."""
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        if os.name == "posix":  # the new name must reach the disk too
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> GncpriorError:
    """What to say of a full disk, a read-only folder and the like."""
    why = error.strerror or str(error)
    return GncpriorError(f"Cannot write {path}: {why}; make room or choose another folder.")


def write_tensors(
    path: Path | str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]
) -> None:
    """Write tensors and a JSON-able header to one file."""
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    header = {"format": FORMAT, **header}
    # one entry, because several have no fixed order and the same content should be the same file
    metadata = {"gncprior": _text({**header, "sha256": _digest(plain, header)})}
    write_file(Path(path), save(plain, metadata))


def read_tensors(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What :func:`write_tensors` wrote, whole and unchanged; anything else is an error."""
    path = Path(path)
    if path.is_dir():
        raise GncpriorError(f"{path} is a folder: name a file that ends in {SUFFIX}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # copies: the tensors of safetensors are the file itself, and change when it is overwritten
            names = file.keys()
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except FileNotFoundError:
        raise GncpriorError(f"There is no file {path}.") from None
    except OSError as error:
        raise GncpriorError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (SafetensorError, ValueError, OverflowError, MemoryError, RuntimeError) as error:
        raise GncpriorError(
            f"{path} is no safetensors file, or it is damaged: only whole {SUFFIX} files are read."
        ) from error
    try:
        header = json.loads(metadata.get("gncprior", ""))
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise GncpriorError(f"{path} was not written by gncprior: its header is missing.")
    if header.get("format") != FORMAT:
        raise GncpriorError(
            f"{path} has format {header.get('format')!r} but this version reads {FORMAT}: "
            "update gncprior or write the file again."
        )
    # earlier files have the digest beside the header
    if header.pop("sha256", metadata.get("sha256")) != _digest(tensors, header):
        raise GncpriorError(f"{path} is damaged: its content does not match its checksum.")
    return tensors, header


def _text(header: Mapping[str, Any]) -> str:
    return json.dumps(header, sort_keys=True)


def _digest(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(_text(header).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------- priors


def save_prior(path: Path | str, prior: Prior, info: Mapping[str, Any] | None = None) -> None:
    """Write a prior; ``info`` (recipe, data, steps, seed, scores …) replaces what the prior carried."""
    header = {
        **(prior.info if info is None else info),
        "kind": "prior",
        "architecture": dataclasses.asdict(prior.architecture),
    }
    state = prior.state_dict()
    _check_values(path, state)
    write_tensors(path, state, header)


def load_prior(name_or_path: str | Path) -> Prior:
    """A shipped prior by its name, or one from a file: in eval mode, its parameters fixed.

    ``prior.info`` is the header of the file.
    """
    path = _find(name_or_path)
    tensors, header = read_tensors(path)
    if header.get("kind") != "prior":
        raise GncpriorError(f"{path} holds {header.get('kind', 'something')!r} and not a prior.")
    architecture = _architecture(path, header.get("architecture"))
    # The number of tensors bounds the layers before anything is built, and a model without memory
    # gives names and shapes: an absurd header costs nothing.
    if architecture.layers > len(tensors):
        raise GncpriorError(f"{path} has {len(tensors)} tensors for {architecture.layers} layers.")
    with torch.device("meta"):
        prior = Prior(architecture, header)
    expected = {name: tuple(t.shape) for name, t in prior.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    if expected != found:
        odd = min(expected.items() ^ found.items())[0]
        raise GncpriorError(
            f"{path} does not fit its own header: {odd} should be {expected.get(odd, 'absent')} "
            f"and is {found.get(odd, 'absent')}."
        )
    _check_values(path, tensors)
    prior.load_state_dict(tensors, assign=True)
    return prior.eval().requires_grad_(False)


load = load_prior  # the public name: gncprior.load("r2")


def shipped() -> list[str]:
    """The names of the priors that come with the package."""
    return sorted(file.stem for file in WEIGHTS.glob(f"*{SUFFIX}") if _is_prior(file))


def _is_prior(path: Path) -> bool:
    """Schedules stand in the same folder; the header tells them apart."""
    return read_tensors(path)[1].get("kind") == "prior"


def _find(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if isinstance(name_or_path, str) and path.name == name_or_path and not path.suffix:
        file = WEIGHTS / f"{name_or_path}{SUFFIX}"
        if file.is_file():
            return file
        if not path.exists():
            names = shipped()
            close = difflib.get_close_matches(name_or_path.lower(), names, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else "or give the path of a file."
            known = (
                f"shipped are {', '.join(names)}" if names else "none is shipped with this version"
            )
            raise GncpriorError(f"There is no prior {name_or_path!r}: {known}; {hint}")
    if path.suffix in {".pt", ".pth", ".ckpt", ".pkl", ".pickle"}:
        raise GncpriorError(
            f"{path} is named like a pickle, which can run code and is not read: "
            f"a prior is a {SUFFIX} file."
        )
    return path


def _architecture(path: Path, fields: Any) -> Architecture:
    """Checked field by field: a header is only text that someone wrote."""
    types = {f.name: type(f.default) for f in dataclasses.fields(Architecture)}
    if not isinstance(fields, dict) or set(fields) != set(types):
        raise GncpriorError(f"{path} does not say its architecture in the words of this version.")
    for name, value in fields.items():
        wanted = (int, float) if types[name] is float else (types[name],)
        if type(value) not in wanted:
            raise GncpriorError(f"{path} has {name} = {value!r} in its architecture.")
    try:
        exact: dict[str, Any] = {n: float(v) if types[n] is float else v for n, v in fields.items()}
        return Architecture(**exact)
    except (GncpriorError, OverflowError) as error:
        why = str(error).rstrip(".")
        raise GncpriorError(f"{path} has an impossible architecture: {why}.") from error


def _check_values(path: Path | str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise GncpriorError(f"{path}: {name} must be float32, not {tensor.dtype}.")
        if not bool(tensor.isfinite().all()):
            raise GncpriorError(f"{path}: {name} has values that are not finite.")
