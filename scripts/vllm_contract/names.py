"""The names of vLLM that the package uses: imports, members, and classes that ours derive from.

Members are found by name: one that a class of vLLM has counts as used where it stands in a file of ours with an import
of vLLM. Types of such members are followed, so that `vllm_config.cache_config.block_size` is found. Names that merely
sound the same are found, too.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scripts.vllm_contract.sources import Definition, Function, Sources, classes_in, parameters

PACKAGE = Path(__file__).parents[2] / "vllm_antkv"


@dataclass(frozen=True)
class Import:
    """Of `name` from a module of vLLM; where: `file:line` of ours."""

    module: str
    name: str
    where: str


@dataclass(frozen=True)
class Override:
    """A method of a class of ours that derives from `base`."""

    base: Import
    method: str
    parameters: str


class Package:
    """Our code that imports vLLM, parsed."""

    def __init__(self, folder: Path = PACKAGE) -> None:
        texts = {path.relative_to(folder.parent): path.read_text() for path in sorted(folder.rglob("*.py"))}
        self._trees = {path: ast.parse(text) for path, text in texts.items() if re.search(r"\bvllm\b", text)}

    @cached_property
    def imports(self) -> list[Import]:
        """All of them, those within functions too."""
        return [
            Import(node.module or "", alias.name, f"{path}:{node.lineno}")
            for path, tree in self._trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
            for alias in node.names
        ]

    @cached_property
    def words(self) -> set[str]:
        """Every attribute, keyword and string that may name a member."""
        found: set[str] = set()
        for tree in self._trees.values():
            for node in ast.walk(tree):
                match node:
                    case ast.Attribute(attr=word) | ast.keyword(arg=str(word)) | ast.Constant(value=str(word)):
                        found.add(word)
                    case ast.FunctionDef(name=word):
                        found.add(word)
        return found

    @cached_property
    def bases(self) -> set[tuple[str, str]]:
        """Module and name of the classes of vLLM that ours derive from."""
        return {(base.module, base.name) for base, _ in self._derived()}

    @cached_property
    def overrides(self) -> list[Override]:
        """The methods of classes that derive from one of vLLM's."""
        return [
            Override(base, each.name, parameters(each))
            for base, node in self._derived()
            for each in node.body
            if isinstance(each, Function)
        ]

    def _derived(self) -> Iterator[tuple[Import, ast.ClassDef]]:
        for path, tree in self._trees.items():
            known = {each.name: each for each in self.imports if each.where.startswith(f"{path}:")}
            for node in ast.walk(tree):
                for base in node.bases if isinstance(node, ast.ClassDef) else ():
                    name = ast.unparse(base).partition("[")[0]
                    if name in known:
                        yield known[name], node  # type: ignore[misc]


def surface(package: Package, sources: Sources) -> dict[str, str]:
    """What is used as `module:Class.member`, and the parameters of functions; of others what kind of thing they are."""
    found: dict[str, str] = {}
    waiting: list[tuple[str, Definition]] = []
    for each in package.imports:
        definition = sources.find(each.module, each.name)
        if definition is not None:
            found[f"{each.module}:{each.name}"] = _kind(definition.node)
            waiting.append((f"{each.module}:{each.name}", definition))
    seen = {definition for _, definition in waiting}
    for place, definition in waiting:
        for name, (owner, node) in sources.members(definition).items():
            if name not in package.words and name != "__init__":
                continue
            found[f"{place}.{name}"] = _kind(node)
            annotation = getattr(node, "returns", None) or getattr(node, "annotation", None)
            for reached in classes_in(annotation, owner.module):
                if reached not in seen:
                    seen.add(reached)
                    waiting.append((_dotted(reached), reached))
    return found


def inherited(package: Package, sources: Sources) -> set[str]:
    """Every member of the classes that ours derive from: each is a decision about our objects."""
    found = {base: sources.find(*base) for base in package.bases}
    return {
        f"{module}:{name}.{member}"
        for (module, name), definition in found.items()
        if definition is not None
        for member in sources.members(definition)
    }


def questions(package: Package, sources: Sources) -> Counter[str]:
    """Lines of vLLM that ask whether something is of a class that ours derive from, without their indentation."""
    names = "|".join(sorted(name for _, name in package.bases))
    asks = re.compile(rf"^.*\b(?:isinstance|issubclass|type)\(.*\b(?:{names})\b.*$", re.M)
    return Counter(line.strip() for path in sources.files() for line in asks.findall(path.read_text()))


def _kind(node: ast.AST) -> str:
    if isinstance(node, Function):
        return f"({parameters(node)})"
    return "class" if isinstance(node, ast.ClassDef) else "there"


def _dotted(definition: Definition) -> str:
    return f"{definition.path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}:{definition.name}"
