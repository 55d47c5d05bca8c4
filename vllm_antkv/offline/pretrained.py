"""The model that a user names: its config, tokenizer and weights, read through transformers.

A damaged file makes transformers raise whatever its readers stumble over. So every exception is answered here, with one
sentence, as an error of the class that the caller asks for.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from vllm_antkv.errors import AntKVError, reason


def read_config(model: str, error: type[AntKVError]) -> PretrainedConfig:
    """The config of a model; `error` when there is no such model, or its config cannot be read."""
    # Names on the hub are `model` or `owner/model`.
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if is_path and not Path(model).exists():
        raise error(f"No model can be read from '{model}' (there is no such folder).")
    try:
        return AutoConfig.from_pretrained(model)
    except Exception as problem:
        raise error(f"No model can be read from '{model}' ({reason(problem)}).") from None


def is_quantised(config: PretrainedConfig) -> bool:
    """Whether the weights are, so that no gradient flows through them."""
    return getattr(config, "quantization_config", None) is not None


def read_tokenizer(model: str, error: type[AntKVError]) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; `error` when it has none that can be read."""
    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as problem:
        raise error(f"No tokenizer can be read from '{model}' ({reason(problem)}).") from None


def load_weights(model: str, error: type[AntKVError], **options: Any) -> PreTrainedModel:
    """The model itself.

    Args:
        options: for transformers' `from_pretrained`.

    Raises:
        error: the weights cannot be read, or are not those of the config. transformers alone would go on with random
            ones in the place of those that are missing.
    """
    try:
        with _no_warnings():
            loaded, found = _auto_class(options.get("config") or AutoConfig.from_pretrained(model)).from_pretrained(
                model, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except Exception as problem:
        raise error(f"The weights of '{model}' cannot be loaded ({reason(problem)}).") from None
    unusable = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})
    if unusable:
        raise error(
            f"The weights of '{model}' do not fit its config: {unusable[0]} is missing or of another shape "
            f"({len(unusable)} such tensors)."
        )
    if getattr(loaded.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        # transformers' other implementations leave the soft cap out.
        loaded.set_attn_implementation("eager")
    return loaded  # type: ignore[no-any-return]


def described(config: PretrainedConfig, error: type[AntKVError]) -> PreTrainedModel:
    """The model that a config describes, without weights (PyTorch's device `meta`); `error` when it describes none."""
    try:
        with torch.device("meta"):
            return _auto_class(config).from_config(config)  # type: ignore[no-any-return]
    except Exception as problem:  # sizes that do not go together, names that do not exist: anything can fail
        raise error(f"No model can be made from its config.json ({reason(problem)}).") from None


def num_parameters(module: nn.Module) -> int:
    """Of a model or a part of it."""
    return sum(parameter.numel() for parameter in module.parameters())


def hands_over_rows(config: PretrainedConfig, error: type[AntKVError]) -> bool:
    """Whether transformers' code of a model hands K and V to its attention interface; `error` as of `described`."""
    modules = described(config, error).get_decoder().modules()
    return any(hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS") for module in modules)


def check_token_ids(windows: torch.Tensor, model: str, vocab_size: int, error: type[AntKVError]) -> None:
    """`error` when windows, of any shape and int64, hold token ids that the model does not have."""
    highest = int(windows.max())
    if highest >= vocab_size:
        raise error(
            f"The text has token id {highest}, but the vocabulary of '{model}' has {vocab_size} tokens: its tokenizer "
            "belongs to another model."
        )


def _auto_class(config: PretrainedConfig) -> Any:
    """What makes the model: of one that sees images too, all of it, of which text needs the text model alone."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Keep transformers' table of unusable weights off the terminal: an error says it in one line."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
