"""What a training run keeps in its folder, so that nothing but time is lost when it is interrupted.

    recipe.toml                    all choices of the run
    checkpoint-<step>.safetensors  the newest two: weights, optimizer, average, step
    log.jsonl                      one JSON object a line
    tensorboard/                   the same numbers, if TensorBoard is installed
    prior.safetensors              the result

Files appear under their names only when they are whole and on the disk.  Where the newest
checkpoint was damaged all the same, its checksum says so and the one before it serves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TextIO

from torch import Tensor

from gncprior.checkpoints import read_tensors, write_file, write_tensors
from gncprior.errors import GncpriorError
from gncprior.recipes import Recipe, read_recipe

KEEP = 2


class RunFolder:
    """The folder of a run, held by one process at a time; use it in a ``with`` block."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.prior_file = self.folder / "prior.safetensors"
        self._recipe_file = self.folder / "recipe.toml"
        self._log_file = self.folder / "log.jsonl"
        self._log: TextIO | None = None
        self._board: Any = None

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._log = self._log_file.open("a", encoding="utf-8")
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        if not _lock(self._log):
            self._log.close()
            raise GncpriorError(
                f"Another process is training in {self.folder}: wait or stop it first."
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._board is not None:
            self._board.close()
        if self._log is not None:
            with suppress(OSError):  # a full disk, of which a sentence has told already
                self._log.close()

    # ------------------------------------------------------------ recipe

    def read_recipe(self) -> Recipe | None:
        """The recipe of the run that lives here; None if there is none."""
        return read_recipe(self._recipe_file) if self._recipe_file.is_file() else None

    def write_recipe(self, recipe: Recipe) -> None:
        write_file(self._recipe_file, recipe.to_toml().encode())

    # ------------------------------------------------------------ checkpoints

    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob("checkpoint-*.safetensors"))

    def save(self, step: int, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step; only then remove those that are too many."""
        header = {**header, "kind": "training", "step": step}
        write_tensors(self.folder / f"checkpoint-{step:09d}.safetensors", tensors, header)
        for old in self.checkpoints()[:-KEEP]:
            old.unlink(missing_ok=True)

    def restore(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest checkpoint that is whole; None if the run has none at all."""
        files = self.checkpoints()
        for file in reversed(files):
            try:
                return read_tensors(file)
            except GncpriorError as error:
                self.note({"event": "damaged", "file": file.name, "why": str(error)})
                # out of the way, or it would count as one of the newest two
                file.replace(file.with_suffix(".damaged"))
        if files:
            raise GncpriorError(
                f"All checkpoints in {self.folder} are damaged: start again in another folder."
            )
        return None

    # ------------------------------------------------------------ log

    def open_log(self, step: int, tensorboard: bool) -> None:
        """Forget what was logged after ``step``, from where the run goes on."""
        lines = []
        for line in self._log_file.read_text("utf-8", errors="replace").splitlines(keepends=True):
            try:
                if json.loads(line).get("step", 0) <= step:
                    lines.append(line)
            except (ValueError, AttributeError):
                continue  # the line that was being written when the run was killed
        assert self._log is not None
        try:
            # in place, because the lock is on this file and not on its name
            self._log.truncate(0)
            self._log.writelines(lines)
            self._log.flush()
        except OSError as error:
            raise _unwritable(self._log_file, error) from error
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
            self._board = SummaryWriter(self.folder / "tensorboard", purge_step=step)

    def note(self, event: Mapping[str, Any]) -> None:
        """Append a line to the log, and its numbers to TensorBoard."""
        assert self._log is not None
        try:
            self._log.write(json.dumps(event, ensure_ascii=False) + "\n")
            self._log.flush()
        except OSError as error:
            raise _unwritable(self._log_file, error) from error
        if self._board is not None and "step" in event:
            for name, value in event.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{event['event']}/{name}", value, event["step"])


def _unwritable(path: Path, error: OSError) -> GncpriorError:
    return GncpriorError(
        f"Cannot write {path}: {error.strerror or error}; make room there or choose another folder."
    )


def _lock(file: TextIO) -> bool:
    """Whether this process has the file for itself; the lock ends with the process, however it ends."""
    if os.name != "posix":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
