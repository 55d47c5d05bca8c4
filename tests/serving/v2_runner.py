"""A pytest plugin for test_v2_runner.py: what keeps vLLM from its runner V2 and asynchronous scheduling on a CPU."""

from types import SimpleNamespace

import triton.backends

# vLLM looks for a compiler before it lets runner V2 have kernels. The interpreter needs none.
triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

from vllm.config import VllmConfig  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402

_check = CpuPlatform.check_and_update_config


def _asynchronously(config: VllmConfig) -> None:
    """As vLLM checks a configuration, where it switches it off on CPUs."""
    _check(config)
    assert config.use_v2_model_runner
    config.scheduler_config.async_scheduling = True


CpuPlatform.check_and_update_config = staticmethod(_asynchronously)
# Asynchronous engines call another one.
del EngineCore.step
