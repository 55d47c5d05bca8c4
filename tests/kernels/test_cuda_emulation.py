"""The emulation has what larger kernels are built of, and notices when they use it wrongly.

A kernel of its own (`cuda_emulation/primitives.cu`), small enough to be right, and every way to leave out or misuse one
of its synchronisations.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.compile_cuda import compiled, nvcc
from tests.kernels.cuda_emulation.build import HERE, program_of

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")
SEEDS = range(1, 5)


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
def test_a_right_kernel_gives_right_results_without_races(program):
    for seed in SEEDS:
        assert run(program, str(seed)) == ["right"]


@needs_compiler
def test_every_misuse_is_noticed(program):
    sites = run(program, "sites")
    assert len(sites) == 9
    for site in sites:
        for change in ("left out", "wrong") if site.endswith("*") else ("left out",):
            outcomes = [run(program, str(seed), site.rstrip("*"), change) for seed in SEEDS]
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
    name = next(name for name in run(program, "sites") if name.rstrip("*").endswith(site))
    assert any(words in line for line in run(program, "1", name.rstrip("*"), change))


@pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")
def test_the_same_source_compiles_for_the_device():
    code, said = compiled(HERE / "primitives.cu", "-arch=sm_90")
    assert code.stat().st_size > 0
    assert "warning" not in said
