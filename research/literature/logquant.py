"""`logquant-Xbit`: KIVI's quantiser, exact tokens spread logarithmically over the past (LogQuant, algorithm 1).

Up to 3W tokens are exact; when they are all in use, every second one of the older 2W is quantised. The W tokens that go
together form one group per channel of K; V is quantised per token in groups of 32 channels. Scale and zero point in
float16. What makes LogQuant is its retention: it keeps its own (W = 42, 126 tokens) whatever `--recency` says, unless
that names another `log:W`.
"""

from dataclasses import dataclass
from functools import partial

import torch

from research.literature import uniform
from research.literature.request import LiteratureRequest
from research.literature.retention import Retention
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.offline.method import Method
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.select.recency import ALWAYS

NAMES = ("logquant-2bit", "logquant-4bit")

_WINDOW = 42
_GROUP = 32


@dataclass(frozen=True)
class LogQuant:
    """A K row depends on the rows that are quantised together with it, a V row on itself alone."""

    bits: int
    window: int

    def last_query(self, num_tokens: int) -> torch.Tensor:
        """The last query that sees each token exactly, (num_tokens,) int64; the same for those that go together."""
        table = torch.full((num_tokens,), ALWAYS)
        held: list[int] = []
        for token in range(num_tokens):
            if len(held) == 3 * self.window:
                old = held[: 2 * self.window]
                table[torch.tensor(old[1::2])] = token - 1
                held = old[::2] + held[2 * self.window :]
            held.append(token)
        return table

    def read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantiser.read_back`."""
        coded_key = key.clone()
        table = self.last_query(key.shape[1])
        for last in table[table < ALWAYS].unique():
            together = (table == last).nonzero().flatten().to(key.device)
            coded_key[:, together] = uniform.per_channel(key[:, together], self.bits, len(together))
        group = uniform.group_size(value.shape[-2] * value.shape[-1], _GROUP)
        return coded_key, uniform.per_token(value, self.bits, group)

    def element_bits(self, identity: ModelIdentity, num_tokens: int) -> tuple[float, float]:
        """See `CountedQuantiser.element_bits`."""
        group = uniform.group_size(identity.num_kv_heads * identity.head_size, _GROUP)
        parameters = 2 * uniform.PARAMETER_BITS
        return self.bits + parameters / self.window, self.bits + parameters / group


def build(name: str, request: LiteratureRequest) -> Method:
    """W of the settings where they ask for `log:W`, and otherwise the paper's."""
    policy = request.config.recency_policy
    window = policy.window if policy.kind == "log" and not request.own_recency else _WINDOW
    quantiser = partial(LogQuant, window=window)
    last_query = quantiser(0).last_query
    recency = f"log:{window} (own)"
    return request.rounded(name, quantiser, Retention(last_query, last_query), recency=recency, group=_GROUP)
