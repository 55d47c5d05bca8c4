"""VLLM's scheduler with antkv pages beside states under random schedules, with no model and no worker.

The tokens that a model would give are a function of their positions.
"""

import random
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.places import EMBEDDED
from vllm_antkv.cache.pages import page_layouts
from vllm_antkv.cache.pool_blocks import BlockPlan
from vllm_antkv.vllm_adapter.block_pool.managers import add_request
from vllm_antkv.vllm_adapter.block_pool.specs import recency_spec, vq_spec
from vllm_antkv.vllm_adapter.hooks.groups import kv_cache_planning
from vllm_antkv.vllm_adapter.plan.engine_plan import engine_plan

_MAX_STEPS = 6000
#: Layers with a state, beside those with pages.
NUM_STATES = 3


@dataclass(frozen=True)
class Case:
    """A pool and requests drawn from a seed.

    num_blocks: of the pool; small ones preempt.
    chunk: most tokens of a step: prompts are cut by it.
    num_pages: VQ pages of each layer in a block.
    """

    num_blocks: int
    num_pages: int
    chunk: int = 320
    num_requests: int = 12

    @property
    def plan(self) -> BlockPlan:
        """Its blocks hold a state of 256 bytes for each KV head."""
        return BlockPlan(self.num_pages, 256)


CASES = (Case(num_blocks=90, num_pages=1), Case(num_blocks=60, num_pages=2))


def run(case: Case, seed: int, is_async: bool) -> tuple[int, int]:
    """Tokens that were hit, and preemptions."""
    scheduler, _ = scheduler_of(case, is_async)
    requests = deque(new_requests(case, seed, scheduler))
    in_flight: deque[Any] = deque()
    tokens_of_states: dict[int, int] = {}
    num_hit = num_preempted = 0
    for step in range(_MAX_STEPS):
        while requests and requests[0][0] <= step:
            request = requests.popleft()[1]
            scheduler.add_request(request)
            add_request(scheduler.kv_cache_manager, request)
        output = scheduler.schedule()
        num_hit += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        num_preempted += len(output.preempted_req_ids or ())
        _check_states(scheduler, output, tokens_of_states, case.plan.num_tokens)
        if output.total_num_scheduled_tokens:
            in_flight.append((output, sampled(scheduler, output)))
        while in_flight and (len(in_flight) > is_async or not output.total_num_scheduled_tokens):
            scheduler.update_from_output(*in_flight.popleft())
        if not (requests or in_flight or scheduler.has_unfinished_requests()):
            break
    pool = scheduler.kv_cache_manager.block_pool
    assert not scheduler.has_unfinished_requests(), "no progress"
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "all but the null block are free in the end"
    return num_hit, num_preempted


def _check_states(scheduler: Any, output: Any, tokens_of_states: dict[int, int], block_size: int) -> None:
    """What is published as the state of a block's last token is that.

    tokens_of_states: by block, after how many tokens its state is; a step writes that after its last one.
    """
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    for manager in (each for each in managers if isinstance(each, MambaManager)):
        for request in output.num_scheduled_tokens:
            blocks, computed = manager.req_to_blocks[request], scheduler.requests[request].num_computed_tokens
            tokens_of_states[blocks[(computed - 1) // block_size].block_id] = computed
        for blocks in manager.req_to_blocks.values():
            for index, block in enumerate(blocks):
                if not block.is_null and block.block_hash is not None:
                    assert tokens_of_states[block.block_id] == (index + 1) * block_size, "a wrong state is shared"


def scheduler_of(case: Case, is_async: bool) -> tuple[Any, list[str]]:
    """And the kinds of specs that its groups of layers have."""
    config = EngineArgs(
        model=str(EMBEDDED),
        kv_cache_dtype="antkv-1bit",
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=6,
        max_num_batched_tokens=case.chunk,
        prefix_cache_retention_interval=0,
        enable_prefix_caching=True,
        async_scheduling=is_async,
        skip_tokenizer_init=True,
    ).create_engine_config()
    plan = engine_plan(config)
    settings, model = plan.settings, config.model_config
    layouts = page_layouts(settings, plan.presets, model.get_head_size(), model.dtype, plan=case.plan)
    specs: dict[str, Any] = {}
    for layer, layout in enumerate(layouts):
        specs[f"layers.{layer}"] = vq_spec(layout, 2)
        specs[f"layers.{layer}.antkv_recent"] = recency_spec(layout, 2, settings, config)
    config.cache_config.mamba_cache_mode = "align"
    state = MambaSpec(case.plan.num_tokens, shapes=((4, 64),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
    specs |= {f"layers.{len(layouts) + index}.conv": state for index in range(NUM_STATES)}
    record_kv_cache_layout(config.cache_config, "BLHNC")
    planning = kv_cache_planning()
    groups = planning.get_kv_cache_groups(config, specs)
    block_bytes = planning._pool_bytes_per_block(config, groups)
    memory = planning.get_kv_cache_config_from_groups(config, groups, case.num_blocks * block_bytes)
    pool = kv_cache_utils.generate_scheduler_kv_cache_config([memory])
    config.cache_config.num_gpu_blocks = pool.num_blocks
    config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in pool.kv_cache_groups)
    block_size, hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(pool, config)
    alignment = kv_cache_utils.resolve_cache_hit_alignment_tokens(pool, config, block_size, hash_block_size)
    pool = replace(pool, hash_block_size=hash_block_size, cache_hit_alignment_tokens=alignment)
    kind = AsyncScheduler if is_async else Scheduler
    manager = StructuredOutputManager(config)
    scheduler = kind(config, pool, manager, block_size=block_size, hash_block_size=hash_block_size)
    return scheduler, [type(group.kv_cache_spec).__name__ for group in groups]


def new_requests(case: Case, seed: int, scheduler: Any) -> list[tuple[int, Request]]:
    """Prompts that share beginnings, with the step in which each arrives."""
    hash_function = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(hash_function)
    hasher = kv_cache_utils.get_request_block_hasher(scheduler.hash_block_size, hash_function)
    draw = random.Random(seed)
    shared = [draw.randrange(300) for _ in range(700)]
    found, step = [], 0
    for index in range(case.num_requests):
        tail = [draw.randrange(300) for _ in range(draw.randrange(1, 600))]
        prompt = shared[: draw.choice([0, 100, 128, 384, 512, 640])] + tail
        params = SamplingParams(max_tokens=draw.choice([1, 20, 150, 300]), ignore_eos=True, temperature=0)
        request = Request(f"r{index}", prompt, params, None, arrival_time=float(index), block_hasher=hasher)
        found.append((step, request))
        step += draw.randrange(0, 4)
    return found


def sampled(scheduler: Any, output: Any) -> ModelRunnerOutput:
    """A token for each request whose prompt is done with the step."""
    ids = list(output.num_scheduled_tokens)
    tokens = []
    for each in ids:
        # The scheduler has counted the step's tokens already.
        computed = scheduler.requests[each].num_computed_tokens
        is_done = computed >= scheduler.requests[each].num_prompt_tokens
        tokens.append([computed * 7 % 300] if is_done else [])
    return ModelRunnerOutput(ids, {each: index for index, each in enumerate(ids)}, tokens)
