"""The commands of the README and of docs/, and how each is checked without doing its work.

A command is read by the program's own parser, so that every flag exists, and the files and names in it are looked up.
A fence whose title begins with "Needs" (`title="Needs a GPU"`, which the site shows) says why its commands do not run
in the tests; all others must be of a program that `CHECKS` knows. Words in capitals are for the reader to fill in.
"""

import argparse
import functools
import glob
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"bash", "console", "json", "promql", "python", "text", "yaml"}
#: Programs that are of no use without what the title of their fence must name.
OUTSIDE = {"docker": "Docker", "helm": "a cluster", "kubectl": "a cluster"}
#: Words to fill in that a parser would not take as they are.
PLACEHOLDERS = {"NAMES": "fp16", "RECENCY": "none"}

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.S)
_PLACEHOLDER = re.compile(r"\$?[A-Z][A-Z_]+(_ids\.json|\.svg)?|https?://[ab]:8000", re.ASCII)


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
    """All commands of a page."""
    for fence in _FENCE.finditer(page.read_text()):
        if fence["language"] not in LANGUAGES:
            raise WrongCommand(f"{page.name} has a fence in none of the languages {', '.join(sorted(LANGUAGES))}.")
        if fence["language"] not in ("bash", "console"):
            continue
        title = re.fullmatch(r' title="(Needs [^"]+)"', fence["info"])
        if fence["info"].strip() and title is None:
            raise WrongCommand(f'{page.name}: the title of a fence with commands begins with "Needs", or is left out.')
        for line in _logical_lines(fence["body"], prompt=fence["language"] == "console"):
            yield Command(page.name, line, title and title[1])


def _logical_lines(body: str, prompt: bool) -> Iterator[str]:
    """Commands of a fence: behind a `$` in a console, where other lines are output, and every line of a script."""
    for line in re.sub(r"\\\n\s*", "", body).splitlines():
        line = line.strip()
        if prompt and line.startswith("$ "):
            yield line[2:]
        elif not prompt and line and not line.startswith("#"):
            yield line


def flags_in_prose(page: Path) -> Iterator[str]:
    """Options that a page names outside its fences."""
    for span in re.findall(r"`([^`]+)`", _FENCE.sub("", page.read_text())):
        yield from re.findall(r"(?<![\w-])--[a-z][\w-]*", span)


def names_in_prose(page: Path, option: str) -> Iterator[str]:
    """What a page gives an option outside its fences, such as `--figures a,b`."""
    for names in re.findall(rf"`[^`]*{option} ([a-z][^` ]*)[^`]*`", _FENCE.sub("", page.read_text())):
        yield from names.split(",")


@functools.cache
def known_flags() -> frozenset[str]:
    """Options of `antkv`, of vLLM's commands and of every program in this repository."""
    import typer

    from vllm_antkv import cli

    found = {flag for parser in _vllm_parsers().values() for flag in parser._option_string_actions}
    waiting: list[Any] = [typer.main.get_command(cli.app)]
    for command in waiting:
        waiting += getattr(command, "commands", {}).values()
        found |= {flag for parameter in command.params for flag in [*parameter.opts, *parameter.secondary_opts]}
    for folder in ("benchmarks", "docker", "loadtest", "models", "research", "scripts", "tests/fuzz"):
        for path in (ROOT / folder).rglob("*.py"):
            found.update(re.findall(r'"(--[a-z][\w-]*)"', path.read_text()))
    return frozenset(found)


def check(command: Command) -> None:
    """WrongCommand unless the command is of a kind that is known, and right."""
    words = [PLACEHOLDERS.get(word, word) for word in command.words]
    while words:
        end = words.index("|") if "|" in words else len(words)
        _check(words[:end], command.needs)
        words = words[end + 1 :]


def _check(words: list[str], needs: str | None) -> None:
    program, arguments = words[0].rpartition("/")[2], words[1:]
    if program not in CHECKS:
        raise WrongCommand(f"Nobody knows how to check {program}: add it to CHECKS.")
    if program in OUTSIDE and OUTSIDE[program] not in (needs or ""):
        raise WrongCommand(f'{program} stands in a fence without the title "Needs {OUTSIDE[program]}".')
    CHECKS[program](arguments)


def _must_exist(name: str, folder: Path = ROOT) -> None:
    if not glob.glob(name, root_dir=folder):
        raise WrongCommand(f"There is no {name}.")


# antkv


def check_antkv(arguments: list[str]) -> None:
    """By typer's command for it, and the names in it by what reads them."""
    import typer

    from vllm_antkv import cli

    command: Any = typer.main.get_command(cli.app)
    while hasattr(command, "commands") and arguments and not arguments[0].startswith("-"):
        if arguments[0] not in command.commands:
            raise WrongCommand(f"antkv has no command {arguments[0]}.")
        command, arguments = command.commands[arguments[0]], arguments[1:]
    try:
        given = command.make_context("antkv", arguments).params
    except cli.UsageError as error:
        raise WrongCommand(error.format_message()) from None
    _check_names(given)


def _check_names(given: dict[str, Any]) -> None:
    from vllm_antkv.errors import SettingsError
    from vllm_antkv.evaluate.figures import choose_figures
    from vllm_antkv.evaluate.methods import check_method
    from vllm_antkv.presets import get_preset

    try:
        for name in (given.get("methods") or given.get("method") or "fp16").split(","):
            check_method(name)
        dtypes = [*(given.get("kv_cache_dtype") or "auto").split(","), *(given.get("preset") or [])]
        for name in dtypes:
            if name not in ("auto", "all"):
                get_preset(name)
        choose_figures(given.get("figures"))
    except SettingsError as error:
        raise WrongCommand(str(error)) from None


# vLLM


def check_vllm(arguments: list[str]) -> None:
    """By vLLM's own parser, with the plugin loaded, and our settings among the arguments by ours."""
    name = "bench serve" if arguments[:2] == ["bench", "serve"] else "serve"
    if arguments[: len(name.split())] != name.split():
        raise WrongCommand(f"Nobody knows how to check vllm {arguments[0]}.")
    found = _parsed(_vllm_parsers()[name], arguments[len(name.split()) :])
    if name == "serve":
        from vllm_antkv.config import AntKVConfig
        from vllm_antkv.errors import SettingsError

        try:
            AntKVConfig.from_additional_config(found.additional_config)
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


def _parsed(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    with mock.patch.object(argparse.ArgumentParser, "error", _refuse):
        return parser.parse_args(arguments)


def _refuse(_: argparse.ArgumentParser, message: str) -> None:
    raise WrongCommand(message)


# Python


class _Read(BaseException):
    """The program has read its arguments; `rest` are those that it hands on."""

    def __init__(self, rest: list[str]) -> None:
        self.rest = rest


def check_python(arguments: list[str]) -> None:
    """Our own programs up to the point where they have read their arguments, tools by what they are given."""
    if arguments[:1] != ["-m"]:
        _must_exist(arguments[0])
        _run_up_to_arguments(arguments[0], arguments[1:])
    elif arguments[1] in CHECKS:
        CHECKS[arguments[1]](arguments[2:])
    else:
        module = ROOT.joinpath(*arguments[1].split("."))
        path = module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
        _must_exist(str(path.relative_to(ROOT)))
        _run_up_to_arguments(str(path.relative_to(ROOT)), arguments[2:])


def _run_up_to_arguments(script: str, arguments: list[str]) -> None:
    if "ArgumentParser(" not in (ROOT / script).read_text():
        if any(argument.startswith("-") for argument in arguments):
            raise WrongCommand(f"{script} takes no options.")
        return
    read_known = argparse.ArgumentParser.parse_known_args

    def parse_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
        _, rest = read_known(parser, args, namespace)
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        raise _Read([])

    def parse_known_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
        raise _Read(read_known(parser, args, namespace)[1])

    patched = mock.patch.multiple(
        argparse.ArgumentParser, error=_refuse, parse_args=parse_args, parse_known_args=parse_known_args
    )
    with mock.patch.object(sys, "argv", [script, *arguments]), mock.patch.object(sys, "path", [str(ROOT), *sys.path]):
        try:
            with patched:
                runpy.run_path(str(ROOT / script), run_name="__main__")
        except _Read as done:
            # Only the programs of loadtest hand on what they do not know, to `vllm serve`.
            if done.rest:
                check_vllm(["serve", "MODEL", *done.rest])
            return
    raise WrongCommand(f"{script} did not read its arguments.")


def check_pytest(arguments: list[str]) -> None:
    """Paths exist, flags do."""
    for argument in arguments:
        if "/" in argument:
            _must_exist(argument)


def check_pip(arguments: list[str]) -> None:
    """By pip itself, which shows its help and ends; folders, files and extras exist."""
    _must_succeed([sys.executable, "-m", "pip", *arguments, "--help"])
    for name in arguments[1:]:
        if name.startswith((".", "requirements/")):
            _must_exist(name)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"vllm-antkv\[(\w+)\]", " ".join(arguments)):
        if extra not in extras:
            raise WrongCommand(f"There is no extra {extra}.")


def check_locust(arguments: list[str]) -> None:
    """By locust in a process of its own, whose gevent would change ours; it shows its users and ends."""
    command = [sys.executable, "-m", "locust", *arguments, "--show-task-ratio"]
    _must_succeed(command)


# make and the shell


def check_make(arguments: list[str]) -> None:
    """By make itself, which says what it would run: this is checked in turn."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    }
    for line in _must_succeed(["make", "--dry-run", *arguments], environment).splitlines():
        words = shlex.split(line)
        if words and Path(words[0]).name == "python":
            check_python(words[1:])


def _must_succeed(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WrongCommand(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def check_curl(arguments: list[str]) -> None:
    """Routes below /antkv/ are ours; vLLM's are those that its documentation names."""
    from vllm_antkv.server.page import add_page
    from vllm_antkv.server.routes import APIRouter, data_router

    page = APIRouter(prefix="/antkv")
    add_page(page)
    ours = {route.path for router in (data_router, page) for route in router.routes}
    paths = re.findall(r"http://localhost:8000(/\S*)", " ".join(arguments))
    if len(paths) != 1 or paths[0] not in ours | {"/health", "/metrics", "/v1/completions", "/v1/chat/completions"}:
        raise WrongCommand(f"curl {' '.join(arguments)} asks for nothing that the server answers.")


def check_sourced(arguments: list[str]) -> None:
    """The script that `python -m venv` makes."""
    if arguments != [".venv/bin/activate"]:
        raise WrongCommand(f"Nobody makes {arguments[0]}.")


def check_cp(arguments: list[str]) -> None:
    """What is copied exists."""
    for name in arguments[:-1]:
        _must_exist(name)


# Docker and Kubernetes, of which only the files can be looked up here


def check_docker(arguments: list[str]) -> None:
    """Files exist; a tag is that of this version."""
    for option, value in itertools.pairwise(arguments):
        if option == "--file":
            _must_exist(value)
    from vllm_antkv import __version__

    for tag in re.findall(r"vllm-antkv:(\S+)", " ".join(arguments)):
        if not tag.startswith(__version__):
            raise WrongCommand(f"The image {tag} is not of version {__version__}.")


def check_helm(arguments: list[str]) -> None:
    """The chart exists and has the values that are set."""
    (chart,) = (word for word in arguments if "/" in word and "=" not in word)
    _must_exist(chart)
    values = yaml.safe_load((ROOT / chart / "values.yaml").read_text())
    for option, setting in itertools.pairwise(arguments):
        if option == "--set":
            found = values
            for key in setting.partition("=")[0].split("."):
                if key not in found:
                    raise WrongCommand(f"The chart has no value {setting.partition('=')[0]}.")
                found = found[key]


def check_kubectl(arguments: list[str]) -> None:
    """Files that are applied exist."""
    for option, value in itertools.pairwise(arguments):
        if option == "--filename" and value != "FILE":
            _must_exist(value)


def check_nothing(arguments: list[str]) -> None:
    """Tools that are not ours, with nothing of ours in their arguments."""


CHECKS: dict[str, Callable[[list[str]], None]] = {
    ".": check_sourced,
    "antkv": check_antkv,
    "cp": check_cp,
    "curl": check_curl,
    "docker": check_docker,
    "grep": check_nothing,
    "helm": check_helm,
    "kubectl": check_kubectl,
    "locust": check_locust,
    "make": check_make,
    "pip": check_pip,
    "pytest": check_pytest,
    "python": check_python,
    "vllm": check_vllm,
}
