"""The hooks fit this vLLM, are still needed, change nothing twice, and leave other cache dtypes alone."""

import inspect
import os
import subprocess
import sys

import pytest
import torch
import vllm
from vllm.config import VllmConfig
from vllm.config.cache import CacheConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec, get_kv_quant_mode
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.worker.worker_base import WorkerWrapperBase

from tests.serving.conftest import ENGINE_ENVIRONMENT
from vllm_antkv import plugin
from vllm_antkv.attention.backend import AntKVBackend, RecencyBackend
from vllm_antkv.attention.metadata import RecencyMetadataBuilder, VQMetadataBuilder
from vllm_antkv.cache.managers import RecencyManager
from vllm_antkv.cache.specs import RecencySpec
from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.hooks import HOOKS, activation
from vllm_antkv.hooks.dtype import known_dtypes
from vllm_antkv.hooks.recorded_signatures import RECORDED
from vllm_antkv.hooks.signatures import changed_signature
from vllm_antkv.presets import PRESETS
from vllm_antkv.releases import minor_release

OVERRIDES: tuple[tuple[type, type], ...] = (
    (RecencyManager, SingleTypeKVCacheManager),
    (RecencySpec, SlidingWindowSpec),
    (AntKVBackend, AttentionBackend),
    (RecencyBackend, AttentionBackend),
    (VQMetadataBuilder, AttentionMetadataBuilder),
    (RecencyMetadataBuilder, AttentionMetadataBuilder),
)


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


def in_a_process_of_its_own(code: str) -> list[str]:
    """The lines that a program writes; vLLM's own go elsewhere."""
    environment = {**os.environ, **ENGINE_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True, timeout=600)
    return [line for line in done.stdout.splitlines() if line.startswith("> ")]


#: Each breaks one thing of vLLM that no name shows, and says what the warning must tell.
BREAKS = {
    "quantisation mode": (
        "hooks.dtype.get_kv_quant_mode = lambda name: list(KVQuantMode)[-1]",
        "hook dtype does not work with this vLLM (antkv-4bit has the quantisation mode",
    ),
    "refused": (
        "hooks.dtype.cache_module = SimpleNamespace(CacheConfig=lambda cache_dtype: 1 / 0)",
        "hook dtype does not work with this vLLM (ZeroDivisionError",
    ),
    "another manager": (
        "RecencyManager = type('Other', (), {}); hooks.specs.RecencyManager, real = RecencyManager, "
        "hooks.specs.RecencyManager; hooks.specs._manager = lambda spec: real",
        "hook specs does not work with this vLLM (recency pages have another manager)",
    ),
    "another signature": (
        "BlockPool.touch = lambda self, blocks, when: None",
        "BlockPool.touch takes (self, blocks, when), not (self, blocks)",
    ),
    "a function gone": (
        "del EngineCore.preprocess_add_request",
        "EngineCore.preprocess_add_request is not there",
    ),
    "a new member of the parent": (
        "SlidingWindowSpec.num_pinned_tokens = 0",
        "SlidingWindowSpec has num_pinned_tokens, which may decide what is kept of a sequence",
    ),
}
_TOUCHED = """
import logging, sys
from types import SimpleNamespace
from vllm.config import cache
from vllm.config.cache import CacheConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVQuantMode, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, _REGISTRY_KVCACHESPEC_LIST
from vllm.v1.worker.worker_base import WorkerWrapperBase
from vllm_antkv import hooks, plugin

KVCacheSpecRegistry._ensure_registered()
def state():
    owners = (EngineArgs, EngineCore, WorkerWrapperBase, type(current_platform))
    return [*(dict(vars(owner)) for owner in owners), list(AttentionBackendEnum.__members__), sorted(
        name for name in vars(AttentionBackendEnum)), dict(STR_DTYPE_TO_TORCH_DTYPE), dict(_REGISTRY_KVCACHESPEC_LIST),
        hooks.dtype.known_dtypes(), dict(getattr(cache, "_KV_CACHE_DTYPE_HANDLERS", {}))]
class Said(logging.Handler):
    def emit(self, record):
        print(">", record.getMessage())
logging.getLogger("vllm.antkv").addHandler(Said())
"""


@pytest.mark.parametrize("name", BREAKS)
def test_a_vllm_that_behaves_otherwise_is_left_as_it_was(name: str) -> None:
    """The plugin says why it is not active, and not one of its hooks stays."""
    break_it, words = BREAKS[name]
    code = f"""{_TOUCHED}
{break_it}
before = state()
plugin.register()
print("> same", state() == before)
from vllm.config.cache import CacheConfig
try:
    CacheConfig(cache_dtype="antkv-1bit")
except ValueError:
    print("> unknown")
print("> " + CacheConfig(cache_dtype="fp8").cache_dtype)
"""
    said, *after = in_a_process_of_its_own(code)
    assert said.startswith("> vllm-antkv is not active: ")
    assert words in said
    assert after == ["> same True", "> unknown", "> fp8"]


def test_what_is_taken_back_was_there() -> None:
    """The comparison above sees the hooks."""
    code = f"{_TOUCHED}\nbefore = state()\nplugin.register()\n"
    assert in_a_process_of_its_own(code + "print('>', [a == b for a, b in zip(before, state())].count(False))") in (
        ["> 9"],
        ["> 10"],
    )


def test_hooks_that_cannot_be_imported_do_not_end_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """VLLM calls a plugin without a guard: an error in it ends the server, whatever its cache dtype."""
    monkeypatch.setitem(sys.modules, "vllm_antkv.hooks.activation", None)
    plugin.register()
    assert "its hooks cannot be imported" in caplog.text


def test_hooks_are_not_imported_for_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they import of it may have moved."""
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setattr(activation, "activate", pytest.fail)
    plugin.register()


@pytest.mark.parametrize("kind", RECORDED)
def test_signatures_are_as_recorded(kind: str) -> None:
    """Those of the model runners are looked at when one of them is watched."""
    assert changed_signature(kind, minor_release(vllm.__version__)) is None


def test_every_override_takes_what_vllm_passes() -> None:
    """By name as well: vLLM calls most of these with keywords."""
    for ours, parent in OVERRIDES:
        for name in set(vars(ours)) & set(vars(parent)) - {"__doc__", "__module__", "__init__"}:
            if callable(getattr(parent, name)) and name[:2] != "__":
                mine, theirs = (list(inspect.signature(getattr(of, name)).parameters) for of in (ours, parent))
                assert mine == theirs, f"{ours.__name__}.{name}"


def test_cpus_keep_our_block_size_when_vllm_asks_the_backends() -> None:
    """VLLM 0.33 does so once the model is loaded, with the backends of all layers and companions."""
    choose = getattr(current_platform, "_preferred_block_size_for_backends", None)
    assert (choose is None) == (minor_release(vllm.__version__) == "0.32")
    if choose is not None:
        for default in (16, 128):
            assert choose([AntKVBackend, RecencyBackend], default, VllmConfig()) == VQ_BLOCK_SIZE
    assert AntKVBackend.get_preferred_block_size(16) == VQ_BLOCK_SIZE


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
