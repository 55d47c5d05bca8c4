"""Gives the attention layers their codebooks, rotary tables, sinks and recency companions once the model is loaded.

`WorkerWrapperBase` forwards unknown calls to the worker; here it gets a `load_model` of its own that calls the
worker's and then attaches. Wrapping the worker class instead would be too late in spawned workers.
"""

from typing import Any

from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

from vllm_antkv.hooks.base import Hook, missing_attributes, new_plugin_groups
from vllm_antkv.presets import PRESETS


def _install() -> None:
    if "load_model" in vars(WorkerWrapperBase):
        return

    def load_model(self: WorkerWrapperBase, *args: Any, **kwargs: Any) -> None:
        self.worker.load_model(*args, **kwargs)
        if self.vllm_config.cache_config.cache_dtype in PRESETS:
            from vllm_antkv.attention.attach import attach

            self.antkv_counters = attach(self.worker.get_model(), self.vllm_config, self.worker.device)  # type: ignore[attr-defined]

    WorkerWrapperBase.load_model = load_model  # type: ignore[attr-defined]


HOOK = Hook(
    name="after_load",
    why="plugins are not told when a model has been loaded",
    upstream="https://github.com/vllm-project/vllm/issues/42449",
    install=_install,
    missing=lambda: (
        missing_attributes(WorkerWrapperBase, "init_worker", "__getattr__")
        or missing_attributes(WorkerBase, "load_model", "get_model")
    ),
    superseded=lambda: bool(new_plugin_groups()),
)
