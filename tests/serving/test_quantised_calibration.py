"""Codebooks of models with quantised weights, whose K and V only vLLM can compute."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.serving.conftest import EMBEDDED, made_quickly
from tests.serving.quantised import quantise
from tests.serving.served_family import TEXT
from tests.serving.server import PRESET, make_odd_model
from tests.unit.calibrate.test_memory import captured
from vllm_antkv.calibrate import calibrate_on_start
from vllm_antkv.calibrate.job import HIDDEN, Job, prepare
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.calibrate.source import Source, TransformersModel
from vllm_antkv.codebook import Codebook, ModelIdentity, codebook_path
from vllm_antkv.errors import CalibrationError
from vllm_antkv.offline.pretrained import read_config
from vllm_antkv.offline.sinks import SinkChannels
from vllm_antkv.vllm_adapter.plan.engine_plan import engine_plan

pytestmark = pytest.mark.long

#: Of the model that learns its own codebook, and so of a calibration window: short, since it is a test.
CONTEXT = 32
WINDOWS, SEQ_LEN = 3, 300


@pytest.fixture(scope="module")
def w8a8(tmp_path_factory) -> Path:
    """A model in 8 bits that has no codebook anywhere, and no word on where it comes from."""
    folder = tmp_path_factory.mktemp("quantised")
    return quantise(make_odd_model(folder / "original", CONTEXT), folder / "w8a8", "W8A8")


def test_one_flag_serves_a_quantised_model_without_its_original(start_engine, w8a8, users_cache, said):
    with start_engine(w8a8, PRESET, max_model_len=CONTEXT, dtype="bfloat16") as engine:
        (completion,) = engine.complete([[0, *range(3, 20)]], max_tokens=8)
        served = engine_plan(engine.core.vllm_config).codebook
    assert len(completion.tokens) == 8
    (path,) = users_cache.rglob("*.safetensors")
    codebook = Codebook.load(path, PRESET, ModelIdentity.from_hf_config(read_config(str(w8a8), CalibrationError)))
    assert served.identity == codebook.identity
    record = codebook.header.calibration
    assert (record["weights"], record["texts"], record["seq_len"]) == ("votes", ["built-in"], CONTEXT - 1)
    for words in ("its original is not named in its config or card", "K and V are taken from vLLM's own forward pass"):
        assert any(words in line for line in said)


@pytest.mark.usefixtures("quick_engines")
def test_weights_that_vllm_cannot_run_end_with_a_sentence(tmp_path, monkeypatch, capsys) -> None:
    broken = quantise(EMBEDDED, tmp_path / "broken", "W8A8")
    (broken / "model.safetensors").write_bytes(b"not a tensor")
    monkeypatch.setattr(sys, "argv", ["once", str(broken), PRESET, str(tmp_path / "out")])
    assert calibrate_on_start.main() == 1
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert last_line.startswith(
        f"K and V of {broken} are taken from vLLM's own forward pass, as no gradient flows through quantised weights, "
        "but vLLM does not start ("
    )
    assert last_line.endswith("calibrate the unquantised model, whose codebooks fit both.")
    assert not codebook_path(tmp_path / "out", PRESET).exists()


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    """Of the embedded model itself, which both can run; vLLM is told to."""
    out = tmp_path_factory.mktemp("job")
    settings = CalibrationSettings(str(EMBEDDED), [PRESET], [str(TEXT)], out, WINDOWS, SEQ_LEN)
    return replace(prepare(settings), why_vllm=HIDDEN)


@pytest.fixture(scope="module")
def engine(job, engine_environment) -> Iterator[Source]:
    from vllm_antkv.calibrate.engine import open_engine

    with made_quickly(eager=True), open_engine(job) as source:
        yield source


def test_vllm_hands_over_what_transformers_does(engine, job, tmp_path):
    """Rows of K before RoPE, of V, and the channels of sinks; the served dtype, bfloat16, has 3 digits."""
    other, sinks = TransformersModel(job, tmp_path), SinkChannels(2, (7, 3))
    found, expected = (captured(each, job, tmp_path / type(each).__name__, sinks) for each in (engine, other))

    def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        return float((ours.float() - theirs.float()).norm() / theirs.float().norm())

    for layer in range(job.identity.num_layers):
        for ours, theirs in zip(found.rows(layer), expected.rows(layer), strict=True):
            assert error(torch.tensor(ours), torch.tensor(theirs)) < 0.03
    assert error(torch.tensor(found.sink_values()), torch.tensor(expected.sink_values())) < 0.03
    for window in job.windows:
        ours, theirs = (torch.tensor(source.peak_ratios(window)) for source in (engine, other))
        assert ours.shape == theirs.shape
        assert error(ours, theirs) < 0.1


def test_rows_that_get_attention_weigh_more(engine, job, tmp_path):
    """Votes are no gradients, but of one mind with them: BOS apart, ranks of tokens agree in every layer."""
    found = captured(engine, job, tmp_path / "vllm")
    expected = captured(TransformersModel(job, tmp_path), job, tmp_path / "transformers")
    for layer in range(job.identity.num_layers):
        ours, theirs = (
            torch.tensor(files.norms(layer)[:, :, 1:-64]).flatten(1, 2).transpose(1, 2) for files in (found, expected)
        )
        ranks = torch.stack([rows.argsort(-1).argsort(-1).float() for rows in (ours, theirs)])
        for kind in range(2):
            for head in range(job.identity.num_kv_heads):
                assert float(torch.corrcoef(ranks[:, kind, head])[0, 1]) > 0.2


def test_the_record_says_how_tokens_counted(w8a8, tmp_path):
    records = [
        prepare(CalibrationSettings(str(w8a8), [PRESET], [str(TEXT)], tmp_path, weights=weights)).record
        for weights in ("grad", "none")
    ]
    assert [record["weights"] for record in records] == ["votes", "none"]
    assert json.dumps(records[0])
