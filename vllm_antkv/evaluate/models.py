"""A Hugging Face model, ready to be evaluated."""

from dataclasses import dataclass

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.errors import SettingsError


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer.

    name: as given by the user.
    stored_dtype: of the checkpoint, the dtype in which vLLM would keep full-precision rows.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: ModelIdentity
    stored_dtype: torch.dtype

    @property
    def max_context(self) -> int:
        """Positions the model was made for."""
        return int(self.model.config.get_text_config().max_position_embeddings)


def load_model(name: str) -> LoadedModel:
    """Load a model on the GPU if there is one, in evaluation mode.

    On a GPU in the dtype of the checkpoint; on a CPU in float32, where bfloat16 is slow and gains nothing.

    Raises SettingsError when `name` is no model that can be loaded.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = load_config(name)
    stored = config.dtype or torch.float32
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32 if device.type == "cpu" else stored)
    except (OSError, ValueError, RuntimeError) as error:
        raise SettingsError(f"The weights of '{name}' cannot be loaded: {first_line(error)}") from None
    identity = ModelIdentity.from_hf_config(config)
    return LoadedModel(name, model.to(device).eval(), load_tokenizer(name), identity, stored)


def load_config(name: str) -> PretrainedConfig:
    """The Hugging Face config; SettingsError when there is none."""
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"No model can be read from '{name}': {first_line(error)}") from None


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer; SettingsError when it has none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"No tokenizer can be read from '{name}': {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """The first line of an exception's message: libraries below us explain at length."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
