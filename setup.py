"""Builds the native kernels; everything else about the package stands in pyproject.toml.

The kernels are plain shared libraries with a C interface, loaded by ctypes: they know nothing of
Python or torch. One library per CPU variant is built and the choice is made at run time. They are a
matter of speed only, so an installation without a usable compiler succeeds all the same; what was
built, and why not the rest, is written to `gncprior/native/build.txt` for `gncprior info`.
"""

import os
import platform
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/gncprior/native")
FLAGS = [
    "-O3",
    "-std=c++17",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
]
VARIANTS = {"portable": []}
if platform.machine().lower() in {"x86_64", "amd64"}:
    VARIANTS = {
        "amx": [
            *["-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
            "-mprefer-vector-width=512",
        ],
        "avx512bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"],
        "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
        "avx2": ["-march=x86-64-v3"],
    } | VARIANTS


def kernels(variant: str) -> Extension:
    """The library of one variant: the same source, other flags."""
    return Extension(
        f"gncprior.native._kernels_{variant}",
        sources=[str(NATIVE / f"kernels_{variant}.cpp")],
        depends=sorted(map(str, NATIVE.glob("*.hpp"))),
        extra_compile_args=FLAGS + VARIANTS[variant],
        extra_link_args=["-pthread"],
        language="c++",
        optional=True,
    )


def reason(error: Exception) -> str:
    """One line: the compiler's own exit code rather than its whole command."""
    cause = error.__context__
    if isinstance(cause, subprocess.CalledProcessError):
        return f"{cause.cmd[0]} failed with exit code {cause.returncode}; pip install -v shows why"
    return " ".join(str(error).split())


class BuildKernels(build_ext):
    """Builds what can be built and keeps a record of the rest."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self):
        self.record = dict.fromkeys(VARIANTS, "not built: no compiler could be set up")
        if self.inplace:  # an older library must not outlive a failed build
            for library in NATIVE.glob("_kernels_*"):
                library.unlink()
        try:
            super().run()
        except Exception as error:  # whatever a compiler set-up may raise: the install goes on
            self.warn(f"the native kernels were not built: {error}")
        folder = NATIVE if self.inplace else Path(self.build_lib, "gncprior", "native")
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{variant}: {what}\n" for variant, what in self.record.items()]
        (folder / "build.txt").write_text("".join(lines), "utf-8")

    def build_extension(self, ext):
        variant = ext.name.rpartition("_")[2]
        try:
            if self.compiler.compiler_type == "msvc":
                raise RuntimeError("the kernels need GCC or Clang")
            super().build_extension(ext)
        except Exception as error:
            self.record[variant] = f"not built: {reason(error)}"
            self.warn(f"kernels {variant} {self.record[variant]}")
        else:
            self.record[variant] = "built"

    def get_ext_filename(self, fullname):
        """No Python version in the name: the library does not depend on it."""
        return os.path.join(*fullname.split(".")) + (".pyd" if os.name == "nt" else ".so")

    def get_export_symbols(self, ext):
        """None: there is no PyInit function."""
        return []


class Wheel(bdist_wheel):
    """One wheel per platform, for every Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[kernels(variant) for variant in VARIANTS],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
