"""What commands print: tables of which nothing is cut off, and progress, here in a log file and not in a terminal."""

import re

import pytest

from vllm_antkv.cli.tables import print_table, table, wrapped
from vllm_antkv.progress import progress_bar


def test_what_is_wider_than_the_terminal_is_not_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    made = table("a", "b")
    made.add_row("name" * 30, "12345")
    print_table(made)
    assert capsys.readouterr().out.splitlines()[-1].split() == ["name" * 30, "12345"]


def test_words_are_never_cut():
    path = "/a" * 60
    assert wrapped(f"see {path} there", 4).split("\n") == ["see", f"    {path}", "    there"]


@pytest.mark.parametrize("seconds_between_lines", [0, 3600])
def test_last_line_comes_once(capsys, seconds_between_lines):
    bar = progress_bar("windows", total=3)
    bar.start_t -= 60  # past the first second, which says nothing
    bar.mininterval = seconds_between_lines
    bar.update(3)
    bar.close()
    assert re.fullmatch("windows: 3 of 3, .* to go\n", capsys.readouterr().err)


def test_short_work_says_nothing(capsys):
    with progress_bar("windows", total=1) as bar:
        bar.start_t += 3600  # the first second never passes
        bar.update(1)
    assert capsys.readouterr().err == ""
