"""Options that stand together in a dataclass are options of the command, and reach it as that object."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from vllm_antkv import cli
from vllm_antkv.cli.options import CacheOptions, KeptOptions, WindowOptions, grouped
from vllm_antkv.config import AntKVConfig


@dataclass(frozen=True)
class Group:
    needed: Annotated[str, typer.Option()]
    chosen: Annotated[int, typer.Option(min=1)] = 3


def given(*arguments: str) -> tuple[int, list[Any]]:
    calls: list[Any] = []
    app = typer.Typer()

    @app.command()
    @grouped
    def command(name: str, group: Group, last: bool = False) -> None:
        calls.append((name, group, last))

    return CliRunner().invoke(app, list(arguments)).exit_code, calls


def test_a_group_reaches_the_command_as_an_object() -> None:
    assert given("x", "--needed", "n") == (0, [("x", Group("n", 3), False)])
    assert given("x", "--needed", "n", "--chosen", "5", "--last") == (0, [("x", Group("n", 5), True)])


@pytest.mark.parametrize("wrong", [["x"], ["x", "--needed", "n", "--chosen", "0"], ["x", "--group", "n"]])
def test_what_a_field_demands_is_demanded(wrong: list[str]) -> None:
    assert given(*wrong) == (2, [])


@pytest.mark.parametrize("options", [KeptOptions, CacheOptions])
def test_without_options_the_cache_is_the_servers(options: type[KeptOptions]) -> None:
    assert options().config() == AntKVConfig()


@pytest.mark.parametrize(
    ("command", "group"), [("perplexity", CacheOptions), ("compare", CacheOptions), ("served", WindowOptions)]
)
def test_every_field_is_an_option(command: str, group: type) -> None:
    root: Any = typer.main.get_command(cli.app)
    names = {parameter.name for parameter in root.commands["eval"].commands[command].params}
    assert {field.name for field in fields(group)} <= names
