"""Lets vLLM's kernel for CPUs rotate rows that have a dimension for heads (LFM2), with any cache dtype.

The kernel takes the stride of heads for that of tokens, and rotates them by other tokens' positions, without an error.
"""

from functools import wraps

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

from vllm_antkv.vllm_adapter.hooks.base import Hook, Patches


def _install(patches: Patches) -> None:
    original = RotaryEmbedding.forward_cpu

    @wraps(original)
    def forward_cpu(
        self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if query.dim() < positions.dim() + 2 or key is None:
            return original(self, positions, query, key)
        rotated = original(self, positions, query.flatten(-2), key.flatten(-2))
        return rotated[0].view_as(query), rotated[1].view_as(key)

    patches.set(RotaryEmbedding, "forward_cpu", forward_cpu)


def _kernel_is_right() -> bool:
    if not current_platform.is_cpu():
        return False
    from vllm import _custom_ops as ops

    rows, angles = torch.ones(2, 2, 32), torch.arange(32.0).view(2, 16)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    by_heads, flat = (rows.clone(), rows.clone()), (rows.flatten(1), rows.flatten(1).clone())
    for query, key in (by_heads, flat):
        ops.rotary_embedding(torch.arange(2), query, key, 32, table, True)
    return torch.equal(by_heads[1].flatten(1), flat[1])


HOOK = Hook(
    name="rope_cpu",
    why="vLLM's kernel for CPUs rotates rows with a dimension for heads by other tokens' positions",
    upstream="https://github.com/vllm-project/vllm/pull/12777",
    install=_install,
    superseded=_kernel_is_right,
)
