"""Tells the layers which tokens of a step belong to the codebook's trained prefix.

Attention metadata says how many tokens of which length a step has, not of which prompts; only the model runner knows
that. It is asked once the requests of a step are in order and before a CUDA graph is chosen: K and V in a captured
graph are the model's, so that a step with a token of the prefix must not replay one. Only steps in which every request
has one token would: a prompt of BOS alone, or one that was cut so.

Nothing is touched where the codebook has no trained prefix.
"""

import functools
from typing import Any

import numpy as np
from vllm.v1.worker.worker_base import WorkerWrapperBase

from vllm_antkv.codebook.prefix import starts_with
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.hooks.base import Hook, missing_attributes, new_plugin_groups
from vllm_antkv.hooks.patches import Patches
from vllm_antkv.hooks.signatures import changed_signature
from vllm_antkv.presets import PRESETS


def _install(patches: Patches) -> None:
    original = WorkerWrapperBase.initialize_from_config

    @functools.wraps(original)
    def initialize_from_config(self: WorkerWrapperBase, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.vllm_config.cache_config.cache_dtype in PRESETS:
            from vllm_antkv.attention.trained_prefix import get_prefix_tokens

            tokens = get_prefix_tokens(self.vllm_config.compilation_config.static_forward_context)
            if tokens is not None:
                watch(self.worker.model_runner, tokens)  # type: ignore[attr-defined]

    patches.set(WorkerWrapperBase, "initialize_from_config", initialize_from_config)


def watch(runner: Any, tokens: Any) -> None:
    """Let a model runner of either version choose `tokens`, a `PrefixTokens`, in every step.

    Raises:
        UnsupportedModelError: neither version's methods are there, or they take other arguments than they did.
    """
    reason: str | None = "it has the methods of neither version"
    if not missing_attributes(runner, "add_requests", "gather_batch_req_state", "req_states"):
        watch_it, reason = _watch_v2, changed_signature("model runner V2", release=None)
    elif not missing_attributes(runner, "_determine_batch_execution_and_padding", "input_batch", "requests"):
        watch_it, reason = _watch_v1, changed_signature("model runner V1", release=None)
    if reason is not None:
        raise UnsupportedModelError(
            f"The trained prefix of this codebook cannot be served by vLLM's {type(runner).__name__} ({reason}): run "
            "`antkv calibrate` without --train-prefix."
        )
    watch_it(runner, tokens)


def _watch_v1(runner: Any, tokens: Any) -> None:
    original = runner._determine_batch_execution_and_padding

    @functools.wraps(original)
    def determine_batch_execution_and_padding(
        *args: Any, num_scheduled_tokens_np: np.ndarray, force_eager: bool = False, **kwargs: Any
    ) -> Any:
        batch = runner.input_batch
        # A dummy step may have other requests than the batch.
        num_reqs = min(len(num_scheduled_tokens_np), batch.num_reqs)
        num_computed = batch.num_computed_tokens_cpu[:num_reqs]
        has_prefix = num_computed < len(tokens.token_ids)
        for index in np.flatnonzero(has_prefix):
            has_prefix[index] = _starts(runner.requests[batch.req_ids[index]], tokens)
        chosen = tokens.choose(has_prefix, num_computed, num_scheduled_tokens_np[:num_reqs])
        return original(
            *args, num_scheduled_tokens_np=num_scheduled_tokens_np, force_eager=force_eager or chosen, **kwargs
        )

    runner._determine_batch_execution_and_padding = determine_batch_execution_and_padding


def _watch_v2(runner: Any, tokens: Any) -> None:
    add_requests, gather = runner.add_requests, runner.gather_batch_req_state
    has_prefix = np.zeros(runner.req_states.max_num_reqs, dtype=bool)

    @functools.wraps(add_requests)
    def add_requests_and_look(scheduler_output: Any) -> None:
        add_requests(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            has_prefix[runner.req_states.req_id_to_index[request.req_id]] = _starts(request, tokens)

    @functools.wraps(gather)
    def gather_batch_req_state(scheduler_output: Any, dummy_run: bool) -> Any:
        state, uniform_token_count = gather(scheduler_output, dummy_run)
        if state is None:
            tokens.clear()
        # Positions of the prefix are positions of the prompt, so that what is computed of it is what counts.
        elif tokens.choose(
            has_prefix[state.idx_mapping_np], state.num_computed_prefill_tokens_np, state.num_scheduled_tokens
        ):
            state, uniform_token_count = state._replace(decode_graph_eligible=False), None
        return state, uniform_token_count

    runner.add_requests = add_requests_and_look
    runner.gather_batch_req_state = gather_batch_req_state


def _starts(request: Any, tokens: Any) -> bool:
    """Of vLLM's own view of a request: whether its prompt starts with the prefix."""
    return request.prompt_embeds is None and starts_with(request.prompt_token_ids, tokens.token_ids)


HOOK = Hook(
    name="prefix_tokens",
    why="attention metadata does not say of which prompts the tokens of a step are",
    upstream="https://github.com/vllm-project/vllm/issues/42449",
    install=_install,
    superseded=lambda: bool(new_plugin_groups()),
)
