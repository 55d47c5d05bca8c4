"""The command line, `antkv`: a file for each command.

Exit code 0 on success, 2 on bad arguments, 1 on failure; an error is one line on stderr. Heavy imports happen inside
the commands, so that `--help` and mistakes answer at once.
"""

import sys
from typing import Annotated

import typer

from vllm_antkv import __version__
from vllm_antkv.cli import calibrate, compare, doctor, perplexity, plan, publish, served, tasks
from vllm_antkv.errors import AntKVError, SettingsError

app = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)
eval_app = typer.Typer(rich_markup_mode="markdown")
app.command()(calibrate.calibrate)
app.add_typer(eval_app, name="eval", help="Measure quality: perplexity offline, several methods compared, or served.")
for command in (perplexity.perplexity, compare.compare, served.served, tasks.tasks):
    eval_app.command()(command)
for command in (plan.plan, doctor.doctor, publish.publish):
    app.command()(command)

#: Typer brings its own copy of click and exports the root of its usage errors only as the base of this one.
UsageError: type[Exception] = typer.BadParameter.__base__  # type: ignore[assignment]


def _show_version(given: bool) -> None:
    if given:
        print(f"vllm-antkv {__version__}")
        raise typer.Exit


@app.callback()
def antkv(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A KV cache for vLLM at 4 down to 0.375 bits per element: codebooks, checks, plans and measurements."""


def main() -> None:
    """Entry point: run the command and turn every expected error into one line."""
    sys.exit(run(sys.argv[1:]))


def run(args: list[str], app: typer.Typer = app, name: str = "antkv") -> int:
    """Run one command line, of `antkv` or of another app, and return its exit code."""
    try:
        return app(args, prog_name=name, standalone_mode=False) or 0
    except UsageError as error:
        return _fail(error.format_message(), 2)  # type: ignore[attr-defined]
    except SettingsError as error:
        return _fail(str(error), 2)
    except (AntKVError, OSError) as error:
        return _fail(str(error), 1)


def _fail(message: str, code: int) -> int:
    print(f"antkv: {' '.join(message.split())}", file=sys.stderr)
    return code
