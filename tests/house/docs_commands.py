"""The commands of the README and of docs/, and how each is checked without doing its work.

Commands of `antkv` and vLLM are read by their own parsers. Of others, the files and options in them must exist. A fence
whose title begins with "Needs" (`title="Needs a GPU"`, which the site shows) says why its commands do not run in the
tests. Words in capitals are for the reader to fill in.
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

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"bash", "console", "json", "promql", "python", "text", "yaml"}
#: Words to fill in that a parser would not take as they are.
PLACEHOLDERS = {"NAMES": "fp16", "RECENCY": "none"}

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.S)
_PLACEHOLDER = re.compile(r"\$?[A-Z][A-Z_]+(_ids\.json|\.svg)?|https?://[ab]:8000", re.ASCII)
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


class WrongCommand(Exception):
    """A command that would not work; one sentence."""


@dataclass(frozen=True)
class Command:
    """One command.

    page: name of its file.
    line: as on the page, on one line.
    needs: what the title of its fence says it needs, or None.
    """

    page: str
    line: str
    needs: str | None

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
        if fence["language"] not in LANGUAGES:
            raise WrongCommand(f"{page.name} has a fence in none of the languages {', '.join(sorted(LANGUAGES))}.")
        if fence["language"] not in ("bash", "console"):
            continue
        title = re.fullmatch(r' title="(Needs [^"]+)"', fence["info"])
        if fence["info"].strip() and title is None:
            raise WrongCommand(f'{page.name}: the title of a fence with commands begins with "Needs", or is left out.')
        for line in map(str.strip, re.sub(r"\\\n\s*", "", fence["body"]).splitlines()):
            if fence["language"] == "bash" or line.startswith("$ "):
                yield Command(page.name, line.removeprefix("$ "), title and title[1])


def options_in_prose(page: Path) -> Iterator[str]:
    """Options that a page names outside its fences."""
    for span in re.findall(r"`([^`]+)`", _FENCE.sub("", page.read_text())):
        yield from _OPTION.findall(span)


@functools.cache
def known_options() -> frozenset[str]:
    """Options of `antkv`, of vLLM's commands and of every program in this repository."""
    import typer

    from vllm_antkv import cli

    found = {option for parser in _vllm_parsers().values() for option in parser._option_string_actions}
    waiting: list[Any] = [typer.main.get_command(cli.app)]
    for command in waiting:
        waiting += getattr(command, "commands", {}).values()
        found |= {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
    for folder in ("benchmarks", "docker", "loadtest", "models", "research", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= _options_of(path)
    return frozenset(found)


def _options_of(program: Path) -> set[str]:
    return set(re.findall(r'"(--[a-z][\w-]*)"', program.read_text()))


def check(command: Command) -> None:
    """WrongCommand unless the command is of a kind that is known, and right."""
    words = [PLACEHOLDERS.get(word, word) for word in command.words]
    for part in " ".join(map(shlex.quote, words)).split("'|'"):
        program, *arguments = shlex.split(part)
        program = program.rpartition("/")[2]
        if program not in CHECKS:
            raise WrongCommand(f"Nobody knows how to check {program}: add it to CHECKS.")
        CHECKS[program](arguments)


def check_antkv(arguments: list[str]) -> None:
    """By typer's command for it, and the names in it by what reads them."""
    import typer

    from vllm_antkv import cli
    from vllm_antkv.errors import SettingsError
    from vllm_antkv.evaluate.figures import choose_figures
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
        for name in set(dtypes) - {"auto", "all"}:
            get_preset(name)
        choose_figures(given.get("figures"))
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
    """Our own programs: options are in their source, or, behind those of loadtest, of `vllm serve`."""
    if arguments[:2] == ["-m", "pip"]:
        check_files(arguments)
        return
    name = arguments[0]
    if name == "-m":
        arguments = arguments[1:]
        name = arguments[0].replace(".", "/")
        name = f"{name}/__main__.py" if (ROOT / name).is_dir() else f"{name}.py"
    _must_exist(name)
    known = _options_of(ROOT / name)
    if name.startswith("loadtest/"):
        known |= _vllm_parsers()["serve"]._option_string_actions.keys()
    for option in filter(_OPTION.match, arguments):
        if option not in known:
            raise WrongCommand(f"{name} has no option {option}.")


def check_make(arguments: list[str]) -> None:
    """By make itself, which says what it would run: this is checked in turn."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WrongCommand(f"{' '.join(command)}: {done.stderr.strip()}")
    for line in done.stdout.replace("\\\n", "").splitlines():
        words = shlex.split(line)
        if words and Path(words[0]).name == "python" and words[1:3] != ["-m", "pytest"]:
            check_python(words[1:])


def check_curl(arguments: list[str]) -> None:
    """Routes below /antkv/ are ours; vLLM's are those that its documentation names."""
    from vllm_antkv.vllm_adapter.server.routes import data_router

    known = {route.path for route in data_router.routes} | {"/health", "/metrics", "/v1/completions"}
    paths = re.findall(r"http://localhost:8000(/\S*)", " ".join(arguments))
    if len(paths) != 1 or paths[0] not in known:
        raise WrongCommand(f"curl {' '.join(arguments)} asks for nothing that the server answers.")


def check_files(arguments: Iterator[str] | list[str]) -> None:
    """Paths below this folder exist."""
    for name in arguments:
        if re.fullmatch(r"\w[\w./-]*/[\w./-]*|\./.*", name):
            _must_exist(name)


def _must_exist(name: str) -> None:
    if not glob.glob(name, root_dir=ROOT):
        raise WrongCommand(f"There is no {name}.")


CHECKS: dict[str, Callable[[list[str]], None]] = {
    ".": check_files,
    "antkv": check_antkv,
    "curl": check_curl,
    "docker": check_files,
    "grep": check_files,
    "helm": check_files,
    "kubectl": check_files,
    "make": check_make,
    "pip": check_files,
    "pytest": check_files,
    "python": check_python,
    "vllm": check_vllm,
}
