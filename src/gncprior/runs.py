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
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self, TextIO

from torch import Tensor

from gncprior.checkpoints import read_tensors, unwritable, write_file, write_tensors
from gncprior.errors import GncpriorError
from gncprior.recipes import Recipe, read_recipe

KEEP = 2  # checkpoints

Event = dict[str, Any]


class RunFolder:
    """The folder of a run, held by one process at a time; use it in a ``with`` block.

    ``watch`` hears all that is logged.
    """

    def __init__(self, folder: Path | str, watch: Callable[[Event], None] | None = None) -> None:
        self.folder = Path(folder)
        self.prior_file = self.folder / "prior.safetensors"
        self.watch = watch
        self._recipe_file = self.folder / "recipe.toml"
        self._log_file = self.folder / "log.jsonl"
        self._damaged: list[Event] = []
        self._open = ExitStack()
        self._log: TextIO | None = None
        self._board: Any = None

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = self._open.enter_context((self.folder / ".lock").open("w"))
        except OSError as error:
            raise unwritable(self.folder, error) from error
        if not _locked(lock):
            self._open.close()
            raise GncpriorError(
                f"Another process is training in {self.folder}: wait for it or stop it first."
            )
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a full disk, of which a sentence has told already
            self._open.close()

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
        header = {**header, "kind": "training"}
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
                self._damaged.append({"event": "damaged", "file": file.name, "why": str(error)})
                # out of the way, or it would count as one of the newest
                file.replace(file.with_suffix(".damaged"))
        if files:
            raise GncpriorError(
                f"All checkpoints in {self.folder} are damaged: start again in another folder."
            )
        return None

    # ------------------------------------------------------------ log

    def open_log(self, step: int, tensorboard: bool) -> None:
        """Begin to log at ``step``; what was logged of later steps is forgotten."""
        lines = []
        if self._log_file.is_file():
            text = self._log_file.read_text("utf-8", errors="replace")
            for line in text.splitlines(keepends=True):
                # the line that was being written when the run was killed is no JSON
                with suppress(ValueError, AttributeError):
                    if json.loads(line).get("step", 0) <= step:
                        lines.append(line)
        write_file(self._log_file, "".join(lines).encode())
        self._log = self._open.enter_context(self._log_file.open("a", encoding="utf-8"))
        if tensorboard:
            with suppress(ImportError):
                from torch.utils.tensorboard import SummaryWriter

                board = SummaryWriter(self.folder / "tensorboard", purge_step=step)
                self._board = self._open.enter_context(board)
        for event in self._damaged:
            self.note(event)

    def note(self, event: Event) -> None:
        """Append a line to the log, and its numbers to TensorBoard."""
        assert self._log is not None
        try:
            self._log.write(json.dumps(event, ensure_ascii=False) + "\n")
            self._log.flush()
        except OSError as error:
            raise unwritable(self._log_file, error) from error
        if self._board is not None and "step" in event:
            for name, value in event.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{event['event']}/{name}", value, event["step"])
        if self.watch is not None:
            self.watch(event)


def _locked(file: TextIO) -> bool:
    """Whether this process has the file for itself; the lock ends with the process, however it ends."""
    if os.name != "posix":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
