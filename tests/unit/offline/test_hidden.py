"""The loss of a window, against transformers' own."""

import pytest
import torch
from transformers import PreTrainedModel

from vllm_antkv.offline.hidden import loss_of


def test_the_loss_is_the_sum_over_all_tokens_but_the_first(model: PreTrainedModel) -> None:
    window = torch.arange(3, 63)
    mean = model(window[None], labels=window[None]).loss
    assert loss_of(model, window).item() == pytest.approx(59 * mean.item(), rel=1e-5)
