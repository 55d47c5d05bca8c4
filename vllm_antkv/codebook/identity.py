"""Which model a codebook belongs to: architecture and sizes, which must equal the served model's."""

import hashlib
import json
import reprlib
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.layer_windows import attention_layers

#: Far more than any model has.
MAX_LAYERS = 4096
#: A size of a model. The bound keeps products of sizes short enough for messages.
Size = Annotated[int, Field(gt=0, lt=1 << 31)]


class ModelIdentity(BaseModel, frozen=True, extra="forbid"):
    """What the model of a codebook and the served model must have in common.

    num_layers: those that attend, which are all that have K and V.
    attention_layers: their indices among the decoder layers, where others do not attend; None, and left out: all do.
    """

    architecture: str = Field(pattern=r"^[\w.-]{1,100}$")
    num_layers: Annotated[int, Field(gt=0, le=MAX_LAYERS)]
    num_attention_heads: Size
    num_kv_heads: Size
    head_size: Size
    hidden_size: Size
    vocab_size: Size
    attention_layers: tuple[Annotated[int, Field(ge=0, lt=MAX_LAYERS)], ...] | None = None

    @model_serializer(mode="wrap")
    def _without_none(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialise(self).items() if value is not None}

    @property
    def decoder_indices(self) -> tuple[int, ...]:
        """Of every layer that attends, its index among the decoder layers."""
        return tuple(range(self.num_layers)) if self.attention_layers is None else self.attention_layers

    @classmethod
    def from_hf_config(cls, hf_config: Any) -> Self:
        """Read the identity from a Hugging Face `PretrainedConfig` (of a text model, or holding one).

        Raises UnsupportedModelError when a size is missing or invalid.
        """
        text = hf_config.get_text_config()
        heads = getattr(text, "num_attention_heads", None)
        kv_heads = getattr(text, "num_key_value_heads", None)
        hidden_size = getattr(text, "hidden_size", None)
        attending = attention_layers(text)
        try:
            return cls(
                architecture=(getattr(hf_config, "architectures", None) or [text.model_type])[0],
                num_layers=getattr(text, "num_hidden_layers", None) if attending is None else len(attending),
                num_attention_heads=heads,
                num_kv_heads=heads if kv_heads is None else kv_heads,
                head_size=getattr(text, "head_dim", None) or (hidden_size // heads if hidden_size and heads else None),
                hidden_size=hidden_size,
                vocab_size=getattr(text, "vocab_size", None),
                attention_layers=attending,
            )
        except ValidationError as error:
            first = error.errors()[0]
            field, value = first["loc"][0], reprlib.repr(first["input"])
            raise UnsupportedModelError(
                f"A model of type {text.model_type} with {field} {value} cannot be used with vllm-antkv "
                f"({first['msg']})."
            ) from None

    @property
    def key(self) -> str:
        """Short stable hash, used as a folder name."""
        text = json.dumps(self.model_dump(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(have: ModelIdentity, want: ModelIdentity) -> str:
    """The fields in which a codebook's model differs from the served one."""
    pairs = ((name, getattr(have, name), getattr(want, name)) for name in ModelIdentity.model_fields)
    return ", ".join(f"{name} is {a}, the served model's is {b}" for name, a, b in pairs if a != b)
