"""Every message on docs/troubleshooting.md is one that the source has: our own, vLLM's or Python's."""

import argparse
import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import vllm

from scripts.moved import kv_cache_planning
from vllm_antkv.releases import minor_release

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
_VLLM = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
SOURCES = [
    *sorted((ROOT / "vllm_antkv").rglob("*.py")),
    *sorted((ROOT / "loadtest").glob("*.py")),
    ROOT / "scripts" / "demo.py",
    ROOT / "scripts" / "make_venv.sh",
    ROOT / "vllm_antkv" / "vllm_adapter" / "server" / "dashboard" / "dashboard.js",
    *(_VLLM / "v1" / name for name in ("core/kv_cache_utils.py", "worker/cpu_worker.py", "worker/utils.py")),
    *(_VLLM / name for name in ("v1/engine/exceptions.py", "renderers/params.py", "plugins/__init__.py")),
    _VLLM / "config" / "cache.py",
    Path(kv_cache_planning().__file__),
    Path(argparse.__file__),
    Path(importlib.metadata.__file__),
]
#: What stands in the place of a value: in Python's %-formats, in JavaScript's templates, in the shell.
_BLANK = re.compile(r"%(?:\(\w+\))?[.\d]*[sdfr]|\$\{[^}]*\}|\$\w+")
_LITERAL = re.compile(r"""(["`])(.*?)\1""")
#: Where the first sentence of a message ends, or its first line: the page may leave out the rest.
_FIRST = re.compile(r"(?<=\.)\s|\n")
#: Of a message without its values: less would fit anything.
_LEAST = 12


def messages() -> list[str]:
    """The terms of the page's definition lists, without those that are said to be another vLLM's."""
    lines = PAGE.read_text().splitlines()
    terms = [line for line, below in pairwise(lines) if below.startswith(":   ") and is_of_this_vllm(below)]
    return [re.fullmatch(r"(`+)(.*)\1", term)[2] for term in terms if term.endswith("`")]


def is_of_this_vllm(definition: str) -> bool:
    """Whether a definition names no release first, or the one that is installed."""
    named = re.match(r":   vLLM (\d+\.\d+):", definition)
    return named is None or named[1] == minor_release(vllm.__version__)


def _texts(path: Path) -> Iterator[str]:
    """The strings of a source file, with \\0 for each value in them."""
    if path.suffix != ".py":
        for literal in _LITERAL.finditer(path.read_text()):
            yield _BLANK.sub("\0", literal[2])
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _BLANK.sub("\0", node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)


@cache
def patterns() -> list[re.Pattern[str]]:
    """One for each string that could be a message."""
    texts = [text for path in SOURCES for text in _texts(path)]
    found = {_plain(text) for whole in texts for text in (whole, _FIRST.split(whole, maxsplit=1)[0])}
    long_enough = (text for text in found if len(text.replace("\0", "")) >= _LEAST)
    return [re.compile("(.+)".join(map(re.escape, text.split("\0")))) for text in long_enough]


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def is_in_the_source(message: str) -> bool:
    """Whether some string, with values of which the page gives only names in capitals, is this message."""
    return any(pattern.fullmatch(_plain(message)) for pattern in patterns())


@pytest.mark.parametrize("message", messages())
def test_a_message_is_in_the_source(message: str) -> None:
    assert is_in_the_source(message)


def test_there_are_messages_of_every_phase() -> None:
    assert len(messages()) > 30


@pytest.mark.parametrize(
    "message",
    [
        "PATH is damaged: its checksum does not fit; run `antkv calibrate` again.",
        "vllm-antkv is inactive: REASON.",
        "Unknown preset 'NAME'.",
        "There is no such thing.",
    ],
)
def test_a_message_that_was_changed_is_found(message: str) -> None:
    assert not is_in_the_source(message)
