"""Which kernels would run the layers of a model here, as far as its config tells."""

from typing import Any

import torch

from vllm_antkv.codebook import Codebook
from vllm_antkv.doctor.finding import Finding
from vllm_antkv.features import has_plain_logits
from vllm_antkv.layer_windows import layer_windows
from vllm_antkv.ops.dispatch import cautions, choose, summary
from vllm_antkv.ops.layer import LayerKind


def check_layers(config: Any, codebook: Codebook, device: torch.device) -> Finding:
    """The kernels of each layer, and what faster ones lack.

    Args:
        config: of the model.
        codebook: that would be served.
        device: that would have the pages.
    """
    text_config, model = config.get_text_config(), codebook.header.model
    dtype, group = getattr(config, "dtype", None), model.num_attention_heads // model.num_kv_heads
    kinds = {
        index: LayerKind(
            preset,
            model.head_size,
            group,
            dtype if isinstance(dtype, torch.dtype) else torch.bfloat16,
            rotary=None,
            plain_logits=window is None and has_plain_logits(text_config),
        )
        for index, preset, window in zip(
            model.decoder_indices, codebook.header.layer_presets, layer_windows(text_config), strict=True
        )
    }
    chosen = dict(zip(kinds, choose("auto", device, list(kinds.values())), strict=True))
    what = f"kernels, {codebook.header.preset}"
    slower = list(cautions(chosen))
    return Finding(what, "note" if slower else "ok", summary(chosen), " ".join(slower))
