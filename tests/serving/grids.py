"""Text models whose tokens have three positions, as those of models that see images have (M-RoPE).

Tokens from PATCH on are patches of a picture, WIDTH in a row, in the order of reading: so there are prompts with three
different positions without an image, a processor or anything else that looks. The models are vLLM's own Qwen2 and
Qwen3, whose layers are those of Qwen2-VL and Qwen3-VL, with what vLLM asks of a model with M-RoPE.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from tests.serving.tiny import make_model

PATCH = 3000
WIDTH = 7
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
#: Model type, what its config has beside the sizes, its architecture here, and transformers' module that turns so.
GRIDS: dict[str, tuple[str, dict[str, Any], str, type[nn.Module]]] = {
    "sections side by side": ("qwen2", {"rope_parameters": _ROPE}, "GridQwen2ForCausalLM", Qwen2VLRotaryEmbedding),
    "sections in turns": (
        "qwen3",
        {"head_dim": 32, "rope_parameters": {**_ROPE, "mrope_interleaved": True}},
        "GridQwen3ForCausalLM",
        Qwen3VLTextRotaryEmbedding,
    ),
}


def positions_of(tokens: list[int]) -> tuple[torch.Tensor, int]:
    """(3, num_tokens) in time, height and width, and what the next token's positions are more than its place."""
    found: list[tuple[int, int, int]] = []
    following = begin = 0
    for index, token in enumerate(tokens):
        if token < PATCH:
            found.append((following,) * 3)
        else:
            if index == 0 or tokens[index - 1] < PATCH:
                first, begin = index, following
            row, column = divmod(index - first, WIDTH)
            found.append((begin, begin + row, begin + column))
        following = max(following, max(found[-1]) + 1)
    return torch.tensor(found).T, following - len(tokens)


def register() -> None:
    """Make the architectures known to vLLM, in this process."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import SupportsMRoPE
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    class GridQwen2ForCausalLM(Qwen2ForCausalLM, SupportsMRoPE):
        def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> Any:
            return positions_of(input_tokens)

    class GridQwen3ForCausalLM(Qwen3ForCausalLM, SupportsMRoPE):
        def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> Any:
            return positions_of(input_tokens)

    for model in (GridQwen2ForCausalLM, GridQwen3ForCausalLM):
        ModelRegistry.register_model(model.__name__, model)


def make_grid(folder: Path, name: str) -> Path:
    """A random one of GRIDS."""
    model_type, changes, architecture, _ = GRIDS[name]
    make_model(folder, model_type, changes)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [architecture]}))
    return folder
