"""The hooks fit this vLLM, are still needed, change nothing twice, and leave other cache dtypes alone."""

import inspect
import os
import sys
from typing import Any

import pytest
import torch
import vllm
from vllm.config import VllmConfig
from vllm.config.cache import CacheConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.processes import run_python
from tests.serving.conftest import ENGINE_ENVIRONMENT
from vllm_antkv import plugin
from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.presets import PRESETS
from vllm_antkv.releases import minor_release
from vllm_antkv.vllm_adapter.hooks import HOOKS
from vllm_antkv.vllm_adapter.hooks.base import RECORDED, changed_signature
from vllm_antkv.vllm_adapter.hooks.dtype import known_dtypes
from vllm_antkv.vllm_adapter.step.backend import AntKVBackend, RecencyBackend


@pytest.fixture(autouse=True)
def registered() -> None:
    plugin.register()


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_a_hook_fits_this_vllm_and_is_still_needed(hook):
    """Fails once vLLM offers what the hook adds: then use that, and delete the hook."""
    assert hook.applies() is None
    assert not hook.superseded()
    assert hook.upstream.startswith("https://github.com/vllm-project/vllm/")


def test_vllm_still_looks_for_the_page_of_a_layer_that_reads_another_ones():
    """Fails once it does not: then `AntKVWorker.initialize_from_config` goes."""
    assert "shared_kv_cache_layers" not in inspect.getsource(GPUModelRunner.initialize_attn_backend)


def test_another_vllm_is_left_alone(monkeypatch, said):
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    # What hooks import of it may have moved.
    monkeypatch.setitem(sys.modules, "vllm_antkv.vllm_adapter.hooks.activation", None)
    plugin.register()
    (line,) = said
    assert "not active" in line
    assert "0.34.0" in line


def test_registering_twice_changes_nothing():
    def installed() -> tuple[Any, ...]:
        backend = type(current_platform).get_attn_backend_cls.__func__
        return known_dtypes(), backend, EngineArgs.create_engine_config

    before = installed()
    plugin.register()
    assert before == installed()
    assert len(set(before[0])) == len(before[0])


def test_presets_are_cache_dtypes_and_a_typo_is_not():
    for preset in PRESETS:
        assert CacheConfig(cache_dtype=preset).cache_dtype == preset
    with pytest.raises(ValueError, match="antkv-1bit"):
        CacheConfig(cache_dtype="antkv-1bits")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert parser.parse_args(["--kv-cache-dtype", "antkv-0.375bit"]).kv_cache_dtype == "antkv-0.375bit"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_mean_nothing_to_vllms_own_kernels(preset):
    """KVQuantMode.CUSTOM is what vLLM recommends, and in 0.33.0 it is another name of OCTAVE_K3V4."""
    assert get_kv_quant_mode(preset) is KVQuantMode.NONE
    assert STR_DTYPE_TO_TORCH_DTYPE[preset] is torch.uint8


#: Each changes one thing of vLLM that no name shows, in `monkeypatch`, and says what the warning must tell.
BREAKS = {
    "m.setattr(hooks.dtype, 'get_kv_quant_mode', lambda kv_cache_dtype: list(KVQuantMode)[-1])": (
        "its hook dtype does not work with this vLLM (antkv-4bit has the quantisation mode"
    ),
    "m.setattr(hooks.dtype, 'cache_module', SimpleNamespace(CacheConfig=lambda cache_dtype: 1 / 0))": (
        "its hook dtype does not work with this vLLM (ZeroDivisionError"
    ),
    "m.setattr(KVCacheSpecRegistry, 'get_manager_class', lambda kvcache_spec, role=None: BlockPool)": (
        "its hook specs does not work with this vLLM (recency pages have another manager"
    ),
    "m.setattr(BlockPool, 'touch', lambda self, blocks, when: None)": (
        "BlockPool.touch takes (self, blocks, when), not (self, blocks)"
    ),
    "m.delattr(EngineCore, 'collective_rpc')": "EngineCore.collective_rpc is not there",
    "m.setattr(SlidingWindowSpec, 'num_pinned_tokens', 0, raising=False)": (
        "SlidingWindowSpec has num_pinned_tokens, which may decide what is kept of a sequence"
    ),
}
#: Run where the plugin has not been installed; what it prints is compared. `state` is all that a hook may touch.
BREAKING = f"""
import logging
from types import SimpleNamespace
import pytest
from vllm.config import cache
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVQuantMode, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST, KVCacheSpecRegistry
from vllm_antkv import plugin
from vllm_antkv.vllm_adapter import hooks

def state():
    owners = (EngineArgs, EngineCore, type(current_platform), AttentionBackendEnum)
    dtypes = hooks.dtype.known_dtypes(), getattr(cache, "_KV_CACHE_DTYPE_HANDLERS", {{}}), STR_DTYPE_TO_TORCH_DTYPE
    copies = [dict(vars(owner)) for owner in owners]
    return [*copies, list(AttentionBackendEnum), dtypes[0], *map(dict, dtypes[1:]), dict(_REGISTRY_KVCACHESPEC_LIST)]

class Said(logging.Handler):
    def emit(self, record):
        print(">", record.getMessage())

logging.getLogger("vllm.antkv").addHandler(Said())
KVCacheSpecRegistry._ensure_registered()
for break_it in {list(BREAKS)}:
    with pytest.MonkeyPatch.context() as m:
        exec(break_it)
        before = state()
        plugin.register()
        print("> as it was:", state() == before)
    try:
        cache.CacheConfig(cache_dtype="antkv-1bit")
    except ValueError:
        print("> unknown, and", cache.CacheConfig(cache_dtype="fp8").cache_dtype)
before = state()
plugin.register()
print("> changed:", sum(map(lambda a, b: a != b, before, state())) > 6)
print(">", cache.CacheConfig(cache_dtype="antkv-1bit").cache_dtype)
"""


@pytest.mark.long
def test_a_vllm_that_behaves_otherwise_is_left_as_it_was():
    """The plugin says why it is not active, and not one of its hooks stays; repaired, the same vLLM takes them."""
    environment = {**os.environ, **ENGINE_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}
    lines = run_python("-c", BREAKING, environment=environment).splitlines()
    said = [line for line in lines if line.startswith("> ")]
    for words in BREAKS.values():
        warning, same, dtypes, *said = said
        assert warning.startswith("> vllm-antkv is not active: ")
        assert words in warning
        assert (same, dtypes) == ("> as it was: True", "> unknown, and fp8")
    assert said == ["> changed: True", "> antkv-1bit"]


def test_hooks_that_cannot_be_imported_do_not_end_vllm(monkeypatch, said):
    """VLLM calls a plugin without a guard: an error in it ends the server, whatever its cache dtype."""
    monkeypatch.setitem(sys.modules, "vllm_antkv.vllm_adapter.hooks.activation", None)
    plugin.register()
    (line,) = said
    assert "its hooks cannot be imported" in line


@pytest.mark.parametrize("kind", RECORDED)
def test_signatures_are_as_recorded(kind):
    assert changed_signature(kind, minor_release(vllm.__version__)) is None


def test_cpus_keep_our_block_size_when_vllm_asks_the_backends():
    """VLLM 0.33 does so on CPUs, once the model is loaded, with the backends of all layers and companions."""
    for default in (16, 128):
        chosen = current_platform._preferred_block_size_for_backends(
            [AntKVBackend, RecencyBackend], default, VllmConfig()
        )
        assert chosen == VQ_BLOCK_SIZE
    assert AntKVBackend.get_preferred_block_size(16) == VQ_BLOCK_SIZE


def test_backend_is_chosen_for_the_presets_alone():
    assert AttentionBackendEnum["ANTKV"].get_class().get_name() == "ANTKV"
    for kv_cache_dtype, is_ours in (("antkv-1bit", True), ("auto", False)):
        selector = AttentionSelectorConfig(64, torch.bfloat16, kv_cache_dtype, block_size=None)
        chosen = current_platform.get_attn_backend_cls(None, attn_selector_config=selector)
        assert chosen.endswith("AntKVBackend") == is_ours
