"""Tasks of `research/tasks`."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "tasks"
TESTS = "def check(f):\n    assert f(2) == 4\n\ncheck(twice)"


@pytest.fixture(scope="module")
def humaneval():
    pytest.importorskip("datasets", reason="pip install 'vllm-antkv[tasks]'")
    spec = importlib.util.spec_from_file_location("humaneval", FOLDER / "humaneval.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("def twice(n):\n    return 2 * n", 1.0),
        ("def twice(n):\n    return n", 0.0),
        ("def twice(n):", 0.0),
        ("twice = bytearray(1 << 40)", 0.0),
        ("while True: pass", 0.0),
    ],
    ids=["right", "wrong", "no program", "too much memory", "no end"],
)
def test_a_program_passes_its_tests_or_not(humaneval, program: str, right: float) -> None:
    assert humaneval.passes([TESTS], [[program]]) == {"passes": right}


def test_problems_stand_behind_others_with_their_solutions(humaneval) -> None:
    from datasets import Dataset

    problems = [{"prompt": f"def f{n}():\n", "canonical_solution": f"    return {n}\n" + "#" * 3000} for n in range(9)]
    docs = humaneval.behind_code(Dataset.from_list(problems))
    assert docs[7]["before"].startswith("def f8():\n    return 8\n")
    assert "def f0" in docs[7]["before"]
    assert all(f"def f{n}" not in doc["before"] for n, doc in enumerate(docs))
    assert all(6800 <= len(doc["before"]) < 10_000 for doc in docs)
