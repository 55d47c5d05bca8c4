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
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from vllm_antkv.config import AntKVConfig, Recency
from vllm_antkv.errors import AntKVError, SettingsError, first_problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from vllm_antkv.evaluate.methods import Method
    from vllm_antkv.evaluate.models import ModelCard
    from vllm_antkv.evaluate.report import PerplexityReport
    from vllm_antkv.evaluate.retrieval import RetrievalReport
    from vllm_antkv.evaluate.tasks import TasksReport

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
        help="0: no attention sinks. Anything else: sinks are the first anchors; how many there are is found by the "
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
    channels: Annotated[
        Literal["interleaved", "consecutive"],
        typer.Option(help="How sub-vectors take the channels of K; consecutive is CQ's way."),
    ] = "interleaved",
    bits: Annotated[
        Literal["uniform", "mixed"],
        typer.Option(
            help="uniform: all layers get --preset. mixed: each gets what it needs, all together no more bytes: closer "
            "to full precision, but slower to learn and, with tables of 4,096 centroids, to decode."
        ),
    ] = "uniform",
    refine: Annotated[
        int, typer.Option(min=0, help="Steps of training the centroids end to end after k-means; 0: none.")
    ] = 0,
    train_prefix: Annotated[
        bool,
        typer.Option(
            "--train-prefix",
            help="Train K and V of the first tokens of prompts (IntactKV), 160 steps: of BOS, or of --prefix-text.",
        ),
    ] = False,
    prefix_text: Annotated[
        str | None,
        typer.Option(help="Plain text file with the system prompt that --train-prefix trains, as prompts have it."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="The same command and seed write the same file.")] = 0,
) -> None:
    """Learn codebooks for a model from text.

    Example: `antkv calibrate MODEL --preset antkv-1bit --text FILE --out DIR`

    The preset `all` stands for every preset. A killed run continues where it stopped.
    """
    from vllm_antkv.calibrate import run

    files = run.calibrate(
        model,
        preset,
        text,
        out,
        samples=samples,
        seq_len=seq_len,
        weights=weights,
        channels=channels,
        bits=bits,
        refine=refine,
        train_prefix=train_prefix,
        prefix_text=prefix_text,
        device=device,
        seed=seed,
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
    """Perplexity of several methods side by side, how much of CQ's loss antkv-* closes, and how far each is from fp16.

    Example: `antkv eval compare MODEL --methods fp16,cq-1bit,antkv-1bit --codebooks DIR --text FILE --json OUT`

    `--recency` and `--context` apply to every method; the gap needs fp16 and the cq-* of the same bits in the list.
    """
    from vllm_antkv.evaluate.compare import gap_closed

    own = recency == _OWN
    config = _config(codebooks, anchors, sinks, prefix, _DEFAULTS.recency if own else recency, anchor_scope)
    names = methods.split(",")
    reports = _evaluate(model, names, text, json, codebooks, config, own, calibration, context, max_windows, True)
    closed = gap_closed(reports)
    fidelity = {report.method: report.fidelity.model_dump() for report in reports if report.fidelity}
    _write(json, {"results": [report.model_dump() for report in reports], "gap_closed": closed, "fidelity": fidelity})
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
    against: Annotated[
        str | None,
        typer.Option(
            help="Another --kv-cache-dtype, as a rule auto: a second engine serves it, and top-1 agreement and KL "
            "divergence are reported."
        ),
    ] = None,
) -> None:
    """Perplexity through real vLLM, to be held against the offline figure for the same settings.

    Example: `antkv eval served MODEL --kv-cache-dtype antkv-1bit --codebooks DIR --text FILE --json OUT`

    The divergence is over the 20 most likely tokens of both and a rest: a lower bound of that over the vocabulary.
    """
    from vllm_antkv.evaluate.models import ModelCard
    from vllm_antkv.evaluate.report import check_writable
    from vllm_antkv.evaluate.served import evaluate_served
    from vllm_antkv.evaluate.windows import load_windows

    check_writable(json)
    config = _config(codebooks, anchors, sinks, prefix, recency, anchor_scope)
    card = ModelCard.read(model)
    windows = load_windows(text, card.tokenizer, context, max_windows)
    name, total = (
        (kv_cache_dtype, len(windows)) if against is None else (f"{kv_cache_dtype}, {against}", 2 * len(windows))
    )
    with _progress() as start:
        report = evaluate_served(card, kv_cache_dtype, config, windows, text, start(name, total), against)
    _write(json, report.model_dump())
    print(f"{report.method} served: perplexity {report.perplexity:.4f}, {report.effective_bits:.3f} effective bits")
    if report.against is not None:
        print(
            f"against {report.against.kv_cache_dtype} with perplexity {report.against.perplexity:.4f}: "
            f"{report.against.top1_agreement:.2%} top-1 agreement, KL {report.against.kl:.5f} nats"
        )


@eval_app.command()
def retrieval(
    model: Model,
    json: Json,
    methods: Annotated[str | None, typer.Option(help="Names of methods, offline, separated by commas.")] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="Values of --kv-cache-dtype, through vLLM, separated by commas.")
    ] = None,
    kinds: Annotated[str, typer.Option(help="pairs: one of many key:value lines; passkey: a number in a text.")] = (
        "pairs,passkey"
    ),
    lengths: Annotated[str, typer.Option(help="Tokens of prompt and answer, separated by commas.")] = "512,1024,2048",
    depths: Annotated[str, typer.Option(help="Where the answer is: 0 first line, 1 last.")] = "0,0.25,0.5,0.75,1",
    prompts: Annotated[int, typer.Option(min=1, help="For every kind, length and depth.")] = 20,
    seed: Annotated[int, typer.Option(help="The same seed gives the same prompts.")] = 0,
    figure: Annotated[Path | None, typer.Option(help="Heat maps of length and depth: a .png or .svg file.")] = None,
    codebooks: Codebooks = None,
    anchors: Anchors = _DEFAULTS.anchor_share,
    sinks: Sinks = 5,
    prefix: Prefix = _DEFAULTS.prefix,
    recency: EvalRecencyOption = _DEFAULTS.recency,
    anchor_scope: Scope = _DEFAULTS.anchor_scope,
    calibration: Calibration = None,
) -> None:
    """Exact match on synthetic retrieval prompts, at several lengths and depths.

    Example: `antkv eval retrieval MODEL --methods fp16,antkv-1bit --codebooks DIR --json OUT`

    Through vLLM, with the same prompts: `--kv-cache-dtype auto,antkv-1bit`
    """
    from vllm_antkv.evaluate.heat_map import check_figure, write_heat_map
    from vllm_antkv.evaluate.models import ModelCard
    from vllm_antkv.evaluate.report import check_writable
    from vllm_antkv.evaluate.retrieval import evaluate_retrieval
    from vllm_antkv.evaluate.retrieval_prompts import make_prompts
    from vllm_antkv.evaluate.served import evaluate_retrieval_served

    names, dtypes = _names(methods), _names(kv_cache_dtype)
    if not names and not dtypes:
        raise SettingsError("Say what to evaluate, with --methods or --kv-cache-dtype.")
    check_writable(json)
    if figure is not None:
        check_figure(figure)
    card = ModelCard.read(model)
    sizes = [int(length) for length in _numbers("--lengths", lengths)]
    card.check_context(max(sizes))
    asked = make_prompts(card.tokenizer, _names(kinds), sizes, _numbers("--depths", depths), prompts, seed)
    own = recency == _OWN
    config = _config(codebooks, anchors, sinks, prefix, _DEFAULTS.recency if own else recency, anchor_scope)
    reports = []
    with _progress("prompts") as start:
        if names:
            loaded, built = _load(card, names, codebooks, config, own, calibration, max(sizes))
            reports += [evaluate_retrieval(card, loaded, m, asked, start(m.name, len(asked))) for m in built]
        for dtype in dtypes:
            bar = start(f"{dtype} served", len(asked))
            reports.append(evaluate_retrieval_served(card, dtype, config, asked, bar))
    _write(json, {"results": [report.model_dump() for report in reports]})
    if figure is not None:
        write_heat_map(figure, reports)
    Console().print(_retrieval_table(reports))


@eval_app.command()
def tasks(
    model: Model,
    tasks: Annotated[str, typer.Option(help="Tasks or groups of lm-evaluation-harness, separated by commas.")],
    json: Json,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="Values of --kv-cache-dtype, separated by commas: an engine is started for each.")
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=URL", help="A running server instead, e.g. auto=http://localhost:8000; repeatable."),
    ] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder with task definitions of your own.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples in a prompt; without it, the task's.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each task; without it, all.")] = None,
    max_gen_toks: Annotated[int, typer.Option(min=1, help="Cap on answers, where the task sets none.")] = 256,
    apply_chat_template: Annotated[bool, typer.Option(help="Ask as in a chat: for instruction-tuned models.")] = False,
    context: Annotated[int | None, typer.Option(min=2, help="Longest sequence; without it, the model's.")] = None,
    codebooks: Codebooks = None,
    anchors: Anchors = _DEFAULTS.anchor_share,
    sinks: Sinks = 5,
    prefix: Prefix = _DEFAULTS.prefix,
    recency: RecencyOption = _DEFAULTS.recency,
    anchor_scope: Scope = _DEFAULTS.anchor_scope,
) -> None:
    """Tasks of lm-evaluation-harness through vLLM, side by side, with the length of the answers.

    Example: `antkv eval tasks MODEL --tasks gsm8k,piqa --kv-cache-dtype auto,antkv-1bit --codebooks DIR --json OUT`

    Needs the extra `tasks`: `pip install 'vllm-antkv[tasks]'`
    """
    from vllm_antkv.evaluate.models import ModelCard
    from vllm_antkv.evaluate.report import check_writable
    from vllm_antkv.evaluate.tasks import TaskRun, check_tasks, evaluate_tasks, evaluate_tasks_on_server

    dtypes, servers = _names(kv_cache_dtype), [_named_url(text) for text in server or []]
    if bool(dtypes) == bool(servers):
        raise SettingsError("Say what to evaluate, either with --kv-cache-dtype or with --server.")
    check_writable(json)
    card = ModelCard.read(model)
    run = TaskRun(
        tasks=tuple(_names(tasks)),
        include_path=include_path,
        num_fewshot=num_fewshot,
        limit=limit,
        max_gen_toks=max_gen_toks,
        apply_chat_template=apply_chat_template,
        context=context,
    )
    check_tasks(run)
    config = _config(codebooks, anchors, sinks, prefix, recency, anchor_scope)
    reports = [evaluate_tasks(card, dtype, config, run) for dtype in dtypes]
    reports += [evaluate_tasks_on_server(card, name, url, run) for name, url in servers]
    _write(json, {"results": [report.model_dump() for report in reports]})
    Console().print(_tasks_table(reports))


@app.command()
def capacity(
    model: Model,
    memory: Annotated[list[float], typer.Option(min=1, help="Memory of a GPU in GB; repeatable.")],
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 8192,
    anchors: Anchors = _DEFAULTS.anchor_share,
    prefix: Prefix = _DEFAULTS.prefix,
    recency: RecencyOption = _DEFAULTS.recency,
) -> None:
    """How many tokens a GPU's cache holds with each preset, computed from the model's sizes.

    Example: `antkv capacity MODEL --memory 24 --memory 80`
    """
    from vllm_antkv.evaluate.capacity import capacities
    from vllm_antkv.evaluate.models import ModelCard

    config = AntKVConfig(anchor_share=anchors, prefix=prefix, recency=recency)
    table = Table("kv-cache-dtype", "bits", "codebooks", *(f"{size:g} GB" for size in memory))
    for found in capacities(ModelCard.read(model), config, context, memory):
        sizes = (f"{tokens:,}" if tokens else "does not fit" for tokens in found.tokens)
        table.add_row(found.kv_cache_dtype, f"{found.bits:.3f}", f"{found.codebook_bytes / 1e6:,.0f} MB", *sizes)
    Console().print(table)
    print(f"Tokens of sequences of {context}; computed, with 2 GB for all that is neither weights nor cache.")


@app.command()
def inspect(
    model: Model,
    text: Text,
    out: Annotated[Path, typer.Option(help="Folder for the figures: NAME.png, NAME.svg, and NAME.json with numbers.")],
    codebooks: Codebooks = None,
    figures: Annotated[str | None, typer.Option(help="Names of figures, separated by commas; without it, all.")] = None,
    sinks: Sinks = 5,
    prefix: Prefix = _DEFAULTS.prefix,
    recency: RecencyOption = _DEFAULTS.recency,
    calibration: Annotated[
        Path | None, typer.Option(help="Text to learn from. Without it: the windows of --text after those shown.")
    ] = None,
    context: Context = 2048,
    max_windows: Annotated[int, typer.Option(min=1, help="Windows that perplexity is measured on.")] = 2,
) -> None:
    """Draw the papers' figures for a model: errors, Anchor Scores, sinks, perplexity against anchors, bits, prefix.

    Example: `antkv inspect MODEL --text FILE --codebooks DIR --out DIR`

    A figure that is there with the same settings is not measured again, so a killed run continues where it stopped.
    """
    from vllm_antkv.evaluate.figures import choose_figures
    from vllm_antkv.evaluate.figures.run import inspect_model

    chosen = choose_figures(figures)
    config = _config(codebooks, _DEFAULTS.anchor_share, sinks, prefix, recency, _DEFAULTS.anchor_scope)
    for name, known in inspect_model(model, chosen, text, out, config, calibration, context, max_windows):
        print(f"{out / name}.svg" + (" (measured before)" if known else ""))


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
    try:
        return AntKVConfig(
            codebooks=None if codebooks is None else str(codebooks),
            anchor_share=anchors,
            anchor_scope=anchor_scope,
            sinks=sinks > 0,
            prefix=prefix,
            recency=recency,
        )
    except ValidationError as error:
        setting, problem = first_problem(error, whole="antkv")
        raise SettingsError(f"The setting {setting} is not usable ({problem}).") from None


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
    against_own: bool = False,
) -> "list[PerplexityReport]":
    """Everything that can be wrong is checked before the weights are loaded, but for methods that need a sample."""
    from vllm_antkv.evaluate.methods import check_method
    from vllm_antkv.evaluate.models import ModelCard
    from vllm_antkv.evaluate.perplexity import evaluate_perplexity
    from vllm_antkv.evaluate.report import check_writable
    from vllm_antkv.evaluate.windows import load_windows

    names = [check_method(name.strip()) for name in methods]
    check_writable(json)
    card = ModelCard.read(model)
    card.check_context(context)
    windows = load_windows(text, card.tokenizer, context, max_windows)
    loaded, built = _load(card, names, codebooks, config, own_recency, calibration, context)
    with _progress() as start:
        return [
            evaluate_perplexity(card, loaded, method, windows, text, start(method.name, len(windows)), against_own)
            for method in built
        ]


def _load(
    card: "ModelCard",
    names: list[str],
    codebooks: Path | None,
    config: AntKVConfig,
    own_recency: bool,
    calibration: Path | None,
    context: int,
) -> "tuple[PreTrainedModel, list[Method]]":
    """The model, and the methods; these first, unless they learn from a sample that the model has to read."""
    from vllm_antkv.evaluate.methods import MethodRequest, build_method
    from vllm_antkv.evaluate.sample import take_sample
    from vllm_antkv.evaluate.windows import load_windows

    request = MethodRequest(card.name, card.identity, codebooks, config, own_recency)
    if calibration is None:
        built = [build_method(name, request) for name in names]
        return card.load(), built
    learned = load_windows(calibration, card.tokenizer, context)
    card.check_windows(learned)
    loaded = card.load()
    request = replace(request, sample=take_sample(loaded, learned, str(calibration)))
    return loaded, [build_method(name, request) for name in names]


def _names(text: str | None) -> list[str]:
    return [] if text is None else [name.strip() for name in text.split(",")]


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise SettingsError(f"{option} is '{text}', but must be numbers separated by commas.") from None


def _named_url(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise SettingsError(f"--server is '{text}', but must be NAME=URL, such as auto=http://localhost:8000.")
    return name, url


def _write(path: Path, content: dict[str, object]) -> None:
    from vllm_antkv.evaluate.report import write_json

    write_json(path, content)


@contextmanager
def _progress(unit: str = "windows") -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """A progress display on stderr: yields a function that adds a bar and returns what moves it on."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def start(name: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(name, total=total)
            return lambda done: progress.advance(task, done)

        yield start


def _table(reports: "list[PerplexityReport]", closed: dict[str, float]) -> Table:
    table = Table("method", "perplexity", "nominal bits", "effective bits", "gap closed", "KL from fp16", "top-1")
    for report in reports:
        gap, fidelity = closed.get(report.method), report.fidelity
        assert fidelity is not None
        table.add_row(
            report.method,
            f"{report.perplexity:.4f}",
            f"{report.nominal_bits:g}",
            f"{report.effective_bits:.3f}",
            "" if gap is None else f"{gap:.1%}",
            f"{fidelity.kl:.5f}",
            f"{fidelity.top1_agreement:.2%}",
        )
    return table


def _retrieval_table(reports: "list[RetrievalReport]") -> Table:
    cells = [(cell.kind, cell.length, cell.depth) for cell in reports[0].cells]
    columns = list(dict.fromkeys((kind, length) for kind, length, _ in cells))
    depths = list(dict.fromkeys(depth for *_, depth in cells))
    table = Table("method", "bits", "all", "depth", *(f"{kind} {length}" for kind, length in columns))
    for report in reports:
        match = {(cell.kind, cell.length, cell.depth): cell.exact_match for cell in report.cells}
        name = f"{report.method} served" if report.served else report.method
        for depth in depths:
            row = (f"{match[kind, length, depth]:.0%}" for kind, length in columns)
            first = depth == depths[0]
            about = (name, f"{report.effective_bits:.2f}", f"{report.exact_match:.1%}") if first else ("", "", "")
            table.add_row(*about, f"{depth:.0%}", *row, end_section=depth == depths[-1])
    return table


def _tasks_table(reports: "list[TasksReport]") -> Table:
    from vllm_antkv.evaluate.tasks import metric_rows

    table = Table("task", "metric", *(report.kv_cache_dtype for report in reports))
    for task, metric, values, differences in metric_rows(reports):
        others = (f"{value:.4f} ({far:+.4f})" for value, far in zip(values[1:], differences[1:], strict=True))
        table.add_row(task, metric, f"{values[0]:.4f}", *others)
    if reports[0].answers:
        table.add_row("all", "tokens per answer", *(f"{report.answer_tokens:.1f}" for report in reports))
        table.add_row("all", "answers cut off", *(f"{report.cap_hits:.1%}" for report in reports))
    return table
