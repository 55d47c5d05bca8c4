"""vLLM's worker with what an antkv cache needs of it, in overrides of methods that every executor calls.

`config` names the class in `parallel_config.worker_cls`, and every worker process looks it up: imported there alone.
vLLM's worker for CPUs derives from that for GPUs, and either has both model runners.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec, UniformTypeKVCacheSpecs

from vllm_antkv.ops.counters import Report
from vllm_antkv.vllm_adapter.kv_transfer.store import AntKVStore
from vllm_antkv.vllm_adapter.load.attach import attach
from vllm_antkv.vllm_adapter.step.inspection import Inspector
from vllm_antkv.vllm_adapter.step.layer import positions_of_step
from vllm_antkv.vllm_adapter.step.missing_rows import Marks
from vllm_antkv.vllm_adapter.step.pages import let_pages_go, take_pages

if current_platform.is_cpu() and not TYPE_CHECKING:
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


def _of_one_size(group: KVCacheGroupSpec) -> KVCacheGroupSpec:
    """A group of states as vLLM has it where they are all that there is; any other group as it is."""
    spec = group.kv_cache_spec
    is_of_states = isinstance(spec, UniformTypeKVCacheSpecs) and isinstance(spec.first_spec, MambaSpec)
    return replace(group, kv_cache_spec=spec.first_spec) if is_of_states else group


def _connectors() -> list[Any]:
    """This worker's KV connectors."""
    if not has_kv_transfer_group():
        return []
    connector = get_kv_transfer_group()
    return getattr(connector, "sub_connectors", [connector])


class AntKVWorker(Worker):
    """A worker whose attention layers have codes."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model, and give its attention layers codebooks, rotary tables, sinks and recency companions."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        of_step = positions_of_step(self.model_runner) if self.model_config.uses_mrope else None
        step = np.array([self.scheduler_config.max_num_batched_tokens])
        # The layers of LoRA are told which adapter each token has before they run: here none.
        with self.model_runner.maybe_select_dummy_loras(self.lora_config, step, num_active_loras=0):
            counters = attach(self.get_model(), self.vllm_config, self.device, of_step)
        self._inspector = Inspector(self.vllm_config, counters)
        self._missing_rows = counters.missing_rows

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache, and warm the kernels up.

        vLLM puts a layer that reads the cache of another into the group of that one. In a group of pages of several
        sizes, as ours always are, it then looks for the page of the layer itself: here it is told which one that is.

        And it looks for states, to know which kernels of Mamba it needs, in groups of pages of one size alone.
        """
        let_pages_go(self.compilation_config.static_forward_context)
        groups = [_of_one_size(group) for group in kv_cache_config.kv_cache_groups]
        kv_cache_config = replace(kv_cache_config, kv_cache_groups=groups)
        self._layers = [group.layer_names for group in groups]
        for name, layer in self.compilation_config.static_forward_context.items():
            target = layer.kv_sharing_target_layer_name if isinstance(layer, Attention) else None
            for group in groups:
                spec = group.kv_cache_spec
                if isinstance(spec, UniformTypeKVCacheSpecs) and target in spec.kv_cache_specs:
                    spec.kv_cache_specs[name] = spec.kv_cache_specs[target]
        super().initialize_from_config(kv_cache_config)
        take_pages(self.compilation_config.static_forward_context)
        for connector in _connectors():
            if isinstance(connector, AntKVStore):
                connector.watch(self._missing_rows)
        if current_platform.is_cpu():
            self._zero_exact_pages()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Compute a step."""
        self._missing_rows.zero_()
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Sample the step's tokens; say which requests lack rows."""
        marks = Marks(self._missing_rows)
        return marks.added_to(super().sample_tokens(grammar_output))

    def _zero_exact_pages(self) -> None:
        from vllm_antkv.vllm_adapter.step.packed_cpu import PackedCPUBackend, zeroing

        layers = self.compilation_config.static_forward_context.values()
        exact = [layer for layer in layers if getattr(layer, "attn_backend", None) is PackedCPUBackend]
        if exact:
            self.model_runner._zero_block_ids = zeroing(exact, self.model_runner._zero_block_ids)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load other weights; what KV connectors have was computed with those before."""
        for connector in _connectors():
            connector.stop()
        super().reload_weights(*args, **kwargs)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Take other weights; see `reload_weights`."""
        for connector in _connectors():
            connector.stop()
        super().update_weights(update_info)

    def antkv_report(self) -> Report:
        """What the layers counted; see `Inspector.report`."""
        return self._inspector.report()

    def antkv_anchor_offsets(self, block_ids: dict[int, list[int]]) -> list[list[list[list[list[int]]]]]:
        """Where anchors are; see `Inspector.anchor_offsets`. block_ids: by group of layers."""
        names = {group: self._layers[group] for group in block_ids}
        return self._inspector.anchor_offsets({name: block_ids[group] for group in names for name in names[group]})
