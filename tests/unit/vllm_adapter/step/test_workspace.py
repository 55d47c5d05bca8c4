"""The scratch memory of layers is vLLM's, and the views of it are made once."""

import pytest
import torch
from vllm.v1.worker.workspace import init_workspace_manager, lock_workspace, reset_workspace_manager

from vllm_antkv.vllm_adapter.step.workspace import Workspace

SMALL, LARGE = ((4,), torch.float32), ((2, 300), torch.float16)


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    # There is no accelerator whose cache could be emptied.
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    init_workspace_manager(torch.device("cpu"))
    yield
    reset_workspace_manager()


def test_layers_share_memory_that_grows_until_it_is_locked():
    layer, other = Workspace(), Workspace()
    (small,) = layer(SMALL)
    (large,) = other(LARGE)
    assert (large.shape, large.dtype) == LARGE
    assert layer(SMALL)[0].data_ptr() == large.data_ptr() != small.data_ptr()
    lock_workspace()
    assert layer(SMALL)[0].data_ptr() == other(LARGE)[0].data_ptr() == large.data_ptr()
    with pytest.raises(AssertionError, match="locked"):
        layer(((9999,), torch.float32))


def test_what_was_given_since_is_given_again_but_not_all_that_ever_was():
    layer = Workspace()
    first, second = layer(LARGE, SMALL)
    lock_workspace()
    assert layer(LARGE, SMALL) is layer(LARGE, SMALL)
    assert [each.data_ptr() for each in layer(LARGE, SMALL)] == [first.data_ptr(), second.data_ptr()]
    for size in range(1, 100):
        assert layer(((size,), torch.float32))[0].shape == (size,)
    assert len(layer._given) < 10
