"""Layers of one model on different kernels, in real vLLM: each runs on the fastest that have code for it."""

from dataclasses import replace

import pytest
import torch

from tests.serving.conftest import PRESET, assert_all_same
from tests.serving.served_family import OPTIONS, PROMPTS, SINKS
from tests.serving.tiny import FAMILY, make_coded
from vllm_antkv.ops import cpu, dispatch
from vllm_antkv.ops.layer import LayerKind

pytestmark = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))


def only_plain_layers(device: torch.device, layer: LayerKind) -> str | None:
    """As the CUDA kernels, which have no code for sliding windows."""
    return None if layer.is_plain else "this test has it so"


@pytest.mark.parametrize("name", ["gemma3", "gemma3n"])
def test_layers_on_different_kernels_answer_as_on_one(start_engine, tmp_path, monkeypatch, name):
    """With sinks, anchors, chunks, and layers that read the cache of others."""
    model = make_coded(tmp_path / "model", *FAMILY[name], sinks=SINKS)
    best = cpu.best()
    assert best is not None
    answers, implementations = [], []
    of_cpus = [
        replace(each, unsupported=only_plain_layers) if each.family == "cpu" else each for each in dispatch.KERNELS
    ]
    for kernels in (dispatch.KERNELS, of_cpus):
        monkeypatch.setattr(dispatch, "KERNELS", kernels)
        with start_engine(model, PRESET, **OPTIONS) as engine:
            answers.append(engine.complete(PROMPTS, max_tokens=8))
            engine.assert_all_blocks_free()
            (report,) = engine.core.antkv_status()["workers"]
            implementations.append(report["implementation"])
    assert implementations == [best.name, f"reference+{best.name}"]
    assert_all_same(*answers)
