"""What lies in a block of the pool, planned when the server starts."""

from collections.abc import Sequence
from dataclasses import replace

from vllm.config import VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_antkv.cache.blocks import States, plan_blocks
from vllm_antkv.cache.pages import PageLayout, page_layouts
from vllm_antkv.cache.pool_blocks import BlockPlan
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.layer_windows import num_state_layers, states_per_request
from vllm_antkv.presets import Preset


def make_blocks(
    vllm_config: VllmConfig,
    settings: AntKVConfig,
    presets: Sequence[Preset],
    exact_windows: Sequence[int | None],
    states: States | None,
) -> BlockPlan:
    """Plan the blocks of a model.

    Args:
        vllm_config: of the server.
        settings: the antkv settings.
        presets: of the layers that have codes.
        exact_windows: windows of the layers that stay exact; None: a layer without one.
        states: of the model's other layers.
    """
    model_config = vllm_config.model_config

    def whole(blocks: BlockPlan) -> BlockPlan:
        return replace(
            blocks,
            num_exact=exact_windows.count(None),
            score_slots=1 + vllm_config.num_speculative_tokens,
            draft_bytes=_draft_bytes(vllm_config),
        )

    def layouts_of(blocks: BlockPlan) -> list[PageLayout]:
        return page_layouts(settings, presets, model_config.get_head_size(), model_config.dtype, plan=whole(blocks))

    return whole(plan_blocks(layouts_of, settings, states, model_config.max_model_len))


def _draft_bytes(vllm_config: VllmConfig) -> int:
    """See `BlockPlan`."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return 0
    draft, parallel_config = speculative.draft_model_config, speculative.draft_parallel_config
    num_rows = 2 * draft.get_num_layers(parallel_config) * draft.get_num_kv_heads(parallel_config) * VQ_BLOCK_SIZE
    num_bytes: int = num_rows * draft.get_head_size() * vllm_config.model_config.dtype.itemsize
    return num_bytes // vllm_config.model_config.get_num_kv_heads(vllm_config.parallel_config)


def set_block_size(vllm_config: VllmConfig, blocks: BlockPlan) -> None:
    """Tell vLLM how many tokens a block has, of codes and, where prefixes are cached, of states."""
    cache_config = vllm_config.cache_config
    cache_config.block_size = blocks.num_tokens
    if cache_config.mamba_cache_mode == "align":
        cache_config.mamba_block_size = blocks.num_tokens


def states_of(vllm_config: VllmConfig) -> States | None:
    """The states that a worker of the model keeps; None: all layers attend, and no more."""
    model_config, parallel_config = vllm_config.model_config, vllm_config.parallel_config
    if not model_config.is_hybrid:
        return None
    text_config = model_config.hf_text_config
    model_class, _ = ModelRegistry.resolve_model_cls(model_config.architecture, model_config=model_config)
    spec = MambaSpec(
        shapes=model_class.get_mamba_state_shape_from_config(vllm_config),
        dtypes=model_class.get_mamba_state_dtype_from_config(vllm_config),
        block_size=-1,
    )
    return States(
        num_layers=num_state_layers(text_config),
        num_bytes=-(-spec.page_size_bytes // model_config.get_num_kv_heads(parallel_config)),
        per_request=states_per_request(text_config) if vllm_config.cache_config.mamba_cache_mode == "align" else 1,
    )
