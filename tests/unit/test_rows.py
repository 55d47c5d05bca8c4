"""What kernels are handed is what they take it for."""

import pytest
import torch

from vllm_antkv.ops.rows import rows_argument

FUSED = torch.zeros(5, 6, 16)


@pytest.mark.parametrize("rows", [FUSED, FUSED[:, 2:4], FUSED[:, :, :][:, :1], torch.zeros(0, 2, 16)])
def test_rows_of_one_projection_are_taken(rows):
    assert rows_argument(rows).stride == rows.stride(0)


@pytest.mark.parametrize("rows", [FUSED[:, ::2], FUSED[:, :, :8], FUSED.transpose(1, 2), FUSED[:, :, ::2]])
def test_heads_that_do_not_lie_side_by_side_are_refused(rows):
    with pytest.raises(ValueError, match="must be contiguous"):
        rows_argument(rows)
