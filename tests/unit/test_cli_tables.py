"""Tables of the command line fit 80 columns, and nothing in them is cut off or broken."""

import pytest

from vllm_antkv.cli import compare, retrieval
from vllm_antkv.cli.tables import print_table, table, wrapped
from vllm_antkv.evaluate.report import PerplexityReport
from vllm_antkv.evaluate.retrieval import RetrievalCell, RetrievalReport
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
        method="kvquant-1bit+kvsink-5",
        perplexity=12345.6789,
        nominal_bits=0.375,
        effective_bits=1.234,
        fidelity=OwnFidelity(kl=1.23456, top1_agreement=0.98765, by_position=()),
    )
    lines = shown(compare._table([report], {"kvquant-1bit+kvsink-5": 0.876}), capsys)
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == ["kvquant-1bit+kvsink-5", "12345.6789", "0.375", "1.234", "87.6%", "1.23456", "98.77%"]


def test_retrieval_at_the_default_lengths_through_vllm(capsys) -> None:
    cells = [
        RetrievalCell(kind=kind, length=length, depth=depth, prompts=20, exact_match=1)
        for kind in ("pairs", "passkey")
        for length in (512, 1024, 2048)
        for depth in (0, 0.5, 1)
    ]
    report = RetrievalReport.model_construct(
        method="antkv-0.375bit", served=True, exact_match=1, effective_bits=0.83, cells=cells
    )
    lines = shown(retrieval._table([report]), capsys)
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["method", *3 * ["pairs"], *3 * ["passkey"]]
    assert [line.split()[0] for line in lines[3:6]] == ["antkv-0.375bit", "served", "0.83"]
