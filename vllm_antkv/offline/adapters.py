"""A LoRA adapter: the folder that peft saved it in, what that says, and a model with it merged into its weights."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from vllm_antkv.errors import AntKVError, SettingsError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Adapter:
    """name: in requests and reports. folder: has adapter_config.json."""

    name: str
    folder: Path

    @classmethod
    def parse(cls, text: str) -> Self:
        """From NAME=PATH, as vLLM's `--lora-modules` has it; SettingsError when it is not that."""
        name, _, folder = text.partition("=")
        if not (name and folder):
            raise SettingsError(f"--lora is '{text}', but must be NAME=PATH.")
        return cls(name, Path(folder))


def read_adapter(folder: Path, error: type[AntKVError]) -> dict[str, Any]:
    """Its config; `error` where there is no adapter."""
    try:
        return json.loads((folder / "adapter_config.json").read_text())  # type: ignore[no-any-return]
    except (OSError, ValueError) as problem:
        raise error(f"No LoRA adapter can be read from '{folder}' ({reason(problem)}).") from None


def merged(model: "PreTrainedModel", folder: Path, error: type[AntKVError]) -> "PreTrainedModel":
    """The model with the adapter in its weights, which change in place; `error` where they do not go together."""
    try:
        from peft import PeftModel
    except ImportError:
        raise error("LoRA adapters are merged by peft, which is missing: `pip install 'vllm-antkv[lora]'`.") from None
    try:
        with warnings.catch_warnings():
            # peft would go on with random weights in the place of those that are missing.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()  # type: ignore[no-any-return]
    except Exception as problem:
        raise error(f"The LoRA adapter in '{folder}' does not fit the model ({reason(problem)}).") from None
