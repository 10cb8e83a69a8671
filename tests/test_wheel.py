"""The wheel: built from the source archive, installed into a clean environment, and run there."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
NOT_SOURCES = (".*", "build", "dist", "out", "*.egg-info", "__pycache__", "*.so", "build.txt")
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GNCPRIOR"))}


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        env=CLEAN | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def install(wheel: Path, folder: Path) -> Path:
    """The folder of commands of a new environment that holds the wheel and borrows the rest."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run(*pip, "install", "--no-deps", "--no-index", wheel)
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "borrowed.pth").write_text("\n".join(dict.fromkeys(paths)), "utf-8")
    return python.parent


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> Path:
    """A folder with the source archive and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*NOT_SOURCES))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree)
    return folder


def test_building_never_needs_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert [r.partition(">")[0] for r in project["build-system"]["requires"]] == ["setuptools"]


def test_wheel_holds_the_whole_package_and_nothing_else(archives):
    with ZipFile(next(archives.glob("*.whl"))) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    source = archives / "tree" / "src"
    wanted = {str(f.relative_to(source)) for f in source.glob("gncprior/**/*") if f.is_file()}
    wanted = {name for name in wanted if not name.endswith((".cpp", ".hpp"))}
    assert wanted <= inside
    assert {Path(name).suffix for name in inside - wanted} <= {".so", ".txt"}
    assert {str(Path(name).parent) for name in inside - wanted} == {"gncprior/native"}


def test_installed_wheel_runs_from_its_own_files(archives, tmp_path):
    commands = install(next(archives.glob("*.whl")), tmp_path / "env")
    where = run(commands / "python", "-c", "import gncprior; print(gncprior.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path / "env")
    assert "figure" in run(commands / "gncprior", "--help")
    facts = run(commands / "gncprior", "info")
    assert f"in {Path(where.strip()).parent}\n" in facts


def test_installs_and_runs_without_a_compiler(archives, tmp_path):
    missing = str(tmp_path / "no-such-compiler")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
    ]
    sdist = next(archives.glob("*.tar.gz"))
    run(*build, "--wheel-dir", tmp_path, sdist, CC=missing, CXX=missing)
    wheel = next(tmp_path.glob("*.whl"))
    with ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        record = archive.read("gncprior/native/build.txt").decode()
    assert all("not built" in line and missing in line for line in record.splitlines())
    facts = run(install(wheel, tmp_path / "env") / "gncprior", "info")
    assert "\nkernels   torch: " in facts
    assert missing in facts
