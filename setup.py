"""The C++ kernels; everything else is in pyproject.toml."""

import copy
import os
import platform
import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CSRC = Path("vllm_antkv", "csrc")
#: Builds of the kernels. That of tiles has AMX instructions where it is asked for them, and runs without AMX too; older
#: compilers do not know them and leave this build out.
INSTRUCTION_SETS = {
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4"],
    "tiles": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"],
}
#: What the libraries say they were built from.
SOURCES_DIGEST = runpy.run_path("vllm_antkv/ops/cpu_sources.py")["digest"](CSRC)
#: GCC takes what intrinsics leave open for mistakes, and vectors wider than registers for parts of an interface.
QUIET = ["-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-psabi"]


def kernels(name: str, architecture: list[str]) -> Extension:
    """One build of csrc/cpu. Optional: without a compiler the wheel has no kernels, and `antkv doctor` says so."""
    return Extension(
        f"vllm_antkv.ops._cpu_{name}",
        sources=sorted(str(path) for path in (CSRC / "cpu").glob("*.cpp")),
        depends=["setup.py", *sorted(str(path) for path in (CSRC / "cpu").rglob("*.h"))],
        define_macros=[("ANTKV_SOURCES_DIGEST", f'"{SOURCES_DIGEST}"')],
        # Compiled for OpenMP but not linked to a runtime: vllm_antkv/ops/cpu.py brings PyTorch's. What a debugger would
        # read is stripped, and not made.
        extra_compile_args=["-std=c++17", "-O3", "-g0", *architecture, "-fopenmp", *QUIET],
        extra_link_args=["-Wl,-s"],
        language="c++",
        optional=True,
    )


class BuildKernels(build_ext):
    """Plain shared libraries: they have no Python in them, so no Python version in their name."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self):
        if self.editable_mode:
            # Where the last one was built, instead of a new folder: only what changed is compiled.
            self.build_lib, self.build_temp = "build/editable", "build/objects"
        super().run()

    def build_extension(self, ext):
        # Builds have the same sources and run at the same time: each needs a folder of its own for its objects.
        build = copy.copy(self)
        build.build_temp = str(Path(self.build_temp, ext.name))
        super(BuildKernels, build).build_extension(ext)

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + ".so"


class AnyPythonWheel(bdist_wheel):
    """A wheel for this platform and every Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


ON_X86 = platform.machine() in ("x86_64", "AMD64")

setup(
    packages=find_packages(include=["vllm_antkv", "vllm_antkv.*"]),
    ext_modules=[kernels(*item) for item in INSTRUCTION_SETS.items()] if ON_X86 else [],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
)
