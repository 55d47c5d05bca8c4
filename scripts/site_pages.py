"""A hook of mkdocs: pages of the site outside docs/, where GitHub looks for them, and the help of `antkv`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from vllm_antkv.cli import app

ROOT = Path(__file__).parent.parent
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
#: Characters that a page has room for beside its menus.
WIDTH = 80


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add them; their links into docs/ are links beside them there."""
    for name in PAGES:
        content = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, name.lower(), content=content))
    help_texts = "\n".join(_help(typer.main.get_command(app), "antkv"))
    files.append(File.generated(config, "command-line.md", content=f"# Command line\n\n{help_texts}"))
    return files


def _help(command: Any, name: str, parent: Any = None) -> Iterator[str]:
    """What `--help` prints, without colours and boxes, of a command and then of those below it."""
    command.rich_markup_mode = None
    context = command.context_class(
        command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH
    )
    if parent is not None:
        yield f"## {context.command_path}\n"
    yield f"```text\n{command.get_help(context)}\n```\n"
    for below, other in getattr(command, "commands", {}).items():
        yield from _help(other, below, context)
