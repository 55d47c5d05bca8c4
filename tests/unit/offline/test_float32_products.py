"""Where float32 products may be asked of oneDNN, and that they stay exact to float32 there."""

import pytest
import torch

from vllm_antkv.offline.float32_products import faster_products


@pytest.mark.parametrize(
    ("found", "rounded", "asked"),
    [
        ([], True, False),
        (["avx512_bf16"], False, True),
        (["avx512_bf16", "amx_bf16"], False, False),
        (["avx512_bf16", "amx_bf16"], True, True),
    ],
)
def test_asked_for_only_where_nothing_is_rounded_that_may_not_be(found, rounded, asked, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(found, True))
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    with faster_products(rounded):
        assert matmul.fp32_precision == ("bf16" if asked else before)
    assert matmul.fp32_precision == before


def test_products_are_exact_to_float32_on_this_processor():
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(size, 576, generator=generator) for size in (512, 1536))
    exact = rows.double() @ weight.double().T
    with faster_products():
        error = (rows @ weight.T - exact).norm() / exact.norm()
    # Of bfloat16 it would be 2e-3.
    assert error < 1e-6
