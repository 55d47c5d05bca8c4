"""The names of vLLM that the package imports, and the classes that ours derive from."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scripts.vllm_contract.sources import Function, Sources, parameters

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


def inherited(package: Package, sources: Sources) -> set[str]:
    """Every member of the classes that ours derive from: each is a decision about our objects."""
    definitions = {base: sources.find(*base) for base in package.bases}
    return {
        f"{module}:{name}.{member}"
        for (module, name), definition in definitions.items()
        if definition is not None
        for member in sources.members(definition)
    }


def questions(package: Package, sources: Sources) -> Counter[str]:
    """Lines of vLLM that ask whether something is of a class that ours derive from, without their indentation."""
    names = "|".join(sorted(name for _, name in package.bases))
    asks = re.compile(rf"^.*\b(?:isinstance|issubclass|type)\(.*\b(?:{names})\b.*$", re.M)
    return Counter(line.strip() for path in sources.files() for line in asks.findall(path.read_text()))
