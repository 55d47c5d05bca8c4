"""The bit presets, values of `--kv-cache-dtype`, and what layers may have in their place. Pure Python.

A preset `dNcM` cuts a K or V row into sub-vectors of N channels and replaces each by the index of one of M centroids
(AnTKV, section 4.1). Codes of 8 bits take a byte; codes of 12 bits are packed, two in three bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_antkv.errors import SettingsError


@dataclass(frozen=True)
class Preset:
    """One vector-quantisation format.

    name: the value of `--kv-cache-dtype`, or like one.
    sub_vector_size: channels per sub-vector (N of dNcM).
    num_centroids: centroids per sub-vector position (M of dNcM), a power of two.
    """

    name: str
    sub_vector_size: int
    num_centroids: int

    @property
    def code_bits(self) -> int:
        """Bits of one code."""
        return self.num_centroids.bit_length() - 1

    @property
    def nominal_bits(self) -> float:
        """Bits per K or V element, codes alone: the papers' convention."""
        return self.code_bits / self.sub_vector_size

    def num_sub_vectors(self, head_size: int) -> int:
        """Sub-vectors per head.

        Raises SettingsError when the sub-vectors do not fill the head exactly.
        """
        if head_size % self.sub_vector_size:
            raise SettingsError(
                f"{self.name} cuts a head into sub-vectors of {self.sub_vector_size} channels, which does not divide "
                f"head size {head_size}: choose a preset with smaller sub-vectors."
            )
        return head_size // self.sub_vector_size

    def code_bytes(self, head_size: int) -> int:
        """Bytes of the codes of one K (or one V) row of one head, rounded up to whole bytes."""
        return (self.num_sub_vectors(head_size) * self.code_bits + 7) // 8


#: A layer gets at most so many times the bits asked for: more gains little, and takes long to learn.
_MOST_TIMES = 3

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("antkv-4bit", 2, 256),
        Preset("antkv-2bit", 4, 256),
        Preset("antkv-1bit", 8, 256),
        Preset("antkv-0.75bit", 16, 4096),
        Preset("antkv-0.5bit", 16, 256),
        Preset("antkv-0.375bit", 32, 4096),
    )
}

#: What a layer may have, by name: a preset, or codes that are too coarse for all layers of a model.
LAYER_PRESETS = {**PRESETS, "antkv-0.25bit": Preset("antkv-0.25bit", 32, 256)}


def nominal_bits(layers: Sequence[Preset]) -> float:
    """Bits per K or V element of a model whose layers have these presets, codes alone."""
    return sum(preset.nominal_bits for preset in layers) / len(layers)


def parts_of_mix(preset: Preset, head_size: int) -> list[Preset]:
    """What layers may have in place of `preset`; empty where there is no cheaper or no dearer one.

    Tables of 4,096 centroids, which decode slowly and need much text, stay out of mixes.

    Args:
        preset: what is asked for.
        head_size: sub-vectors must divide it.
    """
    parts = [
        part
        for part in LAYER_PRESETS.values()
        if part.num_centroids == 256
        and head_size % part.sub_vector_size == 0
        and part.nominal_bits <= _MOST_TIMES * preset.nominal_bits
    ]
    bits = [part.nominal_bits for part in parts]
    return parts if bits and min(bits) < preset.nominal_bits < max(bits) else []


def get_preset(name: str) -> Preset:
    """The preset called `name`; SettingsError names the known ones when there is none."""
    try:
        return PRESETS[name]
    except KeyError:
        raise SettingsError(f"Unknown preset '{name}': choose one of {', '.join(PRESETS)}.") from None
