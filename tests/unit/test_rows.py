"""What kernels are handed is what they take it for."""

from itertools import product

import pytest
import torch

from vllm_antkv.ops.rows import StepRows, rows_argument

FUSED = torch.zeros(5, 6, 16)


@pytest.mark.parametrize("rows", [FUSED, FUSED[:, 2:4], FUSED[:, :, :][:, :1], torch.zeros(0, 2, 16)])
def test_rows_of_one_projection_are_taken(rows):
    assert rows_argument(rows).stride == rows.stride(0)


@pytest.mark.parametrize("rows", [FUSED[:, ::2], FUSED[:, :, :8], FUSED.transpose(1, 2), FUSED[:, :, ::2]])
def test_heads_that_do_not_lie_side_by_side_are_refused(rows):
    with pytest.raises(ValueError, match="must be contiguous"):
        rows_argument(rows)


def test_short_cuts_hand_triton_what_it_would_find():
    """Rows that Triton may compile for anew have another key."""
    launch = pytest.importorskip("vllm_antkv.triton_kernels.launch")
    keys: dict[object, object] = {}
    memory = torch.zeros(1 << 14, dtype=torch.uint8)
    for dtype, first, stride in product((torch.float16, torch.bfloat16), range(3), (48, 56, 57)):
        fused = memory[2 * first :].view(dtype)[: 10 * stride].view(10, stride)[:, :48]
        handed = StepRows(*fused.unflatten(1, (6, 8)).split([4, 1, 1], dim=1), None).handed
        found = launch.Fixed(handed.argument)
        assert handed.values == found.values
        assert keys.setdefault(handed.key, found.key) is found.key
    assert len(set(keys.values())) > 6
