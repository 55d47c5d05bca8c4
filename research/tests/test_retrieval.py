"""What counts as right, how cells are summed up, and the command with its table and JSON."""

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from research.retrieval import __main__ as retrieval
from research.retrieval.answers import answers_right, report_retrieval
from research.retrieval.prompts import RetrievalPrompt
from tests.codebooks import random_codebook
from tests.unit.evaluate.conftest import VOCAB
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.config import AntKVConfig
from vllm_antkv.offline.attention import quantised_past
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.offline.vector_quantiser import VectorQuantiser

EMBEDDED = Path(__file__).parents[2] / "models" / "embedded"
ANSWER = 3


def methods(model: PreTrainedModel) -> list[Method]:
    codebook = random_codebook(ModelIdentity.from_hf_config(model.config))
    keep_little = AntKVConfig(recency="none", prefix=0, sinks=False)
    return [Method("fp16", 16.0, keep_little), Method("antkv-1bit", 1.0, keep_little, VectorQuantiser(codebook))]


def greedy(model: PreTrainedModel, method: Method, prompt: list[int]) -> list[int]:
    """Token after token, each from a forward pass of its own."""
    ids = list(prompt)
    for _ in range(ANSWER):
        with torch.inference_mode(), quantised_past(model, method, len(ids)):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_right_is_what_greedy_decoding_writes(model: PreTrainedModel) -> None:
    torch.manual_seed(0)
    texts = [torch.randint(VOCAB, (length,)).tolist() for length in (150, 20, 150)]
    written = {}
    for method in methods(model):
        answers = written[method.name] = [greedy(model, method, text) for text in texts]
        wrong = [[*answer[:-1], (answer[-1] + 1) % VOCAB] for answer in answers]
        given = [
            RetrievalPrompt("pairs", len(text) + ANSWER, 0.5, tuple(text), tuple(answer), "")
            for text, answer in zip(texts * 2, answers + wrong, strict=True)
        ]
        assert answers_right(model, method, given) == [True] * 3 + [False] * 3
    assert written["fp16"] != written["antkv-1bit"], "the quantiser must have something to do"


def test_cells_are_means_in_the_order_of_the_prompts() -> None:
    card = ModelCard.read(str(EMBEDDED))
    prompts = [
        RetrievalPrompt(kind, length, depth, (), (), "")
        for kind in ("pairs", "passkey")
        for length in (256, 512)
        for depth in (0.0, 1.0)
        for _ in range(2)
    ]
    right = [index < 9 for index in range(len(prompts))]
    report = report_retrieval(card, Method("fp16", 16.0, AntKVConfig()), prompts, right)
    assert [cell.exact_match for cell in report.cells] == [1, 1, 1, 1, 0.5, 0, 0, 0]
    assert report.exact_match == 9 / 16
    assert [cell.kind for cell in report.cells] == ["pairs"] * 4 + ["passkey"] * 4


def run(*args: object) -> int:
    return retrieval.run([str(EMBEDDED), *(str(arg) for arg in args)])


def test_the_command_writes_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out.json"
    sizes = ("--lengths", "64,100", "--depths", "0,1", "--prompts", 1, "--json", out)
    assert run("--methods", "fp16,antkv-1bit", "--kinds", "pairs", *sizes) == 0
    results = json.loads(out.read_text())["results"]
    assert [result["method"] for result in results] == ["fp16", "antkv-1bit"]
    assert [(cell["length"], cell["depth"]) for cell in results[0]["cells"]] == [(64, 0), (64, 1), (100, 0), (100, 1)]
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.split()[-2:] == ["pairs", "pairs"]
    assert second.split()[-2:] == ["64", "100"]
