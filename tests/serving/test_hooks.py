"""The hooks fit this vLLM, are still needed, change nothing twice, and leave other cache dtypes alone."""

import pytest
import torch
import vllm
from vllm.config.cache import CacheConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec, get_kv_quant_mode
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.worker.worker_base import WorkerWrapperBase

from vllm_antkv import plugin
from vllm_antkv.cache.managers import RecencyManager
from vllm_antkv.cache.specs import RecencySpec
from vllm_antkv.hooks import HOOKS
from vllm_antkv.hooks.dtype import known_dtypes
from vllm_antkv.presets import PRESETS


@pytest.fixture(autouse=True)
def registered() -> None:
    plugin.register()


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_hook_fits_this_vllm(hook) -> None:
    assert hook.applies() is None
    assert hook.upstream.startswith("https://github.com/vllm-project/vllm/")


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_hook_is_still_needed(hook) -> None:
    """Fails once vLLM offers what the hook adds: then use that, and delete the hook."""
    assert not hook.superseded()


def test_another_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    plugin.register()
    assert "not active" in caplog.text
    assert "0.34.0" in caplog.text


def test_registering_twice_changes_nothing() -> None:
    before = (
        known_dtypes(),
        type(current_platform).get_attn_backend_cls.__func__,
        EngineArgs.create_engine_config,
        vars(WorkerWrapperBase)["load_model"],
    )
    plugin.register()
    after = (
        known_dtypes(),
        type(current_platform).get_attn_backend_cls.__func__,
        EngineArgs.create_engine_config,
        vars(WorkerWrapperBase)["load_model"],
    )
    assert before == after
    assert len(set(before[0])) == len(before[0])


def test_presets_are_cache_dtypes_and_a_typo_is_not() -> None:
    for preset in PRESETS:
        assert CacheConfig(cache_dtype=preset).cache_dtype == preset
    with pytest.raises(ValueError, match="antkv-1bit"):
        CacheConfig(cache_dtype="antkv-1bits")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert parser.parse_args(["--kv-cache-dtype", "antkv-0.375bit"]).kv_cache_dtype == "antkv-0.375bit"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_mean_nothing_to_vllms_own_kernels(preset: str) -> None:
    """KVQuantMode.CUSTOM is what vLLM recommends, and in 0.33.0 it is another name of OCTAVE_K3V4."""
    assert get_kv_quant_mode(preset) is KVQuantMode.NONE
    assert STR_DTYPE_TO_TORCH_DTYPE[preset] is torch.uint8


def test_specs_keep_their_managers() -> None:
    assert KVCacheSpecRegistry._ensure_registered() is None
    managers = {
        spec: KVCacheSpecRegistry.get_manager_class(spec.__new__(spec))
        for spec in (FullAttentionSpec, SlidingWindowSpec, RecencySpec)
    }
    assert managers[RecencySpec] is RecencyManager
    assert len(set(managers.values())) == 3


def test_backend_is_chosen_for_the_presets_alone() -> None:
    assert AttentionBackendEnum["ANTKV"].get_class().get_name() == "ANTKV"
    choose = current_platform.get_attn_backend_cls
    selector = _selector("antkv-1bit")
    assert choose(None, attn_selector_config=selector).endswith("AntKVBackend")
    assert not choose(None, attn_selector_config=_selector("auto")).endswith("AntKVBackend")


def _selector(kv_cache_dtype: str):
    from vllm.v1.attention.selector import AttentionSelectorConfig

    return AttentionSelectorConfig(
        head_size=64,
        dtype=torch.bfloat16,
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        block_size=None,
    )
