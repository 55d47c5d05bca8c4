"""FlashAttention as vLLM ships it, as `ops.varlen_call` describes a kernel for plain rows: prompts go through it."""

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

from vllm_antkv.ops.varlen_call import Varlen, VarlenCall

#: By the version that vLLM prefers, the one that is taken: those whose page tables and log-sum-exp were read.
#: Version 4, of Blackwell, was not, and version 2 runs there too, as in vLLM with ALiBi.
_VERSIONS = {2: 2, 3: 3, 4: 2}
_MAX_HEAD_SIZE = 256
#: Of V, for which version 3 has code where queries and K have 129 to 192 channels, as vLLM's MLA layers call it.
_NARROW_VALUES = 128


def flash_attention(head_size: int, dtype: torch.dtype, max_num_tokens: int) -> Varlen | None:
    """The kernel for layers with such heads; None where there is none.

    Args:
        max_num_tokens: the most new tokens of a step.
    """
    # 16-bit rows, multiples of 8 channels: what both versions have code for.
    fits = dtype in (torch.float16, torch.bfloat16) and head_size % 8 == 0 and head_size <= _MAX_HEAD_SIZE
    if not current_platform.is_cuda() or not fits:
        return None
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, is_fa_version_supported

    version = _VERSIONS.get(get_flash_attn_version(head_size=head_size))
    if version is None or not is_fa_version_supported(version):
        return None

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        call: VarlenCall,
        scale: float,
    ) -> torch.Tensor:
        num_keys, page_table = call.keys or (None, None)
        _, lse = flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            out=output,
            cu_seqlens_q=call.starts,
            max_seqlen_q=call.max_rows,
            cu_seqlens_k=call.starts if call.keys is None else None,
            seqused_k=num_keys,
            max_seqlen_k=call.max_keys,
            softmax_scale=scale,
            causal=call.causal,
            block_table=page_table,
            return_softmax_lse=True,
            # Left to itself it splits keys by what else is in the step, and so rounds otherwise.
            num_splits=1,
            fa_version=version,
        )
        return lse

    return Varlen(attend, max_num_tokens, _MAX_HEAD_SIZE, version == 3 and head_size == _NARROW_VALUES)
