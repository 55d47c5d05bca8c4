"""The engine on a model with real sinks beyond the first tokens: it flags those that were planted, and keeps them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.planted import CONTEXT, PRESET, calibrated_rule, is_planted, plant_embedded, text_windows, write_codebook
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.methods import build_method
from vllm_antkv.laboratory.base import MethodRequest
from vllm_antkv.offline.attention import quantised_past

pytestmark = pytest.mark.serving

SETTINGS: dict[str, Any] = {"recency": "none", "prefix": 0, "anchor_share": 0.0}


@torch.inference_mode()
def offline(folder: Path, model: Any, prompt: torch.Tensor, sinks: bool) -> torch.Tensor:
    """Log-probabilities after a prompt, from the offline evaluator."""
    identity = ModelIdentity.from_hf_config(AutoConfig.from_pretrained(folder))
    config = AntKVConfig.model_validate({**SETTINGS, "sinks": sinks})
    method = build_method(PRESET, MethodRequest(str(folder), identity, None, config))
    with quantised_past(model, method, CONTEXT):
        return model(prompt[None], use_cache=False).logits[0, -1].log_softmax(-1)


def test_the_engine_flags_and_keeps_planted_sinks(start_engine: Callable[..., Any], tmp_path: Path) -> None:
    folder = plant_embedded(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    windows = text_windows(3)[1:]
    write_codebook(folder, calibrated_rule(model, windows))
    with start_engine(folder, PRESET, SETTINGS, max_model_len=CONTEXT + 8, max_num_batched_tokens=CONTEXT) as engine:
        runner = engine.core.model_executor.driver_worker.worker.model_runner
        layers = runner.vllm_config.compilation_config.static_forward_context
        (flags,) = {layer.impl.attachment.sinks for layer in layers.values() if hasattr(layer, "impl")} - {None}
        for window in windows:
            # One token: the prompt is the only step, and its flags are still there afterwards.
            (completion,) = engine.complete([window.tolist()], max_tokens=1)
            assert torch.equal(flags.of_step(CONTEXT).cpu(), is_planted(window))
            kept, lost = (offline(folder, model, window, sinks) for sinks in (True, False))
            served = completion.top_logprobs[0]
            for token, logprob in served.items():
                assert logprob == pytest.approx(float(kept[token]), abs=1e-3)
            assert any(abs(logprob - float(lost[token])) > 0.02 for token, logprob in served.items())
