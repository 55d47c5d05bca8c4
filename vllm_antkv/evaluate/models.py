"""A Hugging Face model: what can be known before its weights are loaded, and the model itself."""

from dataclasses import dataclass
from typing import Self

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.errors import SettingsError


@dataclass(frozen=True)
class ModelCard:
    """A model without its weights: enough to check every argument of an evaluation before the long work begins.

    name: folder or Hugging Face name, as given by the user.
    """

    name: str
    config: PretrainedConfig
    tokenizer: Tokenizer
    identity: ModelIdentity

    @classmethod
    def read(cls, name: str) -> Self:
        """Read config and tokenizer; SettingsError when `name` is no model that can be read."""
        try:
            config = AutoConfig.from_pretrained(name)
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, KeyError) as error:
            raise SettingsError(f"No model can be read from '{name}': {first_line(error)}.") from None
        return cls(name, config, tokenizer, ModelIdentity.from_hf_config(config))

    @property
    def max_context(self) -> int:
        """Positions the model was made for."""
        return int(self.config.get_text_config().max_position_embeddings)

    @property
    def dtype(self) -> torch.dtype:
        """Of the checkpoint: the dtype in which vLLM keeps full-precision rows when it is told to keep the model's."""
        return self.config.dtype or torch.float32

    def load(self) -> PreTrainedModel:
        """The model on the GPU if there is one, in evaluation mode.

        On a GPU in the dtype of the checkpoint; on a CPU in float32, where bfloat16 is slow and gains nothing.

        Raises SettingsError when the weights cannot be loaded.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.float32 if device.type == "cpu" else self.dtype
        try:
            model = AutoModelForCausalLM.from_pretrained(self.name, dtype=dtype)
        except (OSError, ValueError, RuntimeError) as error:
            raise SettingsError(f"The weights of '{self.name}' cannot be loaded: {first_line(error)}.") from None
        return model.to(device).eval()


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, without its full stop: libraries below us explain at length."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
