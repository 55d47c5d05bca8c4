"""The trained prefix in a worker: its rows take the place of the model's in a step (IntactKV, section 3.2).

Which request stands where in a step, and whether a CUDA graph is replayed, is the model runner's to decide. A request
is known by its first page here: the scheduler says which page that is when the request begins, and the block table of a
step has it. A captured graph holds the choice between two rows, by a tensor that each step fills.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch.nn.functional import pad
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_antkv.codebook.prefix import TrainedPrefix, starts_with
from vllm_antkv.errors import UnsupportedModelError


class PrefixTokens:
    """Which of the step's tokens get a row of the trained prefix; shared by all layers of a worker.

    token_ids: P ids. A request whose prompt starts with them has the trained rows at positions 0 to P - 1, wherever its
        prompt is cut into steps.
    layer_name: an attention layer by whose pages requests are known; their first one stays while they run.
    rows: (max_num_tokens,) int64, the row that each of the step's tokens gets, P for its own; None: all get their own.
    """

    def __init__(self, token_ids: Sequence[int], layer_name: str, max_num_tokens: int, device: torch.device) -> None:
        self.token_ids = list(token_ids)
        self.layer_name = layer_name
        self.device = device
        self.rows: torch.Tensor | None = None
        self._buffer = torch.full((max_num_tokens,), len(self.token_ids), device=device)
        self._starting: set[str] = set()
        self._has_prefix = torch.zeros(0, dtype=torch.bool, device=device)

    def refuse_window(self, window: int | None) -> None:
        """Refuse a prefix that `layer_name` may have lost the first page of before all of it is computed."""
        if window is not None and window < len(self.token_ids):
            raise UnsupportedModelError(
                f"The codebook's trained prefix of {len(self.token_ids)} tokens is longer than the windows of the "
                f"model's layers ({window} tokens): run `antkv calibrate` without --train-prefix."
            )

    def allocate(self, num_blocks: int) -> None:
        """Make room for what is known of each page."""
        self._has_prefix = self._has_prefix.new_zeros(num_blocks)

    def note(self, output: SchedulerOutput) -> None:
        """Take the first pages of requests that begin, and whether their prompts start with the prefix."""
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        self._starting -= output.finished_req_ids
        for request in new:
            if request.prompt_embeds is None and starts_with(request.prompt_token_ids, self.token_ids):
                self._starting.add(request.req_id)
        # Requests that were preempted begin again: for model runner V2 as new ones.
        again = zip(cached.req_ids, cached.new_block_ids, strict=True)
        begun = [(request.req_id, request.block_ids) for request in new]
        begun += [(name, pages) for name, pages in again if pages and name in cached.resumed_req_ids]
        first = {group[0]: name in self._starting for name, pages in begun for group in pages if group}
        if first:
            pages, known = (torch.tensor(list(each)).to(self.device) for each in (first, first.values()))
            self._has_prefix[pages] = known

    def plan(self, step: CommonAttentionMetadata) -> None:
        """Set `rows` for a step, as `layer_name` has it."""
        self.rows = None
        count = len(self.token_ids)
        lengths = step.query_start_loc_cpu[: step.num_reqs + 1].diff()
        computed = step.seq_lens_cpu_upper_bound
        if self._starting and (
            computed is None or ((computed[: step.num_reqs] - lengths < count) & (lengths > 0)).any()
        ):
            ends = step.query_start_loc[1 : step.num_reqs + 1]
            tokens = torch.arange(step.num_actual_tokens, dtype=ends.dtype, device=ends.device)
            # Tokens behind the last one fill up a graph.
            requests = torch.searchsorted(ends, tokens, right=True).clamp(max=step.num_reqs - 1)
            positions = step.seq_lens[requests] - ends[requests] + tokens
            has_prefix = self._has_prefix[step.block_table_tensor[requests, 0]]
            self.use_buffer()
            self._buffer[: len(tokens)] = torch.where(has_prefix, positions, count).clamp(max=count)
        elif self._buffer.is_cuda:
            # A graph may be replayed.
            self._buffer.fill_(count)

    def use_buffer(self) -> None:
        """Let the layers choose, as those of a graph always do; their own rows so far."""
        self.rows = self._buffer.fill_(len(self.token_ids))


@dataclass(frozen=True)
class LayerPrefix:
    """The rows of one layer.

    k, v: (P + 1, num_kv_heads, head_size) model dtype, this rank's KV heads; K after RoPE, channels as the model has
        them. The last row is never used.
    """

    tokens: PrefixTokens
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def of(cls, tokens: PrefixTokens, prefix: TrainedPrefix, layer: int, heads: slice, dtype: torch.dtype) -> Self:
        """Those of a codebook."""
        k, v = (pad(rows[layer, :, heads], (0, 0, 0, 0, 0, 1)) for rows in (prefix.k, prefix.v))
        return cls(tokens, k.to(tokens.device, dtype), v.to(tokens.device, dtype))

    def put_in(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a step, each (num_tokens, num_kv_heads, head_size), with the trained rows in their places."""
        if self.tokens.rows is None:
            return key, value
        rows = self.tokens.rows[: len(key)]
        is_trained = (rows < len(self.k) - 1)[:, None, None]
        return torch.where(is_trained, self.k[rows], key), torch.where(is_trained, self.v[rows], value)
