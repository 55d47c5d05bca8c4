"""Every command of the README and the docs is run here, or is read by its own program, or says what it needs.

Commands of `antkv` and vLLM are read by their own parsers, targets of make by make. Of others, the files in them must
exist. Where the line before a fence ends in what its commands need ("This needs a GPU:"), they do not run in the tests:
a GPU, Docker, a cluster or the network. Words in capitals are for the reader to fill in. Those of `antkv` in which
nothing is to be filled in are run as they stand.
"""

import argparse
import functools
import glob
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.places import ROOT
from vllm_antkv import cli

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(
    r"(?P<needs>\bneeds [^.:\n]*\b(?:GPUs?|Docker|cluster|network):\n\n)?"
    r"^(?P<indent> *)```(?P<language>bash|console)\n(?P<body>.*?)^(?P=indent)```$",
    re.M | re.S,
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.S)
_PLACEHOLDER = re.compile(r"\$?[A-Z][A-Z_]+(_ids\.json|\.svg)?|https?://[ab]:8000", re.ASCII)


class WrongCommand(Exception):
    """A command that would not work; one sentence."""


@dataclass(frozen=True)
class Command:
    """One command.

    page: name of its file.
    line: as on the page, on one line.
    needs: whether it needs what is not there.
    """

    page: str
    line: str
    needs: bool

    @property
    def words(self) -> list[str]:
        """Program and arguments, without comments and without variables set in front."""
        words = shlex.split(self.line, comments=True)
        while words and _ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        return words

    @property
    def has_blanks(self) -> bool:
        """Whether the reader has to fill something in."""
        return any(_PLACEHOLDER.fullmatch(word) and not (ROOT / word).exists() for word in self.words)


def commands(page: Path) -> Iterator[Command]:
    """All commands of a page: behind a `$` in a console, and every line of a script."""
    for fence in _FENCE.finditer(page.read_text()):
        for line in map(str.strip, re.sub(r"\\\n\s*", "", fence["body"]).splitlines()):
            if fence["language"] == "bash" or line.startswith("$ "):
                yield Command(page.name, line.removeprefix("$ "), fence["needs"] is not None)


def check(command: Command) -> None:
    """WrongCommand unless the command is right; of other programs, the files that it names are there."""
    program, *arguments = command.words
    CHECKS.get(program.rpartition("/")[2], check_files)(arguments)


def check_antkv(arguments: list[str]) -> None:
    """By typer's command for it, and the names in it by what reads them."""
    import typer

    from vllm_antkv import cli
    from vllm_antkv.errors import SettingsError
    from vllm_antkv.evaluate.methods import check_method
    from vllm_antkv.presets import get_preset

    command: Any = typer.main.get_command(cli.app)
    while hasattr(command, "commands") and arguments and not arguments[0].startswith("-"):
        if arguments[0] not in command.commands:
            raise WrongCommand(f"antkv has no command {arguments[0]}.")
        command, arguments = command.commands[arguments[0]], arguments[1:]
    try:
        given = command.make_context("antkv", arguments).params
        for name in (given.get("methods") or given.get("method") or "fp16").split(","):
            check_method(name)
        dtypes = [*(given.get("kv_cache_dtype") or "auto").split(","), *(given.get("preset") or [])]
        for name in set(dtypes) - {"auto", "fp8", "all"}:
            get_preset(name)
    except cli.UsageError as error:
        raise WrongCommand(error.format_message()) from None
    except SettingsError as error:
        raise WrongCommand(str(error)) from None


def check_vllm(arguments: list[str]) -> None:
    """By vLLM's own parser, with the plugin loaded, and our settings among the arguments by ours."""
    from vllm_antkv.config import AntKVConfig
    from vllm_antkv.errors import SettingsError

    name = "bench serve" if arguments[:2] == ["bench", "serve"] else "serve"

    def refuse(_: argparse.ArgumentParser, message: str) -> None:
        raise WrongCommand(message)

    with mock.patch.object(argparse.ArgumentParser, "error", refuse):
        found = _vllm_parsers()[name].parse_args(arguments[len(name.split()) :])
    try:
        AntKVConfig.from_additional_config(getattr(found, "additional_config", {}))
    except SettingsError as error:
        raise WrongCommand(str(error)) from None


@functools.cache
def _vllm_parsers() -> dict[str, argparse.ArgumentParser]:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from scripts.moved import serve_arguments
    from vllm_antkv.plugin import register

    register()
    bench = FlexibleArgumentParser()
    add_cli_args(bench)
    return {"serve": serve_arguments().make_arg_parser(FlexibleArgumentParser()), "bench serve": bench}


def check_python(arguments: list[str]) -> None:
    """Our own programs are there."""
    if arguments[0] == "-m" and arguments[1] != "pip":
        name = arguments[1].replace(".", "/")
        arguments = [f"{name}/__main__.py" if (ROOT / name).is_dir() else f"{name}.py"]
    check_files(arguments)


def check_make(arguments: list[str]) -> None:
    """By make itself."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WrongCommand(f"{' '.join(command)}: {done.stderr.strip()}")


def check_files(arguments: list[str]) -> None:
    """Paths below this folder exist."""
    for name in arguments:
        if re.fullmatch(r"\w[\w./-]*/[\w./-]*|\./.*", name) and not glob.glob(name, root_dir=ROOT):
            raise WrongCommand(f"There is no {name}.")


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "antkv": check_antkv,
    "make": check_make,
    "python": check_python,
    "vllm": check_vllm,
}


COMMANDS = [command for page in PAGES for command in commands(page) if command.words]
RUN = [command for command in COMMANDS if command.words[0] == "antkv" and not (command.needs or command.has_blanks)]


def test_nothing_stands_beside_the_language_of_a_fence():
    """GitHub drops it."""
    assert not [page.name for page in PAGES if re.search(r"^ *```\w+ ", page.read_text(), re.M)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.line}"[:90])
def test_a_command_is_right(command):
    check(command)


def test_commands_with_nothing_to_fill_in_run(tmp_path, monkeypatch):
    """In the order of the pages, in one folder: later ones use what earlier ones made."""
    assert len(RUN) >= 4, "the quick start has some"
    for name in ("LICENSE", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for line, command in {command.line: command for command in RUN}.items():
        assert cli.run(command.words[1:]) == 0, line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("antkv calibrate MODEL --preset antkv-1bit --text FILE --out DIR --sample 3", "--sample"),
        ("antkv calibrate MODEL --preset antkv-3bit --text FILE --out DIR", "antkv-3bit"),
        ("antkv callibrate MODEL", "callibrate"),
        ("antkv eval compare MODEL --methods fp16,rtn-9bit --text FILE --json OUT", "rtn-9bit"),
        ("vllm serve MODEL --kv-cache-dtype antkv-1bit --no-such-flag 3", "--no-such-flag"),
        ('vllm serve MODEL --additional-config \'{"antkv": {"recent": 3}}\'', "recent"),
        ("make demon", "demon"),
        ("python -m scripts.nothing", "nothing.py"),
        ("pytest tests/nothing.py", "nothing.py"),
    ],
)
def test_a_wrong_command_is_found(line, words):
    with pytest.raises(WrongCommand, match=words):
        check(Command("page.md", line, None))
