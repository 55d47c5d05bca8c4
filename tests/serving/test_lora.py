"""LoRA adapters beside an antkv cache whose codebook is the base model's, in real vLLM.

vLLM 0.32's code for CPUs gives requests without an adapter what its last slot holds. So there is one slot more than
adapters.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from tests.adapters import EVERY_PROJECTION, K_AND_V, make_adapter, merged
from tests.serving.conftest import EMBEDDED, PRESET, TEXT, Completion, assert_all_same
from tests.serving.served_family import method_of
from vllm_antkv import cli
from vllm_antkv.evaluate.perplexity import evaluate_perplexity
from vllm_antkv.evaluate.windows import TextWindows, load_windows
from vllm_antkv.offline.models import ModelCard

OPTIONS = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        make_adapter(EMBEDDED, folder / name, projections)
        for name, projections in {"every": EVERY_PROJECTION, "k-and-v": K_AND_V}.items()
    ]


@pytest.fixture(scope="module")
def loras(adapters) -> list[LoRARequest | None]:
    """None, and both adapters."""
    return [None, *(LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(adapters, 1))]


@pytest.fixture(scope="module")
def requests(prompts, loras) -> dict[str, Any]:
    """Each of some prompts with each of them."""
    some = prompts[3::3]
    return {"prompts": [prompt for prompt in some for _ in loras], "loras": loras * len(some)}


@pytest.fixture(scope="module")
def auto(start_engine, requests) -> list[Completion]:
    with start_engine(EMBEDDED, "auto", **OPTIONS) as engine:
        return engine.complete(**requests)


@pytest.mark.parametrize("settings", [{"anchor_share": 1.0, "anchor_dtype": "model"}, {"recency": "sliding:1024"}])
def test_equals_auto_where_every_token_is_exact(start_engine, auto, codebooks, requests, settings):
    """With the codebook of the base model: none is learned for another identity."""
    settings = {"codebooks": codebooks, "calibrate": "never", **settings}
    with start_engine(EMBEDDED, PRESET, settings, max_num_batched_tokens=300, **OPTIONS) as engine:
        assert_all_same(engine.complete(**requests), auto)


def test_neither_neighbours_nor_prefix_hits_change_an_answer(start_engine, auto, codebooks, requests):
    """Several adapters and none in one batch; and pages are found by their own adapter alone."""
    with start_engine(EMBEDDED, PRESET, {"codebooks": codebooks}, **OPTIONS) as engine:
        alone = engine.complete(**requests, together=False)
        assert all(completion.num_cached_tokens == 0 for completion in alone), "an adapter found another's pages"
        batched = engine.complete(**requests)
        assert any(completion.num_cached_tokens for completion in batched)
        assert_all_same(batched, alone)
        engine.assert_all_blocks_free()
    with pytest.raises(AssertionError):
        assert_all_same(alone, auto)


@pytest.mark.long
def test_served_is_what_is_evaluated_of_the_merged_model(adapters, codebooks, tmp_path, eager):
    """By `antkv eval served --lora`, beside `auto` with the same adapter."""
    out, context = tmp_path / "served.json", 500
    text = ["--text", str(TEXT), "--context", str(context), "--max-windows", "2"]
    command = ["eval", "served", str(EMBEDDED), "--kv-cache-dtype", PRESET, "--against", "auto", *text]
    assert cli.run([*command, "--codebooks", codebooks, "--lora", f"mine={adapters[0]}", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    card = ModelCard.read(str(EMBEDDED))
    windows = TextWindows(TEXT, load_windows(TEXT, card.tokenizer, context, 2))
    coded, exact = (method_of(card, name, Path(codebooks)) for name in (PRESET, "fp16"))
    model = merged(EMBEDDED, adapters[0])
    assert found["lora"] == "mine"
    assert found["perplexity"] == pytest.approx(evaluate_perplexity(card, model, coded, windows).perplexity, rel=0.005)
    of_auto = evaluate_perplexity(card, model, exact, windows).perplexity
    assert found["against"]["perplexity"] == pytest.approx(of_auto, rel=0.005)
    assert found["against"]["kl"] > 0
    assert abs(evaluate_perplexity(card, card.load(), exact, windows).perplexity / of_auto - 1) > 0.02
