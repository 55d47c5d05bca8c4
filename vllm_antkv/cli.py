"""The command line, `antkv`.

Exit code 0 on success, 2 on bad arguments, 1 on failure; an error is one line on stderr. Heavy imports happen inside
the commands, so that `--help` and mistakes answer at once.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from vllm_antkv.config import AntKVConfig, Recency
from vllm_antkv.errors import AntKVError, SettingsError

if TYPE_CHECKING:
    from vllm_antkv.evaluate.report import PerplexityReport

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
eval_app = typer.Typer(rich_markup_mode="markdown")
app.add_typer(eval_app, name="eval", help="Measure quality: perplexity offline, several methods compared, or served.")

#: As in `AntKVConfig.anchor_scope`.
AnchorScope = Literal["block", "prompt"]

_DEFAULTS = AntKVConfig()
#: The value of --recency that lets every method of the literature keep what its own paper keeps.
_OWN = "own"
#: Typer brings its own copy of click and exports the root of its usage errors only as the base of this one.
_UsageError: type[Exception] = typer.BadParameter.__base__  # type: ignore[assignment]


def _recency(text: str) -> str:
    try:
        return str(Recency.parse(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _recency_or_own(text: str) -> str:
    return text if text == _OWN else _recency(text)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or Hugging Face name of a causal language model.")]
Text = Annotated[
    Path, typer.Option(help="Evaluation text: plain UTF-8, or *_ids.json with a list of windows of token ids.")
]
Codebooks = Annotated[
    Path | None,
    typer.Option(
        help="Folder that `antkv calibrate` wrote to. Plain centroids for cq-* are taken from its folder cq, or from "
        "itself when calibrated with --weights none. Without it: where the server looks."
    ),
]
Anchors = Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of tokens kept as anchors, per KV head.")]
Sinks = Annotated[
    int,
    typer.Option(
        min=0,
        help="0: no attention sinks. Anything else: sinks stay in full precision; how many there are is found by the "
        "calibrated threshold, not by this number.",
    ),
]
Prefix = Annotated[int, typer.Option(min=0, max=4096, help="First tokens that stay in full precision (IntactKV).")]
RecencyOption = Annotated[
    str,
    typer.Option("--recency", parser=_recency, metavar="sliding:W|log:W|none", help="Recent tokens in full precision."),
]
EvalRecencyOption = Annotated[
    str,
    typer.Option(
        "--recency",
        parser=_recency_or_own,
        metavar="sliding:W|log:W|none|own",
        help="Recent tokens in full precision, the same for every method; own: the recent and first tokens that each "
        "method's paper keeps, and the server's default for cq-* and antkv-*.",
    ),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        help="Text that kvquant-*, skvq-* and +kvsink-N learn from. Without it they learn from the first tokens of "
        "each window, and kvsink from a codebook's sink rule."
    ),
]
Scope = Annotated[
    AnchorScope, typer.Option(help="Queries that vote for anchors: those of the block, or all of the window (paper).")
]
Context = Annotated[int, typer.Option(min=2, help="Tokens per window, BOS first.")]
MaxWindows = Annotated[int | None, typer.Option(min=1, help="Stop after so many windows.")]
Json = Annotated[Path, typer.Option("--json", help="Where the result is written.")]


@app.command()
def calibrate(
    model: Model,
    preset: Annotated[list[str], typer.Option(help="Preset to learn centroids for, e.g. antkv-1bit; repeatable.")],
    text: Annotated[list[str], typer.Option(help="Calibration text: plain UTF-8 file or data set name; repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder for the codebooks.")],
    samples: Annotated[int, typer.Option(min=1, help="Windows of text, at most.")] = 128,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 2048,
    weights: Annotated[
        Literal["grad", "none"], typer.Option(help="How tokens count: by their gradient, or all alike.")
    ] = "grad",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="The same command and seed write the same file.")] = 0,
) -> None:
    """Learn codebooks for a model from text.

    Example: `antkv calibrate MODEL --preset antkv-1bit --text FILE --out DIR`

    The preset `all` stands for every preset. A killed run continues where it stopped.
    """
    from vllm_antkv.calibrate import run

    files = run.calibrate(
        model, preset, text, out, samples=samples, seq_len=seq_len, weights=weights, device=device, seed=seed
    )
    for file in files:
        print(file)


@eval_app.command()
def perplexity(
    model: Model,
    method: Annotated[
        str, typer.Option(help="fp16, antkv-Xbit, cq-Xbit or one of docs/methods.md, e.g. rtn-2bit+pfn-5.")
    ],
    text: Text,
    json: Json,
    codebooks: Codebooks = None,
    anchors: Anchors = _DEFAULTS.anchor_share,
    sinks: Sinks = 5,
    prefix: Prefix = _DEFAULTS.prefix,
    recency: EvalRecencyOption = _DEFAULTS.recency,
    anchor_scope: Scope = _DEFAULTS.anchor_scope,
    calibration: Calibration = None,
    context: Context = 2048,
    max_windows: MaxWindows = None,
) -> None:
    """Perplexity of one method, offline.

    Example: `antkv eval perplexity MODEL --method antkv-1bit --codebooks DIR --text FILE --json OUT`

    As in the papers, without anything but anchors: `--recency none --prefix 0 --sinks 0`
    """
    own = recency == _OWN
    config = _config(codebooks, anchors, sinks, prefix, _DEFAULTS.recency if own else recency, anchor_scope)
    report = _evaluate(model, [method], text, json, codebooks, config, own, calibration, context, max_windows)[0]
    _write(json, report.model_dump())
    print(f"{report.method}: perplexity {report.perplexity:.4f}, {report.effective_bits:.3f} effective bits")


@eval_app.command()
def compare(
    model: Model,
    methods: Annotated[str, typer.Option(help="Names of methods, separated by commas.")],
    text: Text,
    json: Json,
    codebooks: Codebooks = None,
    anchors: Anchors = _DEFAULTS.anchor_share,
    sinks: Sinks = 5,
    prefix: Prefix = _DEFAULTS.prefix,
    recency: EvalRecencyOption = _DEFAULTS.recency,
    anchor_scope: Scope = _DEFAULTS.anchor_scope,
    calibration: Calibration = None,
    context: Context = 2048,
    max_windows: MaxWindows = None,
) -> None:
    """Perplexity of several methods side by side, and how much of CQ's loss antkv-* closes.

    Example: `antkv eval compare MODEL --methods fp16,cq-1bit,antkv-1bit --codebooks DIR --text FILE --json OUT`

    `--recency` and `--context` apply to every method; the gap needs fp16 and the cq-* of the same bits in the list.
    """
    from vllm_antkv.evaluate.compare import gap_closed

    own = recency == _OWN
    config = _config(codebooks, anchors, sinks, prefix, _DEFAULTS.recency if own else recency, anchor_scope)
    names = methods.split(",")
    reports = _evaluate(model, names, text, json, codebooks, config, own, calibration, context, max_windows)
    closed = gap_closed(reports)
    _write(json, {"results": [report.model_dump() for report in reports], "gap_closed": closed})
    Console().print(_table(reports, closed))


@eval_app.command()
def served(
    model: Model,
    kv_cache_dtype: Annotated[str, typer.Option(help="A preset, or auto.")],
    text: Text,
    json: Json,
    codebooks: Codebooks = None,
    anchors: Anchors = _DEFAULTS.anchor_share,
    sinks: Sinks = 5,
    prefix: Prefix = _DEFAULTS.prefix,
    recency: RecencyOption = _DEFAULTS.recency,
    anchor_scope: Scope = _DEFAULTS.anchor_scope,
    context: Context = 2048,
    max_windows: MaxWindows = None,
) -> None:
    """Perplexity through real vLLM, to be held against the offline figure for the same settings.

    Example: `antkv eval served MODEL --kv-cache-dtype antkv-1bit --codebooks DIR --text FILE --json OUT`
    """
    from vllm_antkv.evaluate.models import ModelCard
    from vllm_antkv.evaluate.report import check_writable
    from vllm_antkv.evaluate.served import evaluate_served
    from vllm_antkv.evaluate.windows import load_windows

    check_writable(json)
    config = _config(codebooks, anchors, sinks, prefix, recency, anchor_scope)
    card = ModelCard.read(model)
    windows = load_windows(text, card.tokenizer, context, max_windows)
    with _progress() as start:
        report = evaluate_served(card, kv_cache_dtype, config, windows, text, start(kv_cache_dtype, len(windows)))
    _write(json, report.model_dump())
    print(f"{report.method} served: perplexity {report.perplexity:.4f}, {report.effective_bits:.3f} effective bits")


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help="Folder or Hugging Face name of a model to check.")] = None,
    codebooks: Annotated[str | None, typer.Option(help="Folder with codebooks to check.")] = None,
) -> None:
    """Say what is installed, what works here, and what to do about what does not.

    Example: `antkv doctor MODEL --codebooks DIR`
    """
    from vllm_antkv.doctor import run_doctor

    raise typer.Exit(run_doctor(model, codebooks, Console()))


def main() -> None:
    """Entry point: run the command and turn every expected error into one line."""
    sys.exit(run(sys.argv[1:]))


def run(args: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        return app(args, prog_name="antkv", standalone_mode=False) or 0
    except _UsageError as error:
        return _fail(error.format_message(), 2)  # type: ignore[attr-defined]
    except SettingsError as error:
        return _fail(str(error), 2)
    except (AntKVError, OSError) as error:
        return _fail(str(error), 1)


def _fail(message: str, code: int) -> int:
    print(f"antkv: {' '.join(message.split())}", file=sys.stderr)
    return code


def _config(
    codebooks: Path | None, anchors: float, sinks: int, prefix: int, recency: str, anchor_scope: AnchorScope
) -> AntKVConfig:
    return AntKVConfig(
        codebooks=None if codebooks is None else str(codebooks),
        anchor_share=anchors,
        anchor_scope=anchor_scope,
        sinks=sinks > 0,
        prefix=prefix,
        recency=recency,
    )


def _evaluate(
    model: str,
    methods: list[str],
    text: Path,
    json: Path,
    codebooks: Path | None,
    config: AntKVConfig,
    own_recency: bool,
    calibration: Path | None,
    context: int,
    max_windows: int | None,
) -> "list[PerplexityReport]":
    """Everything that can be wrong is checked before the weights are loaded, but for methods that need a sample."""
    from vllm_antkv.evaluate.methods import MethodRequest, build_method, check_method
    from vllm_antkv.evaluate.models import ModelCard
    from vllm_antkv.evaluate.perplexity import evaluate_perplexity
    from vllm_antkv.evaluate.report import check_writable
    from vllm_antkv.evaluate.sample import take_sample
    from vllm_antkv.evaluate.windows import load_windows

    names = [check_method(name.strip()) for name in methods]
    check_writable(json)
    card = ModelCard.read(model)
    card.check_context(context)
    request = MethodRequest(model, card.identity, codebooks, config, own_recency)
    windows = load_windows(text, card.tokenizer, context, max_windows)
    if calibration is None:
        built = [build_method(name, request) for name in names]
        loaded = card.load()
    else:
        learned = load_windows(calibration, card.tokenizer, context)
        card.check_windows(learned)
        loaded = card.load()
        request = replace(request, sample=take_sample(loaded, learned, str(calibration)))
        built = [build_method(name, request) for name in names]
    with _progress() as start:
        return [
            evaluate_perplexity(card, loaded, method, windows, text, start(method.name, len(windows)))
            for method in built
        ]


def _write(path: Path, content: dict[str, object]) -> None:
    from vllm_antkv.evaluate.report import write_json

    write_json(path, content)


@contextmanager
def _progress() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """A progress display on stderr: yields a function that adds a bar and returns what moves it on."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("windows"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def start(name: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(name, total=total)
            return lambda done: progress.advance(task, done)

        yield start


def _table(reports: "list[PerplexityReport]", closed: dict[str, float]) -> Table:
    table = Table("method", "perplexity", "nominal bits", "effective bits", "gap closed")
    for report in reports:
        gap = closed.get(report.method)
        table.add_row(
            report.method,
            f"{report.perplexity:.4f}",
            f"{report.nominal_bits:g}",
            f"{report.effective_bits:.3f}",
            "" if gap is None else f"{gap:.1%}",
        )
    return table
