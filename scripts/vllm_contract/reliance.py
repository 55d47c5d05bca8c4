"""One thing that we rely on in vLLM, and whether a release still has it as we need it."""

import ast
import enum
from dataclasses import dataclass

from scripts.vllm_contract.sources import Definition, Function, Sources


class How(enum.Enum):
    """What we do with a name of vLLM, which says what must not change."""

    NAME = "name"  # imported, compared or annotated with: it exists
    CALL = "call"  # called with these arguments
    FIELDS = "fields"  # these attributes are read or set
    WRAP = "wrap"  # replaced, or provided, by a function of ours: the same parameters
    OVERRIDE = "override"  # defined again in a class of ours: the same parameters, which vLLM passes
    SUBCLASS = "subclass"  # a class of ours derives from it: every member it has is a decision about ours
    BEHAVIOUR = "behaviour"  # not named in our code, but what it does is relied on: its text


@dataclass(frozen=True)
class Reliance:
    """A statement of the contract.

    where: `module:Name` or `module:Class.member`, as it would be imported; `new.module|old.module:...` where it moved.
    how: what we do with it.
    expects: arguments of a CALL, as in `blocks, num=`; parameters of WRAP and OVERRIDE, `=` after those with a default;
        "-" for none of them; names of FIELDS.
    why: what of ours stands on it.
    since, until: first and last minor release that it is for.
    """

    where: str
    how: How
    expects: str
    why: str
    since: str = ""
    until: str = ""

    def __post_init__(self) -> None:
        """Refuse what says nothing."""
        assert self.why.strip(), self.where
        assert bool(self.expects) == (self.how in (How.CALL, How.FIELDS, How.WRAP, How.OVERRIDE)), self.where

    def is_for(self, minor: str) -> bool:
        """Whether it holds for a minor release."""
        number = _number(minor)
        return not (self.since and number < _number(self.since)) and not (self.until and number > _number(self.until))

    @property
    def symbol(self) -> str:
        """What comes after the module."""
        return self.where.split(":")[1]

    def find(self, sources: Sources) -> tuple[Definition, str] | None:
        """The definition and the member of it ("" for none), in the first of the modules that has them."""
        modules, symbol = self.where.split(":")
        name, _, member = symbol.partition(".")
        for module in modules.split("|"):
            definition = sources.find(module, name)
            if definition is not None and (not member or sources.member(definition, member)):
                return definition, member
        return None

    def items(self, sources: Sources) -> dict[str, tuple[Definition, list[ast.stmt]] | None]:
        """Everything that it stands for, by name, with the statements that define it; None where that is gone."""
        found = self.find(sources)
        if found is None:
            return {self.where: None}
        definition, member = found
        match self.how:
            case How.FIELDS:
                return {f"{self.where}.{name}": _field(sources, definition, name) for name in self.expects.split()}
            case How.SUBCLASS:
                members = {name: each for each in sources.mro(definition) for name in sources.own_members(each)}
                return {f"{self.where}.{name}": sources.member(definition, name) for name in sorted(members)}
        if member:
            return {self.where: sources.member(definition, member)}
        return {self.where: (definition, sources.statements(definition) or definition.module.tree.body)}

    def broken(self, sources: Sources) -> str | None:
        """Why our code would not work with what these sources have, or None."""
        gone = [name for name, item in self.items(sources).items() if item is None]
        if gone:
            return f"there is no {', '.join(gone)}"
        if self.how not in (How.CALL, How.WRAP, How.OVERRIDE):
            return None
        function = self._function(sources)
        if function is None:
            return "it is no function any more"
        if self.how is How.CALL:
            return _refuses(function, self.expects, is_method="." in self.symbol or function.name == "__init__")
        found = parameters(function)
        return None if found == self.expects else f"its parameters are ({found}), expected were ({self.expects})"

    def _function(self, sources: Sources) -> Function | None:
        item = self.items(sources)[self.where]
        assert item is not None
        definition, statements = item
        for node in statements:
            if isinstance(node, Function):
                return node
            if isinstance(node, ast.ClassDef):
                found = sources.member(definition, "__init__")
                return next((each for each in found[1] if isinstance(each, Function)), None) if found else None
        return None


def parameters(function: Function) -> str:
    """Names of a function's parameters, `=` after those with a default."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    num_required = len(positional) - len(args.defaults)
    names = [each.arg + ("" if index < num_required else "=") for index, each in enumerate(positional)]
    if args.vararg:
        names.append("*" + args.vararg.arg)
    elif args.kwonlyargs:
        names.append("*")
    names += [
        each.arg + ("" if default is None else "=")
        for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        names.append("**" + args.kwarg.arg)
    return ", ".join(names) or "-"


def _refuses(function: Function, call: str, is_method: bool) -> str | None:
    """Why a call as `blocks, num=` would be an error, or None. "-" is a call without arguments."""
    given = [] if call == "-" else call.split(", ")
    num_positional = sum(not each.endswith("=") for each in given)
    keywords = {each.removesuffix("=") for each in given if each.endswith("=")}
    args = function.args
    is_static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list)
    positional = [each.arg for each in [*args.posonlyargs, *args.args]][1 if is_method and not is_static else 0 :]
    if num_positional > len(positional) and not args.vararg:
        return f"it takes {len(positional)} positional arguments, we pass {num_positional}"
    known = {*positional[num_positional:], *(each.arg for each in args.kwonlyargs)}
    unknown = keywords - known
    if unknown and not args.kwarg:
        return f"it has no parameter {', '.join(sorted(unknown))}"
    required = set(positional[num_positional : len(positional) - len(args.defaults)])
    required |= {each.arg for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None}
    left_out = required - keywords
    return f"it needs {', '.join(sorted(left_out))} as well" if left_out else None


def _field(sources: Sources, definition: Definition, name: str) -> tuple[Definition, list[ast.stmt]] | None:
    if definition.name:
        return sources.member(definition, name)
    statements = definition.module.names.get(name)
    return None if statements is None else (definition, statements)


def _number(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor.split("."))
