"""`antkv doctor`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from vllm_antkv import __version__
from vllm_antkv.cli.tables import JsonInstead, deliver, wrapped
from vllm_antkv.errors import SettingsError

if TYPE_CHECKING:
    from vllm_antkv.doctor.finding import Finding

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
_INDENT = 9
_WHAT = 19


def doctor(
    model: Annotated[str | None, typer.Argument(help="Folder or Hugging Face name of a model to check.")] = None,
    codebooks: Annotated[str | None, typer.Option(help="Folder with codebooks to check.")] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Start vLLM with auto and with an unquantised antkv cache, and compare their answers."
        ),
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            help="Of weights and activations with --verify; default on a CPU: float32, or what layers ask for."
        ),
    ] = None,
    json: JsonInstead = None,
) -> None:
    """Say what is installed, what works here, and what to do about what does not.

    Example: `antkv doctor MODEL --codebooks DIR`
    """
    from vllm_antkv.doctor import examine

    if verify and model is None:
        raise SettingsError("--verify needs a model: antkv doctor MODEL --verify.")

    progress = Console(stderr=True)
    report: dict[str, list[Finding]] = {}
    for title, check in examine(model, codebooks, verify, dtype):
        with progress.status(f"Checking: {title} ..."):
            report[title] = list(check())
    problems = sum(finding.state == "problem" for findings in report.values() for finding in findings)
    sections = {title: [asdict(finding) for finding in findings] for title, findings in report.items()}
    deliver(
        {"vllm-antkv": __version__, "problems": problems, "sections": sections}, json, lambda: _show(report, problems)
    )
    raise typer.Exit(min(problems, 1))


def _show(report: "dict[str, list[Finding]]", problems: int) -> None:
    console = Console()
    console.print(f"vllm-antkv {__version__}", highlight=False)
    for title, findings in report.items():
        console.print(f"\n{title}", style="bold")
        for finding in findings:
            # Lines are as long as their longest word: a path that is cut cannot be copied.
            console.print(_lines(finding), soft_wrap=True)
    ended = f"{problems} problem{'s' * (problems != 1)} found." if problems else "Everything that was checked works."
    console.print(f"\n{ended}", highlight=False)


def _lines(finding: "Finding") -> Text:
    """State, what was looked at and what was found, on one line where it fits, and below what to do about it."""
    text = Text(f"{finding.state:{_INDENT}}", style=_STYLES[finding.state])
    short = f"{finding.what:{_WHAT}} {finding.detail}"
    if wrapped(short, _INDENT) == short:
        text.append(short, style="default")
    else:
        text.append(f"{finding.what}\n{' ' * _INDENT}{wrapped(finding.detail, _INDENT)}", style="default")
    if finding.remedy:
        text.append(f"\n{'-> ':>{_INDENT}}{wrapped(finding.remedy, _INDENT)}", style="default")
    return text
