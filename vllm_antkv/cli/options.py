"""The options of commands: each is declared once, and those that belong together stand together in a dataclass.

A command takes such a group as one parameter; `grouped` shows typer its fields.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from pydantic import ValidationError

from vllm_antkv.config import AntKVConfig, Recency
from vllm_antkv.errors import SettingsError, first_problem

#: As in `AntKVConfig.anchor_dtype`.
AnchorDtype = Literal["fp8", "model"]

#: The server's.
DEFAULTS = AntKVConfig()


def parse_recency(text: str) -> str:
    """`text` itself; an error of typer's when `Recency` cannot read it."""
    try:
        return str(Recency.parse(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or Hugging Face name of a causal language model.")]
Text = Annotated[
    Path, typer.Option(help="Evaluation text: plain UTF-8, or *_ids.json with a list of windows of token ids.")
]
Anchors = Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of tokens kept as anchors, per KV head.")]
AnchorsAs = Annotated[
    AnchorDtype,
    typer.Option(help="What an anchor stores: its quantisation error in FP8, or the vector in twice the bytes."),
]
Prefix = Annotated[int, typer.Option(min=0, max=4096, help="First tokens that stay unquantised (IntactKV).")]
RecentTokens = Annotated[
    str,
    typer.Option("--recency", parser=parse_recency, metavar="sliding:W|log:W|none", help="Unquantised recent tokens."),
]
Context = Annotated[int, typer.Option(min=2, help="Tokens per window, BOS first.")]
Json = Annotated[Path, typer.Option("--json", help="Where the result is written.")]


@dataclass(frozen=True)
class KeptOptions:
    """Where the codebooks are, and what stays unquantised beside anchors."""

    codebooks: Annotated[
        Path | None,
        typer.Option(
            help="Folder that `antkv calibrate` wrote to. cq-* reads its folder cq, or the folder itself if calibrated "
            "with --weights none. Default: where the server looks."
        ),
    ] = None
    sinks: Annotated[
        int,
        typer.Option(min=0, help="0: no attention sinks. Any other number: those that the calibrated threshold finds."),
    ] = 5
    prefix: Prefix = DEFAULTS.prefix
    recency: RecentTokens = DEFAULTS.recency

    def config(self) -> AntKVConfig:
        """As the server has them; SettingsError when one cannot be used."""
        try:
            return AntKVConfig(**self._settings())
        except ValidationError as error:
            setting, problem = first_problem(error, whole="antkv")
            raise SettingsError(f"The setting {setting} is not usable ({problem}).") from None

    def _settings(self) -> dict[str, Any]:
        folder = None if self.codebooks is None else str(self.codebooks)
        return {"codebooks": folder, "sinks": self.sinks > 0, "prefix": self.prefix, "recency": self.recency}


@dataclass(frozen=True)
class CacheOptions(KeptOptions):
    """Everything that decides what a cache with an antkv dtype keeps."""

    anchors: Anchors = DEFAULTS.anchor_share
    anchor_dtype: AnchorsAs = DEFAULTS.anchor_dtype

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "anchor_share": self.anchors, "anchor_dtype": self.anchor_dtype}


@dataclass(frozen=True)
class WindowOptions:
    """A text, and how it is cut into windows."""

    text: Text
    context: Context = 2048
    max_windows: Annotated[int | None, typer.Option(min=1, help="Stop after so many windows.")] = None


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer reads it: in the place of every parameter that is a dataclass stand its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {
        name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)
    }
    shown: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            shown += _fields_shown(groups[name])
        else:
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()
        }
        command(**given, **made)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


def _fields_shown(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def names_in(text: str | None) -> list[str]:
    """Names that were given separated by commas; none when the option was not given."""
    return [] if text is None else [name.strip() for name in text.split(",")]
