"""A Hugging Face model: what can be known before its weights are loaded, and the model itself."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.errors import SettingsError, UnsupportedModelError
from vllm_antkv.layer_windows import layer_windows
from vllm_antkv.offline.adapters import Adapter, merged
from vllm_antkv.offline.pretrained import check_token_ids, load_weights, read_config, read_tokenizer


@dataclass(frozen=True)
class ModelCard:
    """A model without its weights: enough to check every argument of an evaluation before the long work begins.

    name: folder or Hugging Face name, as given by the user.
    adapter: that is always on.
    """

    name: str
    config: PretrainedConfig
    tokenizer: Tokenizer
    identity: ModelIdentity
    adapter: Adapter | None = None

    @classmethod
    def read(cls, name: str, dtype: str | None = None, adapter: Adapter | None = None) -> Self:
        """Read config and tokenizer.

        Args:
            name: folder or Hugging Face name.
            dtype: in the place of the checkpoint's: float32, bfloat16 or float16.
            adapter: that is always on.

        Raises:
            SettingsError: `name` is no model that can be read.
            UnsupportedModelError: it is, but not one with a KV cache.
        """
        config = read_config(name, SettingsError)
        if dtype is not None:
            config.dtype = getattr(torch, dtype)
        return cls(name, config, read_tokenizer(name, SettingsError), ModelIdentity.from_hf_config(config), adapter)

    @property
    def max_context(self) -> int:
        """Positions the model was made for; UnsupportedModelError when its config says none."""
        text = self.config.get_text_config()
        if not hasattr(text, "max_position_embeddings"):
            raise UnsupportedModelError(f"The config of '{self.name}' has no max_position_embeddings.")
        return int(text.max_position_embeddings)

    @property
    def windows(self) -> list[int | None]:
        """Of its layers: tokens that a query sees, or None for all before it."""
        return layer_windows(self.config.get_text_config())

    @property
    def dtype(self) -> torch.dtype:
        """Of the checkpoint, unless `read` was told another: in it vLLM computes, and keeps full-precision rows."""
        return self.config.dtype or torch.float32

    def load(self) -> PreTrainedModel:
        """The model, its adapter merged, on the GPU if there is one, in evaluation mode.

        On a GPU in the dtype of the checkpoint; on a CPU in float32, where bfloat16 is slow and gains nothing.

        Raises SettingsError when the weights cannot be loaded.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.float32 if device.type == "cpu" else self.dtype
        model = load_weights(self.name, SettingsError, dtype=dtype)
        if self.adapter is not None:
            model = merged(model, self.adapter.folder, SettingsError)
        return model.to(device).eval()  # type: ignore[arg-type]

    def check_windows(self, windows: torch.Tensor) -> None:
        """SettingsError when the model cannot score windows, (num_windows, context) int64."""
        self.check_context(windows.shape[1])
        check_token_ids(windows, self.name, self.identity.vocab_size, SettingsError)

    def check_context(self, context: int, option: str = "--context") -> None:
        """SettingsError when the model cannot score windows of `context` tokens, which this option asks for."""
        if context < 2:
            raise SettingsError(f"{option} is {context}, but a window needs 2 tokens or more to have one to predict.")
        if context > self.max_context:
            raise SettingsError(f"{option} is {context}, but the model was made for {self.max_context} tokens at most.")


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers, in model order: the first list of as many modules as the config has layers.

    Raises UnsupportedModelError where there is none.
    """
    num_layers = model.config.get_text_config().num_hidden_layers  # type: ignore[operator, union-attr]
    for module in model.get_decoder().modules():  # type: ignore[operator, union-attr]
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {num_layers} decoder layers.")
