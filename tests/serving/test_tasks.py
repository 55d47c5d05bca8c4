"""Tasks of lm-evaluation-harness, on a task of our own: no data set is downloaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serving.conftest import EMBEDDED
from tests.serving.embedded_server import API_KEY
from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.tasks import TaskRun, TasksReport, check_tasks, evaluate_tasks, evaluate_tasks_on_server
from vllm_antkv.offline.models import ModelCard

manager = pytest.importorskip(
    "lm_eval.tasks.manager", reason="lm-evaluation-harness is not installed: pip install 'vllm-antkv[tasks]'"
)

#: The harness puts a space between question and answer.
QUESTIONS = [("He opened the", "door"), ("They went to the", "house"), ("Once upon a", "time")]
CAP = 4
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
GENERATE = {
    "task": "antkv_generate",
    "output_type": "generate_until",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": CAP, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
CHOICE = {
    "task": "antkv_choice",
    "output_type": "multiple_choice",
    # One template: the harness takes the parts of a list as they are.
    "doc_to_choice": "{{[answer, 'of', 'xylophone']}}",
    "doc_to_target": 0,
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TaskRun:
    """JSON is YAML: the definitions need no other library."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in QUESTIONS))
    for task in (GENERATE, CHOICE):
        definition = {**COMMON, **task, "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{task['task']}.yaml").write_text(json.dumps(definition))
    tasks = (GENERATE["task"], CHOICE["task"])
    return TaskRun(tasks=tasks, include_path=folder, limit=2, context=256)


def check(report: TasksReport) -> None:
    assert [(score.task, score.metric) for score in report.scores] == [
        ("antkv_generate", "exact_match"),
        ("antkv_choice", "acc"),
    ]
    assert report.answers == 2
    assert 1 <= report.answer_tokens <= CAP


@pytest.mark.long
def test_an_engine_of_its_own(run, eager):
    check_tasks(run, str(EMBEDDED))
    report = evaluate_tasks(ModelCard.read(str(EMBEDDED)), "antkv-1bit", AntKVConfig(), run)
    check(report)
    assert report.scores[1].value == 1.0, "the model prefers English"


def test_a_running_server(run, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", API_KEY)
    report: Any = evaluate_tasks_on_server(ModelCard.read(str(EMBEDDED)), "antkv-1bit", server.url, run)
    check(report)
    assert report.cap_hits == 0.5, "one of the two sentences ends within four tokens"


@pytest.mark.long
def test_a_fact_in_a_long_text(eager, monkeypatch):
    """RULER's, which the harness writes with the model's own tokenizer; this model is too small to find it."""
    pytest.importorskip("wonderwords", reason="pip install 'vllm-antkv[tasks]'")
    # Of the harness's tasks, only those: it takes a quarter of a minute to read all.
    monkeypatch.setattr(manager, "__file__", str(Path(manager.__file__).parent / "ruler" / "manager.py"))
    needle = TaskRun(tasks=("niah_single_1",), limit=2, context=512, length=400)
    check_tasks(needle, str(EMBEDDED))
    report = evaluate_tasks(ModelCard.read(str(EMBEDDED)), "antkv-1bit", AntKVConfig(), needle)
    (score,) = report.scores
    assert (score.task, score.metric, score.value) == ("niah_single_1", "400", 0.0)
    assert report.answers == 2
