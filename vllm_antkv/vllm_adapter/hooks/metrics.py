"""Publishes the metrics of an antkv cache at `/metrics` without an opt-in.

vLLM loads no endpoint plugin unless VLLM_PLUGINS names it, because such plugins add routes. Ours stay off then, but
metrics add no route. Where VLLM_PLUGINS is not set, a plugin that only publishes them joins those that vLLM loads.
"""

import functools
from typing import Any

import vllm.plugins
from vllm import envs
from vllm.v1.metrics.stats import SchedulerStats

from vllm_antkv.vllm_adapter.hooks.base import Hook, Patches


def _install(patches: Patches) -> None:
    original = vllm.plugins.load_endpoint_plugins

    @functools.wraps(original)
    def load_endpoint_plugins(supported_tasks: tuple[str, ...] | None = None) -> list[Any]:
        loaded = original(supported_tasks)
        if envs.VLLM_PLUGINS is None and supported_tasks is not None:
            from vllm_antkv.vllm_adapter.server.publisher import AntKVMetrics

            if set(AntKVMetrics.required_tasks) & set(supported_tasks):
                return [*loaded, AntKVMetrics()]
        return loaded

    patches.set(vllm.plugins, "load_endpoint_plugins", load_endpoint_plugins)


HOOK = Hook(
    name="metrics",
    why="plugins that publish metrics of their own need the opt-in of those that add routes",
    upstream="https://github.com/vllm-project/vllm/pull/34161",
    install=_install,
    superseded=lambda: "extras" in SchedulerStats.__dataclass_fields__,
)
