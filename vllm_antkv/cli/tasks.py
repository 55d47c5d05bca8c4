"""`antkv eval tasks`."""

from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vllm_antkv.cli.options import CacheOptions, Json, Model, grouped, names_in
from vllm_antkv.cli.tables import print_table, table
from vllm_antkv.errors import SettingsError

if TYPE_CHECKING:
    from vllm_antkv.evaluate.tasks import TaskScore, TasksReport


@dataclass(frozen=True)
class EngineOptions:
    """Who is asked."""

    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="Values of --kv-cache-dtype, separated by commas: an engine is started for each.")
    ] = None
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=URL", help="A running server instead, e.g. auto=http://localhost:8000; repeatable."),
    ] = None


@dataclass(frozen=True)
class RunOptions:
    """How the questions are put."""

    include_path: Annotated[Path | None, typer.Option(help="Folder with task definitions of your own.")] = None
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples in a prompt; without it, the task's.")] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each task; without it, all.")] = None
    max_gen_toks: Annotated[int, typer.Option(min=1, help="Cap on answers, where the task sets none.")] = 256
    apply_chat_template: Annotated[bool, typer.Option(help="Ask as in a chat: for instruction-tuned models.")] = False
    context: Annotated[int | None, typer.Option(min=2, help="Longest sequence; without it, the model's.")] = None
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and answer, in tasks that write prompts (niah_*).")
    ] = None
    confirm_run_unsafe_code: Annotated[
        bool, typer.Option(help="Run programs that the model writes, where a task does: use a container.")
    ] = False


@grouped
def tasks(
    model: Model,
    tasks: Annotated[str, typer.Option(help="Tasks or groups of lm-evaluation-harness, separated by commas.")],
    json: Json,
    who: EngineOptions,
    how: RunOptions,
    cache: CacheOptions,
) -> None:
    """Tasks of lm-evaluation-harness through vLLM, side by side, with the length of the answers.

    Example: `antkv eval tasks MODEL --tasks gsm8k,piqa --kv-cache-dtype auto,antkv-1bit --codebooks DIR --json OUT`

    Facts in a long text: `--tasks niah_single_1,niah_multikey_2 --length 8192 --limit 50`

    The JSON is written after every cache. Needs the extra `tasks`: `pip install 'vllm-antkv[tasks]'`
    """
    from vllm_antkv.evaluate.engine import check_kv_cache_dtypes
    from vllm_antkv.evaluate.report import check_writable, written_one_by_one
    from vllm_antkv.evaluate.tasks import TaskRun, check_tasks, evaluate_tasks, evaluate_tasks_on_server
    from vllm_antkv.offline.models import ModelCard

    dtypes, servers = names_in(who.kv_cache_dtype), [_named_url(text) for text in who.server or []]
    if bool(dtypes) == bool(servers):
        raise SettingsError("Say what to evaluate, either with --kv-cache-dtype or with --server.")
    check_writable(json)
    card = ModelCard.read(model)
    check_kv_cache_dtypes(dtypes)
    run = TaskRun(tasks=tuple(names_in(tasks)), **asdict(how))
    check_tasks(run, card.name)
    config = cache.config()
    own = (evaluate_tasks(card, dtype, config, run) for dtype in dtypes)
    running = (evaluate_tasks_on_server(card, name, url, run) for name, url in servers)
    print_table(_table(written_one_by_one(chain(own, running), json)))


def _named_url(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise SettingsError(f"--server is '{text}', but must be NAME=URL, such as auto=http://localhost:8000.")
    return name, url


def _with_error(score: "TaskScore") -> str:
    return f"{score.value:.4f}" + ("" if score.stderr is None else f" ± {score.stderr:.4f}")


def _table(reports: "list[TasksReport]") -> Table:
    made = table("task", "metric", *(report.kv_cache_dtype for report in reports))
    made.columns[1].justify = "left"
    for first, *others in zip(*(report.scores for report in reports), strict=True):
        differences = (f"{_with_error(score)} ({score.value - first.value:+.4f})" for score in others)
        made.add_row(first.task, first.metric, _with_error(first), *differences)
    if reports[0].answers:
        made.add_row("all", "tokens per answer", *(f"{report.answer_tokens:.1f}" for report in reports))
        made.add_row("all", "answers cut off", *(f"{report.cap_hits:.1%}" for report in reports))
    return made
