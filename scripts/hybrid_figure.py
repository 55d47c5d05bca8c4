"""How many times fewer bytes a request takes than with `auto` where some layers keep a state, as `antkv plan` counts.

`python -m scripts.hybrid_figure` writes docs/figures/hybrids.json, and `python -m research.figures.hybrids` draws it.
No weights and no GPU are needed.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

NUMBERS = Path(__file__).parent.parent / "docs" / "figures" / "hybrids.json"
#: Columns of the table in docs/compatibility.md: a preset, and the tokens of a request.
COLUMNS = {
    "1 bit, 8K": ("antkv-1bit", 8192),
    "1 bit, 32K": ("antkv-1bit", 32768),
    "1 bit, 128K": ("antkv-1bit", 131072),
    "2 bits, 32K": ("antkv-2bit", 32768),
    "4 bits, 32K": ("antkv-4bit", 32768),
}
#: Layers of Nemotron-H.
_KINDS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_COMMON = {"vocab_size": 128256, "max_position_embeddings": 131072, "dtype": "bfloat16"}
#: The shapes of published models.
MODELS: dict[str, dict[str, Any]] = {
    name: _COMMON | shape for name, shape in tomllib.loads(Path(__file__).with_name("hybrids.toml").read_text()).items()
}
for _shape in MODELS.values():
    if "layers_block_type" in _shape:
        _shape["layers_block_type"] = [_KINDS[letter] for letter in _shape["layers_block_type"]]


def measure(shape: dict[str, Any]) -> dict[str, float]:
    """By column, the bytes of `auto` over those of the preset, for a model of this config."""
    from transformers import AutoConfig

    from vllm_antkv.capacity.memory import DecodeShape, sequence_bytes

    decode_shape = DecodeShape.of(AutoConfig.for_model(**shape))
    return {
        column: round(sequence_bytes(decode_shape, "auto", length) / sequence_bytes(decode_shape, preset, length), 1)
        for column, (preset, length) in COLUMNS.items()
    }


def main() -> None:
    """The command."""
    NUMBERS.write_text(json.dumps({name: measure(shape) for name, shape in MODELS.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
