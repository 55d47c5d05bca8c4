"""Tiny random models that see images: one line for each, and how they are made."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, ProcessorMixin

from tests.serving.conftest import EMBEDDED
from tests.serving.tiny import GDN, SIZES

#: Special tokens of all of them, behind the vocabulary of the embedded model.
_TOKENS = [
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
_TEXT = {**SIZES, "head_dim": 32, "vocab_size": 4160}
_EYES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 8,
}
_SQUARE = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
_EDGE = {"longest_edge": 64}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
#: Channels that are turned by the position in time, height and width.
MROPE = {**_ROPE, "mrope_section": [4, 6, 6]}
_MROPE_OF_HALF = {**MROPE, "mrope_interleaved": True, "partial_rotary_factor": 0.5}


@dataclass(frozen=True)
class SeesImages:
    """A model.

    text: model type of its text model, and what that config has beside `_TEXT`.
    vision: model type of what looks at images, if its config says one.
    config: what the model's own config has.
    processor: makes that of a model with this tokenizer.
    image_token: what stands for an image in a prompt.
    num_tokens: that an image of 64 x 64 has.
    tower: what the names of the weights that look at images begin with in published models, where transformers writes
        `vision_tower.`
    dtype: that vLLM has it for.
    """

    text: dict[str, Any]
    processor: Callable[[Any], ProcessorMixin]
    num_tokens: int
    image_token: str = "<|image_pad|>"
    vision: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    tower: str = "vision_tower."
    dtype: str = "float32"

    def make(self, folder: Path, model_type: str) -> int:
        """Write it to `folder`; the id of the token that stands for an image."""
        tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
        tokenizer.add_special_tokens({"additional_special_tokens": _TOKENS})
        image: int = tokenizer.convert_tokens_to_ids(self.image_token)
        config = AutoConfig.for_model(
            model_type,
            text_config={**_TEXT, **self.text},
            vision_config={**_EYES, **self.vision},
            image_token_id=image,
            image_token_index=image,
            tie_word_embeddings=False,
            **self.config,
        )
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        renamed = {name.replace("vision_tower.", self.tower): tensor for name, tensor in weights.items()}
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})
        self.processor(tokenizer).save_pretrained(folder)
        return image


def _idefics3(tokenizer: Any) -> ProcessorMixin:
    images = transformers.Idefics3ImageProcessor(size=_EDGE, max_image_size=_EDGE)
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=16)


def _llava(tokenizer: Any) -> ProcessorMixin:
    images = transformers.CLIPImageProcessor(**_SQUARE)
    return transformers.LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def _llava_next(tokenizer: Any) -> ProcessorMixin:
    images = transformers.LlavaNextImageProcessor(image_grid_pinpoints=[[64, 64]], **_SQUARE)
    return transformers.LlavaNextProcessor(images, tokenizer, patch_size=8, vision_feature_select_strategy="full")


def _mistral3(tokenizer: Any) -> ProcessorMixin:
    images = transformers.PixtralImageProcessor(size=_EDGE, patch_size=8)
    return transformers.PixtralProcessor(images, tokenizer, patch_size=8, spatial_merge_size=2)


def _qwen(tokenizer: Any) -> ProcessorMixin:
    cut = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 64 * 64, "longest_edge": 64 * 64}}
    videos = transformers.Qwen2VLVideoProcessor(**cut)
    return transformers.Qwen2VLProcessor(transformers.Qwen2VLImageProcessor(**cut), tokenizer, videos)


def _qwen3(tokenizer: Any) -> ProcessorMixin:
    of_qwen2 = _qwen(tokenizer)
    videos = transformers.Qwen3VLVideoProcessor(patch_size=8, merge_size=2)
    return transformers.Qwen3VLProcessor(of_qwen2.image_processor, tokenizer, videos)


#: By model type.
WITH_IMAGES: dict[str, SeesImages] = {
    "idefics3": SeesImages(
        text={"model_type": "llama"},
        config={"pad_token_id": 2, "scale_factor": 2},
        processor=_idefics3,
        image_token="<image>",
        # Three of them say that it is one.
        num_tokens=19,
    ),
    "llava": SeesImages(
        text={"model_type": "llama"},
        vision={"model_type": "clip_vision_model"},
        processor=_llava,
        image_token="<image>",
        num_tokens=64,
        tower="vision_tower.vision_model.",
    ),
    "llava_next": SeesImages(
        text={"model_type": "granite", "attention_multiplier": 0.1},
        vision={"model_type": "siglip_vision_model"},
        config={"vision_feature_select_strategy": "full", "image_grid_pinpoints": [[64, 64]]},
        processor=_llava_next,
        image_token="<image>",
        # The whole image, its one part, and a token at the end of each row of that.
        num_tokens=64 + 64 + 8,
        tower="vision_tower.vision_model.",
    ),
    "mistral3": SeesImages(
        text={"model_type": "mistral", "sliding_window": None},
        vision={"model_type": "pixtral", "head_dim": 32},
        config={"spatial_merge_size": 2},
        processor=_mistral3,
        image_token="[IMG]",
        # A token at the end of each row.
        num_tokens=4 * (4 + 1),
    ),
    "qwen2_vl": SeesImages(
        text={"rope_parameters": MROPE},
        vision={"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2},
        processor=_qwen,
        num_tokens=4 * 4,
    ),
    "qwen2_5_vl": SeesImages(
        text={"rope_parameters": MROPE},
        vision={"depth": 2, "num_heads": 2, "out_hidden_size": 128, "fullatt_block_indexes": [1], "window_size": 32},
        processor=_qwen,
        num_tokens=4 * 4,
    ),
    "qwen3_vl": SeesImages(
        text={"rope_parameters": {**MROPE, "mrope_interleaved": True}},
        vision={
            "depth": 2,
            "num_heads": 2,
            "out_hidden_size": 128,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
        },
        processor=_qwen3,
        num_tokens=4 * 4,
    ),
    "qwen3_5": SeesImages(
        text={**GDN, "rope_parameters": _MROPE_OF_HALF},
        vision={"depth": 2, "num_heads": 2, "out_hidden_size": 128, "num_position_embeddings": 64},
        processor=_qwen3,
        num_tokens=4 * 4,
        dtype="bfloat16",
    ),
}

#: Of them, those that are served for text alone, too: `--language-model-only`.
TEXT_ALONE = ("qwen2_vl", "qwen3_5")
