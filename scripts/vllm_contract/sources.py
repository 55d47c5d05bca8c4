"""Reads vLLM's sources: where a name is defined, and what a class has, its bases within vLLM included."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """Something that a file defines at its top level; `name` is "" for the module itself."""

    path: str
    name: str
    module: "Module" = field(repr=False, compare=False)
    node: ast.AST = field(repr=False, compare=False)


class Module:
    """A parsed file."""

    def __init__(self, sources: "Sources", path: str, text: str) -> None:
        self.sources, self.path, self.tree = sources, path, ast.parse(text)

    @cached_property
    def names(self) -> dict[str, ast.stmt]:
        """Top-level names and the statements that bind them first, those under `if` and `try` included."""
        statements: dict[str, ast.stmt] = {}
        for node in _statements(self.tree.body):
            for name in bound_names(node):
                statements.setdefault(name, node)
        return statements

    def resolve(self, name: str) -> Definition | None:
        """What a name in this file stands for: a definition here, or in the file it is imported from."""
        node = self.names.get(name)
        if isinstance(node, ast.ImportFrom):
            origin = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            return self.sources.find(self._origin(node), origin)
        if isinstance(node, ast.Import):
            return None
        if node is not None:
            return Definition(self.path, name, self, node)
        starred = (n for n in self.tree.body if isinstance(n, ast.ImportFrom) and n.names[0].name == "*")
        return next((definition for n in starred if (definition := self.sources.find(self._origin(n), name))), None)

    def _origin(self, node: ast.ImportFrom) -> str:
        package = self.path.removesuffix(".py").split("/")[: -node.level] if node.level else []
        return ".".join([*package, *filter(None, [node.module])])


class Sources:
    """The sources of one release, below a folder that contains `vllm/`; files are parsed when they are asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module | None] = {}

    def find(self, dotted: str, name: str = "") -> Definition | None:
        """Follow imports to where `name` of a module is defined; a submodule is a name of its package."""
        base = dotted.replace(".", "/")
        module = self._file(f"{base}.py") or self._file(f"{base}/__init__.py")
        if module is None:
            return None
        if not name:
            return Definition(module.path, "", module, module.tree)
        return module.resolve(name) or self.find(f"{dotted}.{name}")

    def mro(self, definition: Definition) -> Iterator[Definition]:
        """A class and its bases within vLLM, depth first."""
        yield definition
        for base in getattr(definition.node, "bases", []):
            parent = definition.module.resolve(ast.unparse(base).partition("[")[0])
            if parent is not None:
                yield from self.mro(parent)

    def members(self, definition: Definition) -> dict[str, ast.stmt]:
        """What the body of a class, or of one of its bases within vLLM, defines."""
        statements: dict[str, ast.stmt] = {}
        for owner in self.mro(definition):
            for node in owner.node.body if isinstance(owner.node, ast.ClassDef) else ():
                for name in bound_names(node):
                    statements.setdefault(name, node)
        return statements

    def files(self) -> Iterator[Path]:
        """All of them."""
        yield from sorted((self.root / "vllm").rglob("*.py"))

    def _file(self, path: str) -> Module | None:
        if path not in self._modules:
            file = self.root / path
            is_there = path.startswith("vllm/") and file.is_file()
            self._modules[path] = Module(self, path, file.read_text()) if is_there else None
        return self._modules[path]


def parameters(function: Function) -> str:
    """Names of a function's parameters, `=` after those with a default."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    optional = len(positional) - len(args.defaults)
    names = [each.arg + ("=" if index >= optional else "") for index, each in enumerate(positional)]
    names += [f"*{args.vararg.arg if args.vararg else ''}"] if args.vararg or args.kwonlyargs else []
    keywords = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    names += [each.arg + ("" if default is None else "=") for each, default in keywords]
    return ", ".join([*names, f"**{args.kwarg.arg}"] if args.kwarg else names)


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


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        match node:
            case ast.If(body=then, orelse=otherwise):
                yield from _statements([*then, *otherwise])
            case ast.Try(body=then, handlers=handlers):
                yield from _statements([*then, *(each for handler in handlers for each in handler.body)])
            case _:
                yield node
