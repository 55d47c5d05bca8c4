"""What is captured is what attention gets before RoPE, and how the loss answers to it."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from tests.unit.calibrate.conftest import FAMILY_SETTINGS
from vllm_antkv.calibrate.capture import Capture, CaptureFiles, CaptureShape, capture_window, checkpointed
from vllm_antkv.calibrate.models import load_model
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.errors import CalibrationError
from vllm_antkv.offline.hidden import captured_hidden, loss_of
from vllm_antkv.offline.models import decoder_layers
from vllm_antkv.offline.pretrained import read_config
from vllm_antkv.offline.sinks import SinkChannels
from vllm_antkv.offline.traits import rotary_tables
from vllm_antkv.ops.rope import rotate

CPU = torch.device("cpu")
SEQ_LEN = 24


def load(folder: Path) -> tuple[PreTrainedModel, ModelIdentity]:
    config = read_config(str(folder), CalibrationError)
    return load_model(str(folder), config, CPU), ModelIdentity.from_hf_config(config)


def a_window() -> torch.Tensor:
    return torch.randint(2, 300, (SEQ_LEN,), generator=torch.Generator().manual_seed(1))


def captured(
    model: PreTrainedModel,
    identity: ModelIdentity,
    folder: Path,
    weighted: bool = True,
    sinks: SinkChannels | None = None,
) -> CaptureFiles:
    """Of one window; the folder is made if it does not exist."""
    folder.mkdir(exist_ok=True)
    sizes = identity.num_layers, 1, SEQ_LEN, identity.num_kv_heads, identity.head_size
    files = CaptureFiles(folder, CaptureShape(*sizes, len(sinks.channels) if sinks else 0))
    capture_window(model, a_window(), 0, Capture(rotary_tables(model, SEQ_LEN), files, weighted, sinks))
    return files


def attention_inputs(model: nn.Module, window: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K after RoPE and V of every layer, with gradients, seen where attention receives them."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    eager = importlib.import_module(type(model).__module__).eager_attention_forward

    def spy(module: nn.Module, query: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        key.retain_grad()
        value.retain_grad()
        seen.append((key, value))
        return eager(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("antkv_spy", spy)
    AttentionMaskInterface.register("antkv_spy", eager_mask)
    model.set_attn_implementation("antkv_spy")
    loss_of(model, window).backward()
    return seen


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_rows_and_norms_are_those_of_attention(family, make_model, tmp_path):
    """Captured K, rotated, is the K that attention gets; RoPE turns, so the gradients' norms agree too."""
    model, identity = load(make_model(family))
    files = captured(model, identity, tmp_path)
    positions, tables = torch.arange(SEQ_LEN), rotary_tables(model, SEQ_LEN)
    seen = attention_inputs(model, a_window())
    assert len(seen) == identity.num_layers
    for layer, (key, value) in enumerate(seen):
        rows = torch.from_numpy(np.array(files.rows(layer)[:, 0])).float()
        norms = torch.from_numpy(np.array(files.norms(layer)[:, 0]))
        torch.testing.assert_close(
            rotate(rows[0], positions, tables[layer]), key[0].transpose(0, 1), rtol=2e-3, atol=2e-3
        )
        torch.testing.assert_close(rows[1], value[0].transpose(0, 1), rtol=2e-3, atol=2e-3)
        for kind, tensor in enumerate((key, value)):
            # YaRN's turn makes keys longer.
            stretch = tables[layer].cos[:1].max() if kind == 0 and tables[layer].rotary_dim else 1
            expected = stretch * tensor.grad[0].norm(dim=-1).transpose(0, 1)
            assert expected.max() > 0
            torch.testing.assert_close(norms[kind], expected, rtol=1e-3, atol=1e-4)


def test_the_loss_is_the_sum_over_all_tokens_but_the_first(tiny_llama):
    model, window = load(tiny_llama)[0], a_window()
    mean = model(window[None], labels=window[None]).loss
    assert loss_of(model, window).item() == pytest.approx((SEQ_LEN - 1) * mean.item(), rel=1e-5)


def test_checkpointing_changes_nothing(tiny_llama, tmp_path):
    model, identity = load(tiny_llama)
    found = []
    for active in (False, True):
        with checkpointed(model, active):
            files = captured(model, identity, tmp_path / str(active))
        found.append([np.array(array) for layer in range(2) for array in (files.rows(layer), files.norms(layer))])
    for plain, recomputed in zip(*found, strict=True):
        np.testing.assert_allclose(plain, recomputed, rtol=1e-5)
    assert not any(module.training for module in model.modules())


def test_without_gradients_rows_are_the_same_and_no_norms_are_written(tiny_llama, tmp_path):
    model, identity = load(tiny_llama)
    both = [captured(model, identity, tmp_path / str(weighted), weighted) for weighted in (True, False)]
    np.testing.assert_array_equal(*(np.array(files.rows(1)) for files in both))
    assert not list((tmp_path / "False").glob("norms*"))


def test_files_take_the_bytes_they_promise(tiny_llama, tmp_path):
    files = captured(*load(tiny_llama), tmp_path, sinks=SinkChannels(0, (3,)))
    files.flush()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == files.shape.num_bytes


def test_sink_values_are_the_hidden_state_after_the_layer(tiny_llama, tmp_path):
    model, identity = load(tiny_llama)
    files = captured(model, identity, tmp_path, weighted=False, sinks=SinkChannels(0, (5, 2)))
    hidden = model(a_window()[None], output_hidden_states=True).hidden_states[1][0]
    expected = hidden[:, [5, 2]].abs().detach().numpy()
    np.testing.assert_allclose(files.sink_values()[0], expected, rtol=1e-5)


def test_hooks_are_gone_afterwards(tiny_llama, tmp_path):
    model, identity = load(tiny_llama)
    captured(model, identity, tmp_path)
    with captured_hidden(decoder_layers(model), lambda hidden: None):
        pass
    assert not any(module._forward_hooks for module in model.modules())


def test_values_beyond_float16_are_refused(make_model, tmp_path, refused):
    model, identity = load(make_model("llama"))
    decoder_layers(model)[1].self_attn.v_proj.weight.mul_(1e6)
    with refused(CalibrationError, "Layer 1"):
        captured(model, identity, tmp_path, weighted=False)
