"""Where vLLM asks what kind of thing it has: each such place decides about our classes as about vLLM's own."""

import ast
import re
from collections import Counter
from collections.abc import Iterable

from scripts.vllm_contract.sources import Function, Sources

#: Models and KV connectors that an antkv cache refuses, and what is no part of serving, decide nothing about it.
_LEFT_OUT = (
    "vllm/benchmarks/",
    "vllm/distributed/",
    "vllm/model_executor/models/",
    "vllm/models/",
    "vllm/third_party/",
)


def sites(sources: Sources, classes: Iterable[str]) -> dict[str, int]:
    """Questions like `isinstance(spec, SlidingWindowSpec)`, as `path::function: question`, and how often each is asked.

    Questions are `isinstance`, `issubclass`, `type(x) is C` and keys of a dict by class.
    """
    wanted = set(classes)
    mention = re.compile(r"\b(" + "|".join(wanted) + r")\b")
    found: Counter[str] = Counter()
    for path in sources.python_files():
        if path.startswith(_LEFT_OUT):
            continue
        text = (sources.root / path).read_text()
        if mention.search(text):
            _walk(ast.parse(text), path, "", wanted, found)
    return dict(sorted(found.items()))


def _walk(node: ast.AST, path: str, owner: str, wanted: set[str], found: Counter[str]) -> None:
    if _is_question(node, wanted):
        found[f"{path}::{owner}: {ast.unparse(node)}"] += 1
    if isinstance(node, Function | ast.ClassDef):
        owner = f"{owner}.{node.name}" if owner else node.name
    for child in ast.iter_child_nodes(node):
        _walk(child, path, owner, wanted, found)


def _is_question(node: ast.AST, wanted: set[str]) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
            return _mentions(kinds, wanted)
        case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.Eq() | ast.In()], comparators=[kind]):
            return _mentions(kind, wanted)
        case ast.MatchClass(cls=kind):
            return _mentions(kind, wanted)
    return False


def _mentions(node: ast.AST, wanted: set[str]) -> bool:
    names = (each.id if isinstance(each, ast.Name) else getattr(each, "attr", "") for each in ast.walk(node))
    return not wanted.isdisjoint(names)
