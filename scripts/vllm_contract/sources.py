"""Reads vLLM's sources: finds a name wherever it is defined, what a class has with its bases, and types of members.

Everything is found by parsing; nothing is imported. A name is written `module:Class.member`, as one would import it,
so that a definition that moves but is imported from the same place as before is found there.
"""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """Where something is defined.

    module: file that holds it.
    name: of the top-level definition; "" is the module itself.
    """

    module: "Module" = field(repr=False)
    name: str

    def __str__(self) -> str:
        return f"{self.module.path}::{self.name}"

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


class Module:
    """A parsed file."""

    def __init__(self, sources: "Sources", path: str, text: str) -> None:
        self.sources, self.path = sources, path
        self.lines = text.splitlines()
        self.tree = ast.parse(text)

    @property
    def package(self) -> list[str]:
        """Of relative imports."""
        parts = self.path.removesuffix(".py").split("/")
        return parts[:-1]

    @cached_property
    def names(self) -> dict[str, list[ast.stmt]]:
        """Top-level names and the statements that define them, those under `if` and `try` included."""
        found: dict[str, list[ast.stmt]] = {}
        for node in _statements(self.tree.body):
            for name in bound_names(node):
                found.setdefault(name, []).append(node)
        return found

    def resolve(self, name: str) -> Definition | None:
        """What a name in this file stands for: a definition here, or in the file it is imported from."""
        if name not in self.names:
            return self._resolve_starred(name)
        for node in self.names[name]:
            if isinstance(node, ast.ImportFrom):
                origin = imported_module(node, self.package)
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.sources.find(origin, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname == name:
                        return self.sources.find(alias.name, "")
            else:
                return Definition(self, name)
        return None

    def _resolve_starred(self, name: str) -> Definition | None:
        for node in self.names.get("*", []):
            if isinstance(node, ast.ImportFrom):
                origin = self.sources.module(imported_module(node, self.package))
                found = origin.resolve(name) if origin else None
                if found is not None:
                    return found
        return None

    def text(self, node: ast.AST) -> str:
        """A node's source without comments, blank lines, docstrings and indentation."""
        skipped = {line for each in ast.walk(node) for line in _docstring_lines(each)}
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(each.lineno for each in decorators)])  # type: ignore[attr-defined]
        numbered = enumerate(self.lines[first - 1 : node.end_lineno], first)  # type: ignore[attr-defined]
        kept = (line.strip() for number, line in numbered if number not in skipped)
        return "\n".join(line for line in kept if line and not line.startswith("#"))


class Sources:
    """The sources of one release, below a folder that contains `vllm/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module | None] = {}
        self._members: dict[Definition, dict[str, list[ast.stmt]]] = {}

    def module(self, dotted: str) -> Module | None:
        """The file of a dotted name."""
        base = dotted.replace(".", "/")
        return self._file(base + ".py") or self._file(base + "/__init__.py")

    def find(self, dotted: str, name: str) -> Definition | None:
        """Follow imports to where `name` of a module is defined; a submodule is a name of its package."""
        module = self.module(dotted)
        if module is None:
            return None
        if not name:
            return Definition(module, "")
        found = module.resolve(name)
        submodule = None if found else self.module(f"{dotted}.{name}")
        return found if submodule is None else Definition(submodule, "")

    def statements(self, definition: Definition) -> list[ast.stmt]:
        """That define it; an overloaded or conditional name has several."""
        return definition.module.names[definition.name] if definition.name else []

    def class_of(self, definition: Definition) -> ast.ClassDef | None:
        """The class that it is."""
        found = (node for node in self.statements(definition) if isinstance(node, ast.ClassDef))
        return next(found, None)

    def mro(self, definition: Definition) -> Iterator[Definition]:
        """A class and its bases within vLLM, depth first."""
        yield definition
        node = self.class_of(definition)
        for base in node.bases if node else []:
            found = annotated_class(base, definition.module)
            if found is not None:
                yield from self.mro(found)

    def own_members(self, definition: Definition) -> dict[str, list[ast.stmt]]:
        """What a class body defines, and the instance attributes that its methods set."""
        if definition not in self._members:
            self._members[definition] = self._find_members(definition)
        return self._members[definition]

    def _find_members(self, definition: Definition) -> dict[str, list[ast.stmt]]:
        node = self.class_of(definition)
        found: dict[str, list[ast.stmt]] = {}
        for each in node.body if node else []:
            for name in bound_names(each):
                found.setdefault(name, []).append(each)
        for method in node.body if node else []:
            for inner in ast.walk(method) if isinstance(method, Function) else ():
                for name in _instance_attributes(inner):
                    if not any(isinstance(known, Function) for known in found.get(name, [])):
                        assert isinstance(inner, ast.stmt)
                        found.setdefault(name, []).append(inner)
        return found

    def member(self, definition: Definition, name: str) -> tuple[Definition, list[ast.stmt]] | None:
        """The class of the MRO that has a member, and the statements that define it there."""
        for each in self.mro(definition):
            found = self.own_members(each).get(name)
            if found:
                return each, found
        return None

    def python_files(self) -> Iterator[str]:
        """Paths of all files."""
        for path in sorted((self.root / "vllm").rglob("*.py")):
            yield path.relative_to(self.root).as_posix()

    def _file(self, path: str) -> Module | None:
        if path not in self._modules:
            file = self.root / path
            self._modules[path] = Module(self, path, file.read_text()) if file.is_file() else None
        return self._modules[path]


@cache
def sources_below(root: Path) -> Sources:
    """The sources there, parsed once."""
    return Sources(root)


def digest(module: Module, statements: list[ast.stmt]) -> str:
    """Of the text of some statements; comments and docstrings do not count."""
    text = "\n".join(module.text(node) for node in statements)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def annotated_class(annotation: ast.expr | None, module: Module) -> Definition | None:
    """The vLLM class that an annotation, or the base of a class, names: `X`, `"X"`, `X | None`, `type[X]`, `X[...]`."""
    match annotation:
        case ast.Constant(value=str(text)):
            return annotated_class(ast.parse(text, mode="eval").body, module)
        case ast.Name(id=name):
            return module.resolve(name)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return annotated_class(left, module) or annotated_class(right, module)
        case ast.Subscript(value=ast.Name(id="Optional" | "type" | "ClassVar"), slice=inner):
            return annotated_class(inner, module)
        case ast.Subscript(value=value):
            return annotated_class(value, module)
    return None


def bound_names(node: ast.AST) -> list[str]:
    """Names that a statement binds."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.ImportFrom(names=names) | ast.Import(names=names):
            return [alias.asname or alias.name for alias in names]
    return []


def imported_module(node: ast.ImportFrom, package: list[str]) -> str:
    """The dotted name of what `from X import` names, for a file of this package."""
    above = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*above, *(node.module or "").split(".")]).strip(".")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        match node:
            case ast.If(body=then, orelse=otherwise):
                yield from _statements([*then, *otherwise])
            case ast.Try(body=then, handlers=handlers):
                yield from _statements([*then, *(each for handler in handlers for each in handler.body)])
            case _:
                yield node


def _instance_attributes(node: ast.AST) -> list[str]:
    targets: list[ast.expr] = []
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=several)]):
            targets = several
        case ast.Assign(targets=several):
            targets = several
        case ast.AnnAssign(target=target):
            targets = [target]
    return [
        each.attr
        for each in targets
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"
    ]


def _docstring_lines(node: ast.AST) -> range:
    if isinstance(node, Function | ast.ClassDef):
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            assert first.end_lineno is not None
            return range(first.lineno, first.end_lineno + 1)
    return range(0)
