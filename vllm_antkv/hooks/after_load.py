"""Gives the attention layers their codebooks, rotary tables, sinks and recency companions once the model is loaded.

`WorkerWrapperBase` forwards unknown calls to the worker; here it gets a `load_model` of its own that calls the
worker's and then attaches. Wrapping the worker class instead would be too late in spawned workers.
"""

from typing import Any

from vllm.v1.worker.worker_base import WorkerWrapperBase

from vllm_antkv.hooks.base import Hook, new_plugin_groups
from vllm_antkv.hooks.patches import Patches
from vllm_antkv.hooks.positions import positions_of_step
from vllm_antkv.presets import PRESETS


def _install(patches: Patches) -> None:
    def load_model(self: WorkerWrapperBase, *args: Any, **kwargs: Any) -> None:
        self.worker.load_model(*args, **kwargs)
        if self.vllm_config.cache_config.cache_dtype in PRESETS:
            from vllm_antkv.attention.attach import attach

            has_three = self.vllm_config.model_config.uses_mrope
            of_step = positions_of_step(self.worker.model_runner) if has_three else None  # type: ignore[attr-defined]
            self.antkv_counters = attach(self.worker.get_model(), self.vllm_config, self.worker.device, of_step)  # type: ignore[attr-defined]

    load_model._antkv = True  # type: ignore[attr-defined]
    patches.set(WorkerWrapperBase, "load_model", load_model)


def _missing() -> str | None:
    """A method of that name would be vLLM's own, and do more than ours."""
    there = vars(WorkerWrapperBase).get("load_model")
    return None if there is None or hasattr(there, "_antkv") else "WorkerWrapperBase has a load_model of its own"


HOOK = Hook(
    name="after_load",
    why="plugins are not told when a model has been loaded",
    upstream="https://github.com/vllm-project/vllm/issues/42449",
    install=_install,
    missing=_missing,
    superseded=lambda: bool(new_plugin_groups()),
)
