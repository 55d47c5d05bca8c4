"""`antkv doctor`."""

from typing import Annotated

import typer
from rich.console import Console


def doctor(
    model: Annotated[str | None, typer.Argument(help="Folder or Hugging Face name of a model to check.")] = None,
    codebooks: Annotated[str | None, typer.Option(help="Folder with codebooks to check.")] = None,
) -> None:
    """Say what is installed, what works here, and what to do about what does not.

    Example: `antkv doctor MODEL --codebooks DIR`
    """
    from vllm_antkv.doctor import run_doctor

    raise typer.Exit(run_doctor(model, codebooks, Console()))
