"""Tables of the command line fit 80 columns, and nothing in them is cut off or broken."""

import pytest

from vllm_antkv.cli.tables import print_table, table, wrapped


def shown(made, capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_table(made)
    return capsys.readouterr().out.splitlines()


def test_what_is_wider_than_the_terminal_is_not_cut(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    made = table("a", "b")
    made.add_row("name" * 30, "12345")
    *_, line = shown(made, capsys)
    assert line.split() == ["name" * 30, "12345"]


def test_words_are_never_cut() -> None:
    path = "/a" * 60
    assert wrapped(f"see {path} there", 4).split("\n") == ["see", f"    {path}", "    there"]
