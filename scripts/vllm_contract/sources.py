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
        found: dict[str, ast.stmt] = {}
        for node in _statements(self.tree.body):
            for name in bound_names(node):
                found.setdefault(name, node)
        return found

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
        return next((found for n in starred if (found := self.sources.find(self._origin(n), name))), None)

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
            for found in classes_in(base, definition.module):
                yield from self.mro(found)

    def members(self, definition: Definition) -> dict[str, tuple[Definition, ast.stmt]]:
        """Members of a class by name, and attributes that its methods set, with the class that has them; or a module's
        names.
        """
        if not definition.name:
            own = definition.module.names.items()
            return {name: (definition, n) for name, n in own if not isinstance(n, ast.Import | ast.ImportFrom)}
        found: dict[str, tuple[Definition, ast.stmt]] = {}
        for owner in self.mro(definition):
            body = getattr(owner.node, "body", []) if isinstance(owner.node, ast.ClassDef) else []
            methods = [node for node in body if isinstance(node, Function)]
            inner = [each for method in methods for each in ast.walk(method) if isinstance(each, ast.stmt)]
            for node, names in (*((n, bound_names(n)) for n in body), *((n, _set_on_self(n)) for n in inner)):
                for name in names:
                    found.setdefault(name, (owner, node))
        return found

    def files(self) -> Iterator[Path]:
        """All of them."""
        yield from sorted((self.root / "vllm").rglob("*.py"))

    def _file(self, path: str) -> Module | None:
        if path not in self._modules:
            file = self.root / path
            is_there = path.startswith("vllm/") and file.is_file()
            self._modules[path] = Module(self, path, file.read_text()) if is_there else None
        return self._modules[path]


def classes_in(annotation: ast.AST | None, module: Module) -> Iterator[Definition]:
    """The classes of vLLM that an annotation, or the base of a class, names: `X`, `"X"`, `X | None`, `list[X]`."""
    for node in ast.walk(annotation) if annotation else ():
        if isinstance(node, ast.Name):
            found = module.resolve(node.id)
            if found is not None and isinstance(found.node, ast.ClassDef):
                yield found
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield from classes_in(ast.Name(node.value), module)


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


def _set_on_self(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    flat = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [
        each.attr
        for each in flat
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"
    ]
