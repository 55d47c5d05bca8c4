"""The wheel holds what a user needs and nothing that would get in the way of vLLM."""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

import vllm_antkv
from scripts import wheel as wheel_script
from tests.places import ROOT

#: The C++ kernels give the wheel its platform.
HAS_COMPILER = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = [pytest.mark.long, pytest.mark.skipif(not HAS_COMPILER, reason="needs an x86-64 processor and g++")]

#: Kinds of entry points that the wheel has one of.
GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins", "console_scripts")
KERNELS = {f"vllm_antkv/ops/_cpu_{name}.so" for name in ("avx2", "avx512", "tiles")}
#: The oldest that is documented.
OLDEST_COMPILER = "g++-" + re.search(r"`g\+\+` (\d+) or newer", (ROOT / "docs" / "troubleshooting.md").read_text())[1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """What `make wheel` writes: a source distribution, and the wheel that was built from it."""
    return wheel_script.distributions(tmp_path_factory.mktemp("distributions"))


@pytest.fixture(scope="module")
def wheel(distributions):
    return distributions[1]


def test_the_wheel_is_for_every_python_and_no_newer_glibc_than_documented(wheel):
    name = f"vllm_antkv-{vllm_antkv.__version__}-py3-none-manylinux_2_{{}}_x86_64.whl"
    documented = re.search(r"glibc 2\.(\d+)", (ROOT / "docs" / "install.md").read_text())
    assert wheel.name == name.format(documented[1])


@pytest.mark.skipif(shutil.which(OLDEST_COMPILER) is None, reason=f"needs {OLDEST_COMPILER}")
def test_the_oldest_documented_compiler_builds_all_kernels(tmp_path):
    compiler = tmp_path / "compiler"
    # Nothing is run: optimised, it takes five times as long.
    compiler.write_text(f'#!/bin/sh\nexec {OLDEST_COMPILER} "$@" -O0\n')
    compiler.chmod(0o755)
    source = wheel_script.copy_of_sources(tmp_path / "source")
    path = wheel_script.build("wheel", source, tmp_path / "wheel", CC=str(compiler), CXX=str(compiler))
    assert set(zipfile.ZipFile(path).namelist()) >= KERNELS


def test_without_a_compiler_there_is_a_wheel_without_kernels(tmp_path):
    source = wheel_script.copy_of_sources(tmp_path / "source")
    path = wheel_script.build("wheel", source, tmp_path / "wheel", CC="no-such-compiler", CXX="no-such-compiler")
    assert not [name for name in zipfile.ZipFile(path).namelist() if name.endswith(".so")]


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= KERNELS
    for path in (ROOT / "vllm_antkv").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.name != ".gitkeep":
            assert path.relative_to(ROOT).as_posix() in names


def test_the_engine_is_no_requirement(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
    requirements = [line.split()[1] for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert requirements
    assert not any(requirement.startswith("vllm") for requirement in requirements)


@pytest.fixture(scope="module")
def beside_vllm(wheel, tmp_path_factory):
    """An environment with nothing but vLLM and what it needs, into which pip has installed the wheel; its Python."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    # The checkout that is installed here in place is not found this way: its own .pth is not read.
    (site / "vllm.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    # With our requirements, and without an index: nothing may be missing, and nothing be brought up to date.
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index"]
    subprocess.run([*install, "--ignore-installed", "--no-deps", str(wheel)], check=True)
    subprocess.run([*install, str(wheel)], check=True)
    return python


def test_installing_the_wheel_leaves_vllm_alone(beside_vllm):
    site = next(beside_vllm.parents[1].glob("lib/python*/site-packages"))
    added = {path.name for path in site.iterdir()} - {"vllm.pth", "__pycache__"}
    assert added == {"vllm_antkv", f"vllm_antkv-{vllm_antkv.__version__}.dist-info"}
    assert {path.name for path in beside_vllm.parent.iterdir() if "antkv" in path.name} == {"antkv"}


def test_vllm_loads_the_plugin_of_an_installed_wheel(beside_vllm, tmp_path):
    code = (
        f"GROUPS = {GROUPS}"
        + """
from importlib.metadata import entry_points, version
import vllm_antkv
from vllm.config.cache import CacheConfig
from vllm.plugins import load_general_plugins
load_general_plugins()
print(">", CacheConfig(cache_dtype="antkv-1bit").cache_dtype, version("vllm-antkv"), vllm_antkv.__file__)
for group in GROUPS:
    print(">", group, [callable(e.load()) for e in entry_points(group=group) if e.value.startswith("vllm_antkv")])
"""
    )
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [str(beside_vllm), "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment)
    first, *groups = [line[2:] for line in done.stdout.splitlines() if line.startswith("> ")]
    site = next(beside_vllm.parents[1].glob("lib/python*/site-packages"))
    assert first == f"antkv-1bit {vllm_antkv.__version__} {site / 'vllm_antkv' / '__init__.py'}"
    assert groups == [f"{group} [True]" for group in GROUPS]
