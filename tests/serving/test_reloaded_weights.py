"""What sleep mode does, which vLLM has on GPUs alone: pages lose what they held, and weights are loaded again."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.serving.conftest import EMBEDDED, Completion, assert_all_same

EXACT = {"anchor_share": 1.0, "anchor_dtype": "model"}


def test_new_weights_are_served_as_auto_serves_them(start_engine, codebooks, prompts, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data *= 1 + 0.1 * torch.rand_like(parameter)
    model.save_pretrained(tmp_path)
    some = prompts[3::3]

    def before_and_after(kv_cache_dtype: str, settings: dict[str, Any] | None) -> list[list[Completion]]:
        with start_engine(EMBEDDED, kv_cache_dtype, settings) as engine:
            before = engine.complete(some)
            if settings:
                engine.fill_with_nan()
            engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path)})
            engine.llm.reset_prefix_cache()
            return [before, engine.complete(some)]

    auto = before_and_after("auto", None)
    for mine, theirs in zip(before_and_after("antkv-1bit", {"codebooks": codebooks, **EXACT}), auto, strict=True):
        assert_all_same(mine, theirs)
    with pytest.raises(AssertionError):
        assert_all_same(*auto)
