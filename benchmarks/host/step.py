"""Steps of an engine as vLLM describes them to a layer in the shape of Llama-3-8B's, or of one rank's share of it.

Large tensors are on PyTorch's `meta` device: operations on them check and allocate as on a GPU, and compute nothing.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata

from benchmarks.gpu.llama import HEAD_SIZE, make_model
from vllm_antkv.ops.rows import StepRows

DEVICE = torch.device("meta")
DTYPE = torch.bfloat16
#: Query heads per KV head.
GROUP = 4
#: Of the engine: new tokens of a step, requests of a step, the longest request.
MAX_NUM_TOKENS, MAX_NUM_REQS, MAX_LEN = 8192, 256, 131_072
#: Blocks of a pool.
NUM_BLOCKS = 4096


@dataclass(frozen=True)
class Batch:
    """The requests of a step: how many new tokens they have, and how many with these."""

    query_lens: list[int]
    seq_lens: list[int]

    def metadata(self, block_size: int) -> CommonAttentionMetadata:
        """With block tables for blocks of so many tokens."""
        starts = torch.tensor([0, *self.query_lens]).cumsum(0, dtype=torch.int32)
        seq_lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        num_reqs, num_tokens = len(seq_lens), int(starts[-1])
        return CommonAttentionMetadata(
            query_start_loc=starts.to(DEVICE),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(DEVICE),
            num_reqs=num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=max(self.query_lens),
            max_seq_len=max(self.seq_lens),
            block_table_tensor=torch.empty(num_reqs, MAX_LEN // block_size, dtype=torch.int32, device=DEVICE),
            slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=DEVICE),
            is_prefilling=torch.tensor(self.query_lens) > 1,
            seq_lens_cpu_upper_bound=seq_lens,
        )

    def rows(self, num_kv_heads: int) -> StepRows:
        """As they come from one projection."""
        sizes = [GROUP * num_kv_heads, num_kv_heads, num_kv_heads]
        fused = torch.empty(sum(self.query_lens), sum(sizes), HEAD_SIZE, dtype=DTYPE, device=DEVICE)
        query, key, value = fused.split(sizes, dim=1)
        return StepRows(query, key, value, None)


def engine_config(folder: Path, num_kv_heads: int) -> VllmConfig:
    """Of an engine whose model has so many KV heads; the folder gets the model, which has no weights."""
    arguments = EngineArgs(
        model=str(make_model(folder, (), MAX_LEN)),
        skip_tokenizer_init=True,
        load_format="dummy",
        hf_overrides={"num_attention_heads": GROUP * num_kv_heads, "num_key_value_heads": num_kv_heads},
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_NUM_REQS,
        max_num_batched_tokens=MAX_NUM_TOKENS,
    )
    return arguments.create_engine_config()
