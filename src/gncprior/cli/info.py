"""`gncprior info`: what runs here, with what, and from where."""

import os
import platform
from pathlib import Path


def info() -> None:
    """Show versions, threads, the kernels in use and why, and where weights and data are.

    Put its output into a bug report.

    **Example:** `gncprior info`
    """
    import torch

    import gncprior
    from gncprior.native import kernels

    package = Path(gncprior.__file__).parent
    facts = {
        "gncprior": f"{gncprior.__version__} in {package}",
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "kernels": f"{kernels.variant()}: {kernels.reason()}",
        "build": _build_record(package / "native" / "build.txt"),
        "weights": _weights(package / "weights"),
        "data": _data(),
    }
    for name, fact in facts.items():
        print(f"{name:10}{' '.join(fact.split())}")


def _build_record(note: Path) -> str:
    if not note.is_file():
        return "no record of a kernel build"
    return "; ".join(note.read_text("utf-8").splitlines())


def _weights(folder: Path) -> str:
    names = sorted(file.stem for file in folder.glob("*.safetensors"))
    return f"{', '.join(names)} in {folder}" if names else "none shipped with this version"


def _data() -> str:
    folder = os.environ.get("GNCPRIOR_DATA")
    if not folder:
        return "GNCPRIOR_DATA is not set"
    return f"{folder} (GNCPRIOR_DATA)" + ("" if Path(folder).is_dir() else ", which does not exist")
