"""`antkv eval tasks` before any engine starts, and how the harness's results are read."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.places import EMBEDDED
from vllm_antkv import cli
from vllm_antkv.cli.tables import print_table
from vllm_antkv.cli.tasks import _table
from vllm_antkv.errors import SettingsError
from vllm_antkv.evaluate import tasks
from vllm_antkv.evaluate.tasks import TaskRun, TasksReport, check_tasks, read_scores

HARNESS = importlib.util.find_spec("lm_eval") is not None


def report(dtype: str, results: dict[str, Any], *tasks: str) -> TasksReport:
    return TasksReport.model_construct(kv_cache_dtype=dtype, scores=list(read_scores(results, tasks)), answers=0)


def results(value: float) -> dict[str, Any]:
    group = {"alias": "mmlu", "acc,none": value, "acc_stderr,none": 0.01}
    gsm8k = {"exact_match,strict-match": value / 2, "exact_match_stderr,strict-match": "N/A"}
    return {"mmlu": group, "mmlu_law": {"acc,none": 1.0}, "gsm8k": gsm8k}


def test_scores_are_those_of_what_was_asked_for():
    scores = report("auto", results(0.5), "mmlu", "gsm8k").scores
    assert [(s.task, s.metric, s.value, s.stderr) for s in scores] == [
        ("mmlu", "acc", 0.5, 0.01),
        ("gsm8k", "exact_match (strict-match)", 0.25, None),
    ]


def test_a_group_without_metrics_is_shown_by_its_tasks():
    found = {"longbench": {"alias": "longbench"}, "a": {"score,none": 0.1}, "b": {"score,none": 0.2}}
    assert [score.task for score in report("auto", found, "longbench").scores] == ["a", "b"]


def test_lengths_that_were_not_asked_for_are_left_out():
    found = {"niah_single_1": {"alias": "niah_single_1", "4096,none": -1, "8192,none": 0.75, "8192_stderr,none": 0.1}}
    assert [score.metric for score in report("auto", found, "niah_single_1").scores] == ["8192"]


def test_differences_are_from_the_first(capsys):
    reports = [report(dtype, results(value), "mmlu") for dtype, value in [("auto", 0.5), ("antkv-1bit", 0.25)]]
    print_table(_table(reports))
    shown = capsys.readouterr().out
    assert "0.5000 ± 0.0100" in shown
    assert "0.2500 ± 0.0100 (-0.2500)" in shown


def run(tmp_path: Path, *args: str) -> int:
    out = str(tmp_path / "out.json")
    return cli.run(["eval", "tasks", str(EMBEDDED), "--tasks", "no-such-task", "--json", out, *args])


@pytest.mark.skipif(HARNESS, reason="lm-evaluation-harness is installed")
def test_without_the_harness_it_says_how_to_install_it(tmp_path, capsys):
    assert run(tmp_path, "--kv-cache-dtype", "auto") == 1
    assert "pip install 'vllm-antkv[tasks]'" in capsys.readouterr().err


@pytest.fixture
def folders_read(monkeypatch) -> Iterator[list[str]]:
    """Those that the harness takes tasks from, by name; of its own, one stands for over a hundred."""
    manager = pytest.importorskip("lm_eval.tasks.manager", reason="pip install 'vllm-antkv[tasks]'")
    monkeypatch.setattr(manager, "__file__", str(Path(manager.__file__).parent / "piqa" / "manager.py"))
    found: list[str] = []
    build = manager.TaskIndex.build

    def recorded(paths: list[Path]) -> dict[str, Any]:
        found.extend(path.name for path in paths)
        return build(paths)

    monkeypatch.setattr(manager.TaskIndex, "build", staticmethod(recorded))
    tasks._tasks_of.cache_clear()
    yield found
    tasks._tasks_of.cache_clear()


def test_a_task_that_there_is_not(tmp_path, capsys, folders_read):
    check_tasks(TaskRun(tasks=("piqa",)), str(EMBEDDED))
    assert run(tmp_path, "--kv-cache-dtype", "auto") == 2
    assert "no-such-task" in capsys.readouterr().err.splitlines()[-1]
    # Once for both.
    assert folders_read == ["piqa"]


@pytest.mark.parametrize(
    ("names", "folders"),
    [(("mine",), ["own"]), (("mine", "piqa"), ["own", "piqa", "own"]), (("ours",), ["own", "piqa", "own"])],
    ids=["own", "own and theirs", "a group of both"],
)
def test_the_harness_s_tasks_are_read_where_own_ones_do_not_do(tmp_path, folders_read, names, folders):
    (tmp_path / "own").mkdir()
    definitions = [{"task": "mine", "dataset_path": "json"}, {"group": "ours", "task": ["mine", "piqa"]}]
    for number, definition in enumerate(definitions):
        (tmp_path / "own" / f"{number}.yaml").write_text(json.dumps(definition))
    check_tasks(TaskRun(tasks=names, include_path=tmp_path / "own"), str(EMBEDDED))
    assert folders_read == folders


def test_programs_that_a_model_writes_run_where_that_is_allowed(tmp_path, folders_read):
    (tmp_path / "code.yaml").write_text(json.dumps({"task": "code", "dataset_path": "json", "unsafe_code": True}))
    asked = TaskRun(tasks=("code",), include_path=tmp_path)
    with pytest.raises(SettingsError, match="--confirm-run-unsafe-code"):
        check_tasks(asked, str(EMBEDDED))
    check_tasks(asked.model_copy(update={"confirm_run_unsafe_code": True}), str(EMBEDDED))
