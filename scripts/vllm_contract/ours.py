"""What our code uses of vLLM, found in its syntax: imports, attributes of what was imported or annotated, overrides.

Types are followed as far as annotations go, ours and vLLM's: `vllm_config.cache_config.block_size` is a use of
`VllmConfig.cache_config` and of `CacheConfig.block_size`. What is `Any` is not followed.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scripts.vllm_contract.reliance import parameters
from scripts.vllm_contract.sources import Definition, Function, Module, Sources, annotated_class, imported_module

ROOT = Path(__file__).parents[2]
FOLDERS = ("vllm_antkv", "scripts", "benchmarks", "loadtest", "docker", "tests")
#: Wherever it stands in a line. What has none imports nothing of vLLM.
_IMPORT = re.compile(r"\b(from|import)\b.*\bvllm\b")


@dataclass(frozen=True, order=True)
class Use:
    """A name of vLLM in our code.

    definition: `path::Name` in vLLM; `path::` is a module.
    member: attribute of it, or "".
    where: `file:line` of ours.
    overrides: the member is defined again in a class of ours.
    parameters: of a method that does so, as in `Reliance.expects`.
    """

    definition: str
    member: str
    where: str
    overrides: bool = False
    parameters: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What is used, wherever that is."""
        return self.definition, self.member


@dataclass(frozen=True)
class _Thing:
    """What an expression is: a class, module or function itself, or an instance of a class."""

    definition: Definition
    is_instance: bool = False


def python_files() -> Iterator[Path]:
    """All of our code."""
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def _importing_files() -> dict[Path, ast.Module]:
    """Those of our files that may import something of vLLM, parsed."""
    texts = ((path, path.read_text()) for path in python_files())
    return {path: ast.parse(text) for path, text in texts if _IMPORT.search(text)}


def uses(sources: Sources) -> list[Use]:
    """Every use, by what `sources` say where names are defined."""
    found: set[Use] = set()
    for path, tree in _importing_files().items():
        found.update(_File(sources, path.relative_to(ROOT).as_posix(), tree).walk())
    return sorted(found)


def unknown_imports(sources: Sources) -> list[str]:
    """Imports from vLLM that these sources do not have, as `file:line module name`."""
    found = []
    for path, tree in _importing_files().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and _of_vllm(node.module):
                for alias in node.names:
                    if sources.find(node.module or "", alias.name) is None:
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.module} {alias.name}")
    return found


def _of_vllm(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "vllm"


class _File:
    def __init__(self, sources: Sources, path: str, tree: ast.Module) -> None:
        self.sources, self.path, self.tree = sources, path, tree
        self.found: set[Use] = set()
        self.imported: dict[str, _Thing] = {}
        self.attributes: dict[str, _Thing] = {}

    def walk(self) -> set[Use]:
        for node in ast.walk(self.tree):
            self._import(node)
        self._scope(self.tree.body, {}, None)
        return self.found

    def _import(self, node: ast.AST) -> None:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _of_vllm(node.module):
            for alias in node.names:
                definition = self.sources.find(imported_module(node, []), alias.name)
                if definition is not None:
                    self.imported[alias.asname or alias.name] = _Thing(definition)
                    self._use(definition, "", node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _of_vllm(alias.name):
                    definition = self.sources.find(alias.name if alias.asname else "vllm", "")
                    assert definition is not None
                    self.imported[alias.asname or "vllm"] = _Thing(definition)

    def _use(self, definition: Definition, member: str, node: ast.AST) -> None:
        self.found.add(Use(str(definition), member, self._where(node)))

    def _override(self, definition: Definition, member: str, node: ast.stmt) -> None:
        own = parameters(node) if isinstance(node, Function) else ""
        self.found.add(Use(str(definition), member, self._where(node), True, own))

    def _where(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 0)}"

    def _scope(self, body: list[ast.stmt], names: dict[str, _Thing], owner: _Thing | None) -> None:
        """Statements of a module, class or function, in order, with what their names stand for."""
        for node in body:
            match node:
                case ast.ClassDef():
                    self._class(node, names)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self._function(node, names, owner)
                case _:
                    self._statement(node, names, owner)

    def _class(self, node: ast.ClassDef, names: dict[str, _Thing]) -> None:
        things = [thing for base in node.bases if (thing := self._annotation(base, names))]
        parent = things[0] if things else None
        owner = _Thing(parent.definition, True) if parent and self.sources.class_of(parent.definition) else None
        if owner is not None:
            for each in node.body:
                for name in _members(each):
                    # Tests make objects without what a constructor would want of a device.
                    left_out = name == "__init__" and self.path.startswith("tests/")
                    if not left_out and self.sources.member(owner.definition, name):
                        self._override(owner.definition, name, each)
        outer, self.attributes = self.attributes, {}
        self._scope(node.body, dict(names), owner)
        self.attributes = outer

    def _function(self, node: Function, names: dict[str, _Thing], owner: _Thing | None) -> None:
        inner = dict(names)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            inner.pop(argument.arg, None)
            thing = self._annotation(argument.annotation, names)
            if thing is not None:
                inner[argument.arg] = _Thing(thing.definition, True)
        if owner is not None and arguments and arguments[0].arg in ("self", "cls"):
            inner.setdefault(arguments[0].arg, owner)
        for each in [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]:
            if each is not None:
                self._expression(each, names)
        self._scope(node.body, inner, owner)

    def _statement(self, node: ast.stmt, names: dict[str, _Thing], owner: _Thing | None) -> None:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                for target, value in zip(targets, values, strict=True):
                    self._bind(target, self._expression(value, names), names)
            case ast.Assign(targets=[target], value=value):
                self._bind(target, self._expression(value, names), names)
                self._expression(target, names)
            case ast.AnnAssign(target=target, annotation=annotation, value=value):
                if value is not None:
                    self._expression(value, names)
                thing = self._annotation(annotation, names)
                self._bind(target, _Thing(thing.definition, True) if thing else None, names)
            case _:
                for field_name, value in ast.iter_fields(node):
                    if field_name in ("body", "orelse", "finalbody", "handlers") and isinstance(value, list):
                        bodies = [each.body if isinstance(each, ast.ExceptHandler) else [each] for each in value]
                        for body in bodies:
                            self._scope(body, names, owner)
                    elif isinstance(value, ast.AST):
                        self._expression(value, names)
                    elif isinstance(value, list):
                        for each in value:
                            if isinstance(each, ast.AST):
                                self._expression(each, names)

    def _bind(self, target: ast.expr, thing: _Thing | None, names: dict[str, _Thing]) -> None:
        if isinstance(target, ast.Name):
            names.pop(target.id, None)
            if thing is not None:
                names[target.id] = thing
            return
        match target:
            case ast.Attribute(value=ast.Name(id="self"), attr=attr) if thing is not None:
                self.attributes[attr] = thing

    def _expression(self, node: ast.AST, names: dict[str, _Thing]) -> _Thing | None:
        """Record the uses in an expression, and say what it is."""
        match node:
            case ast.Name(id=name):
                return names.get(name) or self.imported.get(name)
            case ast.Attribute(value=value, attr=attr):
                if isinstance(value, ast.Name) and value.id == "self" and attr in self.attributes:
                    return self.attributes[attr]
                base = self._expression(value, names)
                return None if base is None else self._attribute(base, attr, node, node)
            case ast.Call(func=ast.Name(id="missing_attributes"), args=[owner, *attributes]):
                thing = self._expression(owner, names)
                for each in attributes:
                    if thing is not None and isinstance(each, ast.Constant):
                        attr = str(each.value)
                        self._attribute(thing, attr, ast.Attribute(owner, attr, ast.Load()), each)
                return None
            case ast.Call(func=function, args=args, keywords=keywords):
                for each in [*args, *(keyword.value for keyword in keywords)]:
                    self._expression(each, names)
                return self._result(self._expression(function, names))
            case ast.Lambda(body=body):
                self._expression(body, names)
                return None
            case ast.Await(value=value):
                return self._expression(value, names)
        for child in ast.iter_child_nodes(node):
            self._expression(child, names)
        return None

    def _attribute(self, base: _Thing, attr: str, node: ast.Attribute, where: ast.AST) -> _Thing | None:
        definition = base.definition
        if attr.startswith("__") and attr != "__getattr__":
            return None
        if not definition.name:
            found = definition.module.resolve(attr) or self.sources.find(_dotted(definition.module), attr)
            if found is not None:
                self._use(found, "", where)
            elif isinstance(node.ctx, ast.Load):
                self._use(definition, attr, where)
            return None if found is None else _Thing(found)
        if self.sources.class_of(definition) is None:
            return None
        member = self.sources.member(definition, attr)
        if member is None:
            # What a hook adds to a class of vLLM is stored there first, and is ours.
            return None
        self._use(definition, attr, where)
        holder, statements = member
        first = statements[0]
        if isinstance(first, Function):
            is_property = any(isinstance(each, ast.Name) and "property" in each.id for each in first.decorator_list)
            result = annotated_class(first.returns, holder.module) if is_property else None
            return None if result is None else _Thing(result, True)
        annotation = first.annotation if isinstance(first, ast.AnnAssign) else None
        result = annotated_class(annotation, holder.module) or _assigned_parameter(self.sources, holder, first)
        return None if result is None else _Thing(result, True)

    def _result(self, called: _Thing | None) -> _Thing | None:
        if called is None or called.is_instance:
            return None
        if self.sources.class_of(called.definition):
            return _Thing(called.definition, True)
        for node in self.sources.statements(called.definition):
            if isinstance(node, Function):
                result = annotated_class(node.returns, called.definition.module)
                return None if result is None else _Thing(result, True)
        return None

    def _annotation(self, annotation: ast.expr | None, names: dict[str, _Thing]) -> _Thing | None:
        match annotation:
            case ast.Constant(value=str(text)):
                return self._annotation(ast.parse(text, mode="eval").body, names)
            case ast.Name(id=name):
                return self.imported.get(name)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self._annotation(left, names) or self._annotation(right, names)
            case ast.Subscript(value=ast.Name(id="type"), slice=inner):
                return self._annotation(inner, names)
            case ast.Subscript(value=value):
                return self._annotation(value, names)
        return None


def _members(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def _assigned_parameter(sources: Sources, holder: Definition, node: ast.stmt) -> Definition | None:
    """The class of `self.x = x`, where x is an annotated parameter of the method."""
    if not isinstance(node, ast.Assign):
        return None
    owner = sources.class_of(holder)
    for method in owner.body if owner else []:
        if isinstance(method, Function) and method.lineno <= node.lineno <= (method.end_lineno or 0):
            return _value_class(sources, holder.module, method, node.value)
    return None


def _value_class(sources: Sources, module: Module, method: Function, value: ast.expr) -> Definition | None:
    match value:
        case ast.Name(id=name):
            for argument in [*method.args.args, *method.args.kwonlyargs]:
                if argument.arg == name:
                    return annotated_class(argument.annotation, module)
        case ast.Call(func=ast.Name(id=name)):
            called = module.resolve(name)
            if called is not None and sources.class_of(called):
                return called
            for node in sources.statements(called) if called else []:
                if isinstance(node, Function):
                    return annotated_class(node.returns, called.module)  # type: ignore[union-attr]
        case ast.Attribute(value=ast.Name(id="self"), attr=attr):
            owner = module.resolve(_owner_name(module, method))
            found = sources.member(owner, attr) if owner else None
            if found and isinstance(found[1][0], ast.AnnAssign):
                return annotated_class(found[1][0].annotation, found[0].module)
            if found and isinstance(found[1][0], ast.Assign) and found[1][0].value is not value:
                return _assigned_parameter(sources, found[0], found[1][0])
    return None


def _owner_name(module: Module, method: Function) -> str:
    owners = (node for node in module.tree.body if isinstance(node, ast.ClassDef) and method in node.body)
    return next(owners).name


def _dotted(module: Module) -> str:
    return module.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
