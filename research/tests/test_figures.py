"""The figures: what they count is what they say, and their drawings can be made from their JSON alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from research.figures import FIGURES, by_position
from research.figures import __main__ as figures
from research.figures.activations import LayerRows, hidden_states, visit_layers
from research.figures.coverage import kept_by_table, mass_on
from research.figures.equation_5 import equation_5
from research.figures.error_distribution import SHARES, worst_tokens
from research.figures.row_error import row_errors
from research.figures.scene import numbers_of
from research.figures.token_error import covered, spearman
from tests.codebooks import random_codebook
from tests.unit.evaluate.conftest import tiny_model
from vllm_antkv.codebook import ModelIdentity, codebook_path
from vllm_antkv.ops.logits import LogitRules

TOKENS = 40


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
RULES = {
    "plain": LogitRules(8**-0.5),
    "window, soft cap, learned sinks": LogitRules(8**-0.5, window=11, soft_cap=2.0, sinks=SINKS),
}


@pytest.fixture(params=RULES.values(), ids=RULES.keys())
def rows(request: pytest.FixtureRequest) -> LayerRows:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(TOKENS, heads, 8, generator=generator) for heads in (4, 2, 2))
    return LayerRows(0, query, key, value, request.param)


def weights_of(query: torch.Tensor, key: torch.Tensor, rules: LogitRules, head: int) -> torch.Tensor:
    """One head, one query after the other: what a query gives the rows before it, and itself."""
    weights = torch.zeros(len(query), len(key))
    for i, q in enumerate(query):
        first = 0 if rules.window is None else max(i + 1 - rules.window, 0)
        logits = key[first : i + 1] @ q * rules.scale
        if rules.soft_cap is not None:
            logits = rules.soft_cap * torch.tanh(logits / rules.soft_cap)
        if rules.sinks is not None:
            logits = torch.cat((logits, rules.sinks[head : head + 1]))
        weights[i, first : i + 1] = logits.softmax(0)[: i + 1 - first]
    return weights


@pytest.mark.parametrize("first", [1, 10], ids=["", "first key takes all or nothing"])
def test_error_of_a_row_is_what_coding_it_alone_changes(rows: LayerRows, first: float) -> None:
    generator = torch.Generator().manual_seed(1)
    coded = [part + 0.5 * torch.randn(part.shape, generator=generator) for part in (rows.key, rows.value)]
    rows.key[0] *= first
    if first > 1:
        coded[0][0] = -rows.key[0]
    seen = rows.visible & (torch.rand(TOKENS, TOKENS, generator=generator) < 0.7)
    errors = row_errors(rows, *coded, seen)
    for row, head in ((0, 0), (7, 1), (39, 1)):
        for kind, of_kind in enumerate((errors.key, errors.value)):
            changed = [rows.key.clone(), rows.value.clone()]
            changed[kind][row, head] = coded[kind][row, head]
            expected = 0.0
            for query_head in (2 * head, 2 * head + 1):
                query = rows.query[:, query_head]
                before, after = (
                    weights_of(query, key[:, head], rows.rules, query_head) @ value[:, head]
                    for key, value in ((rows.key, rows.value), changed)
                )
                expected += float((after - before).norm(dim=-1)[seen[:, row]].sum())
            assert float(of_kind[head, row]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


GEMMA = {"sliding_window": 11, "query_pre_attn_scalar": 16, "num_hidden_layers": 2, "attn_implementation": "eager"}
ATTENDING: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "windows, soft caps": ("gemma2", GEMMA | {"attn_logit_softcapping": 2.0}),
    "windows, learned sinks": ("gpt_oss", {"sliding_window": 11, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize(("family", "changes"), ATTENDING.values(), ids=ATTENDING.keys())
def test_rows_are_those_the_model_attends_with(family: str, changes: dict[str, Any]) -> None:
    """Attention computed from them, put through the output projection, is what the attention module puts out."""
    model, window = tiny_model(family, **changes).requires_grad_(False), torch.arange(3, 33)
    implementation = model.config._attn_implementation
    expected: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda _, __, output: expected.append(output[0][0]))
        for layer in model.model.layers
    ]
    layers: list[LayerRows] = []
    # Its own attention first.
    with torch.inference_mode():
        model(window[None])
    for hook in hooks:
        hook.remove()
    visit_layers(model, window, layers.append)
    assert [rows.layer for rows in layers] == list(range(len(model.model.layers)))
    for rows, output in zip(layers, expected, strict=True):
        again = model.model.layers[rows.layer].self_attn.o_proj(rows.outputs().flatten(1))
        torch.testing.assert_close(again, output, rtol=1e-4, atol=5e-5)
    assert model.config._attn_implementation == implementation


def test_hidden_states_are_the_model_s(model) -> None:
    window = torch.arange(3, 33)
    with torch.inference_mode():
        expected = model(window[None], output_hidden_states=True).hidden_states
    states = hidden_states(model, window)
    torch.testing.assert_close(states[:-1], torch.stack(expected[1:-1])[:, 0])


def test_anchor_score_by_its_equation(rows: LayerRows) -> None:
    scores = equation_5(rows)
    for head in range(2):
        of_key = of_value = torch.zeros(TOKENS)
        for query_head in (2 * head, 2 * head + 1):
            query = rows.query[:, query_head]
            weights = weights_of(query, rows.key[:, head], rows.rules, query_head)
            of_key = of_key + (weights * (1 - weights) * query.norm(dim=-1, keepdim=True)).sum(0)
            of_value = of_value + weights.sum(0)
        torch.testing.assert_close(scores.key[head], of_key)
        torch.testing.assert_close(scores.value[head], of_value)


def test_an_oracle_of_its_own_error_covers_all_of_it() -> None:
    error = torch.rand(2, 100, generator=torch.Generator().manual_seed(0))
    assert covered(error, error, 0.1) == pytest.approx(1)
    assert spearman(error.square(), error) == pytest.approx(1)
    assert spearman(-error, error) == pytest.approx(-1)
    assert covered(-error, error, 0.1) < 0.2


def test_even_errors_are_evenly_shared() -> None:
    torch.testing.assert_close(worst_tokens(torch.ones(2, 200)), torch.tensor(SHARES))


@pytest.mark.parametrize("rows", [RULES["plain"]], indirect=True)
def test_coverage_is_the_attention_on_what_is_kept(rows: LayerRows) -> None:
    everything = kept_by_table(torch.full((TOKENS,), TOKENS))
    assert mass_on(everything, rows, slice(0, None)) == pytest.approx(1)
    itself = kept_by_table(torch.arange(TOKENS))
    expected = torch.stack(
        [
            weights_of(rows.query[:, head], rows.key[:, head // 2], rows.rules, head).diagonal()[10:].mean()
            for head in range(4)
        ]
    ).mean()
    assert mass_on(itself, rows, slice(10, None)) == pytest.approx(float(expected))


def test_numbers_keep_their_shape() -> None:
    assert numbers_of(torch.tensor([[1.0, 2.5], [1 / 3, 4.0]])) == [[1.0, 2.5], [0.333333, 4.0]]


@pytest.fixture(scope="module")
def drawn(model_folder: Path, codebook_folder: Path, text_file: Path, tmp_path_factory) -> Path:
    """Everything that is drawn, of a tiny model."""
    out = tmp_path_factory.mktemp("figures") / "new"
    assert figures.run(command(model_folder, codebook_folder, text_file, out)) == 0
    return out


def command(model: Path, codebooks: Path, text: Path, out: Path, *more: str) -> list[str]:
    paths = ["--text", str(text), "--codebooks", str(codebooks), "--out", str(out)]
    return [str(model), *paths, "--context", "264", "--max-windows", "1", *more]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_from_its_numbers(drawn: Path, name: str) -> None:
    content = json.loads((drawn / f"{name}.json").read_text())
    assert content["figure"] == name
    assert content["settings"]["context"] == 264
    assert (drawn / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (drawn / f"{name}.svg").read_text()
    drawing = FIGURES[name].draw(content["numbers"])
    for panel in drawing.axes:
        assert panel.get_ylabel(), "every axis says what it shows"
    assert any(panel.get_xlabel() and panel.get_title() for panel in drawing.axes)


def test_a_model_with_windows_is_drawn_too(model_folder: Path, text_file: Path, tmp_path: Path) -> None:
    """Policies that drop rows are shown in its layer that sees everything."""
    kinds = ["sliding_attention", "full_attention"]
    model = tiny_model(
        "gemma3_text", sliding_window=100, query_pre_attn_scalar=16, num_hidden_layers=2, layer_types=kinds
    )
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    model.save_pretrained(folder)
    random_codebook(ModelIdentity.from_hf_config(model.config)).save(codebook_path(folder / "antkv", "antkv-1bit"))
    names = ["coverage", "eviction-error"]
    paths = ["--text", str(text_file), "--out", str(tmp_path)]
    more = ["--context", "264", "--max-windows", "1", "--figures", ",".join(names)]
    assert figures.run([str(folder), *paths, *more]) == 0
    assert all((tmp_path / f"{name}.svg").exists() for name in names)


def test_what_was_measured_is_not_measured_again(
    model_folder: Path, codebook_folder: Path, text_file: Path, tmp_path: Path, capsys
) -> None:
    more = ["--figures", "score-map,coverage"]
    assert figures.run(command(model_folder, codebook_folder, text_file, tmp_path, *more)) == 0
    (tmp_path / "coverage.json").write_text("{}")
    capsys.readouterr()
    assert figures.run(command(model_folder, codebook_folder, text_file, tmp_path, *more)) == 0
    known, new = capsys.readouterr().out.splitlines()
    assert known.endswith("score-map.svg (measured before)")
    assert new.endswith("coverage.svg")
    assert (
        figures.run(command(model_folder, codebook_folder, text_file, tmp_path, *more, "--recency", "sliding:64")) == 0
    )
    assert "before" not in capsys.readouterr().out, "other settings, other numbers"


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (["--figures", "score-map,mona-lisa"], 2, "mona-lisa"),
        (["--max-windows", "9"], 2, "--calibration"),
        (["--out", "/dev/null/figures"], 2, "/dev/null/figures"),
    ],
)
def test_mistakes_are_one_line(
    model_folder: Path, codebook_folder: Path, text_file: Path, tmp_path: Path, capsys, change, code: int, says: str
) -> None:
    args = command(model_folder, codebook_folder, text_file, tmp_path / "out", *change)
    assert figures.run(args) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_loss_by_position_is_drawn_from_comparisons(tmp_path: Path, monkeypatch) -> None:
    def fidelity(*divergences: float) -> dict[str, Any]:
        bands = [{"first": 128 * band, "kl": kl, "loss": 0.0} for band, kl in enumerate(divergences)]
        return {"kl": 0.5, "by_position": bands}

    compared = {"results": [], "fidelity": {"fp16": fidelity(0, 0), "antkv-1bit": fidelity(0.0171, 0.033)}}
    file = tmp_path / "compared.json"
    file.write_text(json.dumps(compared))
    monkeypatch.setattr(by_position, "NUMBERS", tmp_path / "by-position.json")
    by_position.main([f"Small={file}"])
    by_position.main([])
    assert "<svg" in (tmp_path / "by-position.svg").read_text()
    (panel,) = by_position.draw(json.loads(by_position.NUMBERS.read_text())).axes
    (line,) = panel.get_lines()
    assert (panel.get_title(), line.get_label(), list(line.get_ydata())) == ("Small", "antkv-1bit", [0.0171, 0.033])
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["0", "128"]
