"""Tables of the command line fit 80 columns, and nothing in them is cut off or broken."""

import pytest

from vllm_antkv.cli import compare
from vllm_antkv.cli.tables import print_table, table, wrapped
from vllm_antkv.evaluate.report import PerplexityReport
from vllm_antkv.offline.fidelity import OwnFidelity


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


def test_a_comparison(capsys) -> None:
    report = PerplexityReport.model_construct(
        method="antkv-0.375bit",
        perplexity=12345.6789,
        nominal_bits=0.375,
        effective_bits=1.234,
        fidelity=OwnFidelity(kl=1.23456, top1_agreement=0.98765, by_position=()),
    )
    lines = shown(compare._table([report], {"antkv-0.375bit": 0.876}), capsys)
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == ["antkv-0.375bit", "12345.6789", "0.375", "1.234", "87.6%", "1.23456", "98.77%"]
