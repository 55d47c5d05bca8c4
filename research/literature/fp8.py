"""`fp8`: K after RoPE and V in e4m3 with a scale of 1, as vLLM keeps them with `--kv-cache-dtype fp8`."""

from dataclasses import dataclass

import torch

from research.literature.request import LiteratureRequest
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.offline.method import Method
from vllm_antkv.ops.rope import RotaryTable

NAMES = ("fp8",)

_DTYPE = torch.float8_e4m3fn


@dataclass(frozen=True)
class Fp8:
    """A row depends on itself alone."""

    def read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantiser.read_back`."""
        return _rounded(key), _rounded(value)

    def element_bits(self, identity: ModelIdentity, num_tokens: int) -> tuple[float, float]:
        """See `CountedQuantiser.element_bits`."""
        return 8.0, 8.0


def build(name: str, request: LiteratureRequest) -> Method:
    """No token stays exact but those of the recency that all methods share."""
    return request.coded(name, 8.0, Fp8(), request.retention())


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    """Numbers too large for it become its largest."""
    largest = torch.finfo(_DTYPE).max
    return rows.clamp(-largest, largest).to(_DTYPE).to(rows)
