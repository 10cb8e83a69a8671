"""The README and the docs: what they say works."""

import re
import shlex
from pathlib import Path

import pytest

from gncprior import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_examples_run_and_print_what_they_say(capsys):
    for block in re.findall(r"```python\n(.*?)```", PAGES[0].read_text("utf-8"), re.DOTALL):
        exec(compile(block, "README.md", "exec"), {})  # noqa: S102  (our own page)
        printed = capsys.readouterr().out.splitlines()
        lines = [line for line in block.splitlines() if line.startswith("print(")]
        assert len(printed) == len(lines)
        for line, out in zip(lines, printed, strict=True):
            said = [float(n) for n in re.findall(r"-?\d+\.\d+", line.partition("#")[2])]
            seen = [float(n) for n in re.findall(r"-?\d+\.\d+", out)]
            assert seen[: len(said)] == pytest.approx(said, abs=6e-6)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_links_and_pictures_exist(page):
    text = page.read_text("utf-8")
    for command in re.findall(r"`gncprior ([a-z][^`]*)`", text):
        cli.app.parse_args(shlex.split(command), exit_on_error=False, print_error=False)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"^make (\w+)|`make (\w+)`", text, re.MULTILINE):
        assert re.search(f"^{''.join(target)}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / link).exists(), link
