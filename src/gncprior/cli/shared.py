"""What commands share: groups of the help, options of the same meaning, the closing words."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

START = Group("Start here", sort_key=0)
RESTORING = Group("Restore pictures", sort_key=1)
LEARNING = Group("Learn and inspect", sort_key=2)
FIGURES = Group("Figures of the paper", sort_key=3)
OPTIONS = Group("Options", sort_key=9)

Out = Annotated[Path, Parameter(help="Folder for the files; made if missing.")]
Quick = Annotated[bool, Parameter(help="Coarser grids: a draft in seconds.", negative="")]


def report(files: Iterable[Path]) -> None:
    """Say where the files are."""
    for file in files:
        print(f"  wrote {file}")
