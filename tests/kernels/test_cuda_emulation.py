"""The emulation has what larger kernels are built of, and notices when they use it wrongly.

Kernels of its own (`cuda_emulation/primitives.cu`), small enough to be right, and every way to leave out or misuse one
of their synchronisations.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.compile_cuda import compiled, nvcc
from tests.kernels.cuda_emulation.build import HERE, program_of

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")
SEEDS = range(1, 5)
KERNELS = ("stream", "exchange")


def run(program: Path, *arguments: str) -> list[str]:
    """The lines that the program prints; one that says why it did not come to its end."""
    result = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    if result.returncode:
        return [result.stderr or f"ended by signal {-result.returncode}"]
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def program() -> Path:
    return program_of("primitives")


@needs_compiler
@pytest.mark.parametrize("kernel", KERNELS)
def test_right_kernels_give_right_results_without_races(program, kernel):
    for seed in SEEDS:
        assert run(program, kernel, str(seed)) == ["right"]


@needs_compiler
@pytest.mark.parametrize(("kernel", "num_sites"), [("stream", 9), ("exchange", 8)])
def test_every_misuse_is_noticed(program, kernel, num_sites):
    sites = run(program, kernel, "sites")
    assert len(sites) == num_sites
    for site in sites:
        for change in ("left out", "wrong") if site.endswith("*") else ("left out",):
            outcomes = [run(program, kernel, str(seed), site.rstrip("*"), change) for seed in SEEDS]
            assert ["right"] not in outcomes, (site, change)


@needs_compiler
@pytest.mark.parametrize(
    ("site", "change", "words"),
    [
        ("wait", "wrong", "do not come"),
        ("arrive_expecting", "wrong", "no thread has announced"),
        ("publish_barriers", "left out", "not published"),
        ("fence_before_bulk_copies", "left out", "without a fence"),
    ],
)
def test_misuses_are_called_by_name(program, site, change, words):
    name = next(name for name in run(program, "stream", "sites") if name.rstrip("*").endswith(site))
    assert any(words in line for line in run(program, "stream", "1", name.rstrip("*"), change))


@pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")
def test_the_same_source_compiles_for_the_device():
    code, said = compiled(HERE / "primitives.cu", "-arch=sm_90")
    assert code.stat().st_size > 0
    assert "warning" not in said
