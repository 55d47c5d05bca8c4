"""What holds for every family that is served: compared with the offline evaluator, with itself and with `auto`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.conftest import PRESET, TEXT, Completion, assert_all_same
from tests.serving.tiny import make_codebook
from vllm_antkv import cli
from vllm_antkv.codebook import SinkRule
from vllm_antkv.config import AntKVConfig
from vllm_antkv.doctor.verify import EXACT, LENGTHS, MAX_MODEL_LEN, STEP_TOKENS, TOLERANCE
from vllm_antkv.errors import SettingsError
from vllm_antkv.evaluate.methods import build_method
from vllm_antkv.evaluate.methods.request import MethodRequest
from vllm_antkv.offline.attention import quantised_past
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.offline.pretrained import load_weights

PROMPTS = [[0, *range(3 + i, 2 + i + length)] for i, length in enumerate(LENGTHS)]
OPTIONS: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": STEP_TOKENS}
#: Eight of each fit together when they are short, and preempt each other as they grow.
SHORT = [prompt[:60] for prompt in PROMPTS[1:3]]
#: Finds many sinks in random models.
SINKS = SinkRule(layer=0, channels=(3,), threshold=0.05)


def assert_served(start_engine: Callable[..., Any], model: Path, dtype: str = "float32", **options: Any) -> None:
    """Calibrate and evaluate a model, and serve text with it by several engines.

    Args:
        dtype: of every engine; in 16 bits the same answers are alike.
        options: of every engine.
    """
    random = learn(model)
    expected = expected_logprobs(model, PRESET, random)
    options = {**OPTIONS, "dtype": dtype, **options}
    with start_engine(model, PRESET, {"codebooks": str(random)}, **options) as engine:
        assert_as_expected(engine.complete(PROMPTS, max_tokens=3), expected, TOLERANCE[dtype])
        engine.assert_all_blocks_free()
    with start_engine(model, "auto", **options) as engine:
        auto = engine.complete(PROMPTS, max_tokens=8)
    with start_engine(model, PRESET, EXACT, **options) as engine:
        assert_alike(engine.complete(PROMPTS, max_tokens=8), auto, dtype)


def assert_scheduling_changes_nothing(
    start_engine: Callable[..., Any], model: Path, num_blocks: int, dtype: str = "float32", **options: Any
) -> None:
    """In a batch, alone, behind prefixes that were found, and after preemption.

    num_blocks: of the pool: enough for one long request, too few for many.
    """
    make_codebook(model.parent / "random", model, PRESET, SINKS)
    settings = {"codebooks": str(model.parent / "random")}
    pool = {"num_gpu_blocks_override": num_blocks, "disable_log_stats": False}
    with start_engine(model, PRESET, settings, **OPTIONS, dtype=dtype, **pool, **options) as engine:
        batched = engine.complete(PROMPTS, max_tokens=8)
        alone = engine.complete(PROMPTS, max_tokens=8, together=False)
        caches = options.get("enable_prefix_caching", True) and fills_a_block(engine, PROMPTS)
        assert any(completion.num_cached_tokens for completion in alone) == caches
        assert_alike(batched, alone, dtype)
        growing = engine.complete(SHORT, max_tokens=16, together=False)
        assert engine.count("num_preemptions") == 0
        assert_alike(engine.complete(8 * SHORT, max_tokens=16), 8 * growing, dtype)
        assert engine.count("num_preemptions") > 0
        engine.assert_all_blocks_free()


def fills_a_block(engine: Any, prompts: list[list[int]]) -> bool:
    """Some prompt leaves a block to be found.

    Where states are large, as in float32 on processors with AVX512-BF16, blocks may be longer.
    """
    return max(map(len, prompts)) > engine.core.scheduler.block_size


def assert_alike(left: list[Completion], right: list[Completion], dtype: str) -> None:
    """The same; in 16 bits, log-probabilities that differ by no more than two kinds of attention do."""
    if dtype == "float32":
        assert_all_same(left, right)
    for mine, theirs in zip(left, right, strict=True):
        assert mine.difference(theirs) <= TOLERANCE[dtype]


def learn(model: Path) -> Path:
    """Calibrate and evaluate with the commands of the documentation; a folder of random codebooks.

    Codes of random centroids are far off: whoever reads other rows is seen. What was learned lies with the model.
    """
    learned, random = model / "antkv", model.parent / "random"
    make_codebook(random, model, PRESET, SINKS)
    calibrate(model, PRESET, learned)
    assert 0 < divergence(model, PRESET, learned) < divergence(model, PRESET, random)
    return random


def expected_logprobs(
    model: Path, preset: str, codebooks: Path | None = None, prompts: list[list[int]] = PROMPTS, **settings: Any
) -> list[torch.Tensor]:
    """Log-probabilities after each prompt, from the offline evaluator on the Hugging Face model in float32."""
    card = ModelCard.read(str(model))
    return evaluated(card, method_of(card, preset, codebooks, **settings), prompts)


def method_of(card: ModelCard, preset: str, codebooks: Path | None = None, **settings: Any) -> Method:
    """How a model is evaluated with the codebooks of a folder, or with its own."""
    return build_method(preset, MethodRequest(card.name, card.identity, codebooks, AntKVConfig(**settings)))


@torch.inference_mode()
def evaluated(card: ModelCard, method: Method, prompts: list[list[int]] = PROMPTS) -> list[torch.Tensor]:
    """The same through a method."""
    hf_model = load_weights(card.name, SettingsError, dtype=torch.float32).eval()
    with quantised_past(hf_model, method, max(map(len, prompts))):
        return [hf_model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1) for ids in prompts]


def assert_as_expected(completions: list[Completion], expected: list[torch.Tensor], tolerance: float = 1e-3) -> None:
    """After the prompts."""
    for completion, logprobs in zip(completions, expected, strict=True):
        for token, logprob in completion.top_logprobs[0].items():
            assert logprob == pytest.approx(float(logprobs[token]), abs=tolerance)


def calibrate(model: Path, preset: str, out: Path) -> None:
    """`antkv calibrate`, on as few windows as there can be."""
    command = ["calibrate", str(model), "--preset", preset, "--text", str(TEXT), "--out", str(out)]
    assert cli.run([*command, "--samples", "2", "--seq-len", "160"]) == 0


def divergence(model: Path, preset: str, codebooks: Path) -> float:
    """`antkv eval compare`: how far predictions through a codebook are from the model's own, in nats per token."""
    report = codebooks / "report.json"
    command = ["eval", "compare", str(model), "--methods", preset, "--text", str(TEXT), "--json", str(report)]
    assert cli.run([*command, "--codebooks", str(codebooks), "--context", "256", "--max-windows", "1"]) == 0
    return float(json.loads(report.read_text())["fidelity"][preset]["kl"])
