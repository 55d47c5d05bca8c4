"""A model that vLLM runs: no gradient flows, and `job.why_vllm` says why transformers does not run it.

vLLM runs it in this process, and K and V are taken where its attention is handed them. In the place of its gradient's
norm a row counts by the votes for it (AnTKV, equation 5): how far a unit error of it would move what attention gives to
the queries that read it from its code. They are squared and added, as errors that are independent add up, and the root
of that is the weight.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_antkv.calibrate.capture import Capture, CaptureWindow
from vllm_antkv.calibrate.job import Job
from vllm_antkv.calibrate.key_scales import query_energy
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.offline.method import LayerWindow
from vllm_antkv.offline.prompt_scores import prompt_scores
from vllm_antkv.offline.sinks import peak_ratio
from vllm_antkv.ops.rope import RotaryTable, unrotate
from vllm_antkv.progress import say
from vllm_antkv.select.recency import last_query_table

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_antkv.vllm_adapter.load.rows import HandedRows

#: Of this process alone: the model must be at hand, and its log is the server's.
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
_LEAST_CACHE_BYTES = 64 << 20
#: Characters kept of what vLLM says when it does not start.
_MAX_REASON = 400


@contextmanager
def open_engine(job: Job) -> "Iterator[EngineModel]":
    """The model, in an engine of vLLM, which has to run it (`job.why_vllm`).

    Raises:
        UnsupportedModelError: vLLM is missing, does not start with this model, or K cannot be turned back.
    """
    assert job.why_vllm is not None
    taken = f"taken from vLLM's own forward pass, as {job.why_vllm.because}"
    counted = " Tokens count by the attention that they get." if job.weighted else ""
    say(f"K and V are {taken}.{counted}")
    os.environ.update(_ENVIRONMENT)
    with ExitStack() as held:
        try:
            from vllm import LLM
            from vllm.distributed import cleanup_dist_env_and_memory

            held.callback(cleanup_dist_env_and_memory)
            engine = LLM(**_engine_options(job))
        except Exception as error:  # vLLM raises anything from ImportError to pydantic's errors when it cannot start
            gist = " ".join(str(error).split())[:_MAX_REASON].rstrip(".")
            raise UnsupportedModelError(
                f"K and V of {job.settings.model} are {taken}, but vLLM does not start ({gist}): "
                f"{job.why_vllm.instead or 'serve it with --kv-cache-dtype auto'}."
            ) from error
        held.callback(engine.llm_engine.engine_core.shutdown)
        yield EngineModel(job, engine)


class EngineModel:
    """A `source.Source` that vLLM runs."""

    def __init__(self, job: Job, engine: "LLM") -> None:
        self._job = job
        self._engine = engine
        from vllm_antkv.vllm_adapter.load.rows import probed

        (self._model,) = engine.apply_model(lambda model: model)
        self._probed = probed(self._model, engine.llm_engine.vllm_config)

    def peak_ratios(self, window: torch.Tensor) -> np.ndarray:
        """As `Source` says."""
        from vllm_antkv.vllm_adapter.load.rows import watched

        ratios: dict[int, torch.Tensor] = {}

        def keep(layer: int, hidden: torch.Tensor) -> None:
            ratios[layer] = peak_ratio(hidden)

        with watched(self._model, self._probed.adds_residual, lambda layer, rows: None, keep):
            self._read(window)
        return torch.stack([ratios[layer] for layer in sorted(ratios)]).cpu().numpy()

    def rotary_tables(self, num_positions: int) -> list[RotaryTable]:
        """As `Source` says; they have all positions of the model. In text three positions are the same (M-RoPE)."""
        nothing = RotaryTable(*torch.zeros(2, num_positions, 0))
        return [replace(table or nothing, sections=None) for table in self._probed.rotaries.values()]

    @contextmanager
    def capturing(self, capture: Capture) -> Iterator[CaptureWindow]:
        """As `Source` says."""
        from vllm_antkv.vllm_adapter.load.rows import watched

        def capture_one(window: torch.Tensor, index: int) -> None:
            on_rows, on_hidden = partial(_write, capture, index), partial(_write_sinks, capture, index)
            with watched(self._model, self._probed.adds_residual, on_rows, on_hidden):
                self._read(window)

        yield capture_one

    def _read(self, window: torch.Tensor) -> None:
        """Run a window, in one step; the token that comes after it is of no use to anyone."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        self._engine.generate([TokensPrompt(prompt_token_ids=window.tolist())], params, use_tqdm=False)


def _write(capture: Capture, index: int, layer: int, rows: "HandedRows") -> None:
    rotary = capture.rotaries[layer].to(rows.key.device)
    query, key, value = rows.query.float(), rows.key.float(), rows.value.float()
    capture.write_rows(index, layer, 0, unrotate(key, torch.arange(len(key), device=key.device), rotary))
    capture.write_rows(index, layer, 1, value)
    capture.write_queries(index, layer, query_energy(query, key.shape[1], rotary))
    if capture.weighted:
        window = LayerWindow(layer, query[None], key[None], value[None], rows.rules, rotary)
        scores = prompt_scores(window, last_query_table(AntKVConfig(), len(key), rows.rules.window).to(key.device))
        for kind, score in enumerate(scores):
            capture.write_norms(index, layer, kind, score[0].T.sqrt())


def _write_sinks(capture: Capture, index: int, layer: int, hidden: torch.Tensor) -> None:
    if capture.sinks is not None and layer == capture.sinks.layer:
        capture.write_sinks(index, hidden)


def _engine_options(job: Job) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`: every window in one step, and a cache for one."""
    # One more than a window: a prompt needs room for an answer.
    context = job.windows.shape[1] + 1
    identity = job.identity
    # Where a checkpoint is in float32, vLLM computes in 16 bits.
    token_bytes = 2 * identity.num_layers * identity.num_kv_heads * identity.head_size * 2
    return {
        "model": job.settings.model,
        "max_model_len": context,
        # What is read is text.
        "language_model_only": True,
        "max_num_seqs": 1,
        "max_num_batched_tokens": context,
        "kv_cache_memory_bytes": max(_LEAST_CACHE_BYTES, 2 * context * token_bytes),
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "use_tqdm_on_load": False,
    }
