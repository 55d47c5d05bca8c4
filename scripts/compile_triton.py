"""Compile the Triton kernels ahead of time, without a GPU: `python -m scripts.compile_triton --preset NAME --arch 90`.

Prints, as JSON, the version of Triton and, by architecture and kernel, the bytes of stack per thread (where spills are)
and of shared memory per program. Kernels are launched as in serving, with a driver that only compiles.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.gpu.antkv_layer import DTYPE, layer_setup
from benchmarks.gpu.llama import HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS
from vllm_antkv.cache.pages import PageLayout, RecencyPages, VQPages, pool_block_bytes
from vllm_antkv.cache.positions import NUM_POSITIONS
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops.layer import LayerState
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.ops.triton import TritonOperations
from vllm_antkv.ops.varlen import plan_rounds, prefill_limits
from vllm_antkv.ops.varlen_call import Varlen
from vllm_antkv.presets import PRESETS, Preset
from vllm_antkv.triton_kernels import (
    anchor_score,
    close_blocks,
    decode,
    dequantised_pages,
    encode_store,
    merge_calls,
    prefill,
)

KERNELS = (
    (encode_store, "_encode_store_kernel"),
    (anchor_score, "_anchor_score_kernel"),
    (close_blocks, "_close_blocks_kernel"),
    (decode, "_decode_kernel"),
    (decode, "_merge_kernel"),
    (prefill, "_prefill_kernel"),
    (dequantised_pages, "_dequantised_pages_kernel"),
    (merge_calls, "_merge_calls_kernel"),
)
MAX_LEN = 256


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--arch", type=int, nargs="+", required=True, help="compute capabilities, as 90")
    parser.add_argument("--kernel", nargs="+", help="only these, as `decode`")
    parser.add_argument("--three-part", action="store_true", help="tokens have three positions (M-RoPE)")
    parser.add_argument("--jensen", action="store_true", help="logits of coded keys are corrected")
    parser.add_argument("--drafts", type=int, default=0, help="of a step at most")
    arguments = parser.parse_args()
    resources: dict[int, dict[str, dict[str, int]]] = {}
    for architecture in arguments.arch:
        triton.runtime.driver.set_active(_CompileOnly(architecture))
        compiled: dict[str, Any] = {}
        with _recording(compiled, arguments.kernel):
            _launch_all(_layer(PRESETS[arguments.preset], arguments.three_part, arguments.jensen, arguments.drafts))
        resources[architecture] = {
            name: {"stack": stack_bytes(each), "shared": each.metadata.shared} for name, each in compiled.items()
        }
    print(json.dumps({"triton": triton.__version__, "kernels": resources}))


def stack_bytes(compiled: Any) -> int:
    """Of a thread, read from the cubin with the tool that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sum(int(value) for value in re.findall(r"\b(?:STACK|LOCAL):(\d+)", report))


class _CompileOnly:
    """A Triton driver for a GPU that is not there."""

    utils = None

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)
        self._architecture = architecture

    def get_current_device(self) -> int:
        # Kernels are cached by device.
        return self._architecture

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class _Recorder:
    """Stands in for a kernel: compiles it in its first configuration where it is launched, if it is wanted."""

    def __init__(self, name: str, kernel: Any, compiled: dict[str, Any], is_wanted: bool) -> None:
        self._name, self._kernel, self._compiled, self._is_wanted = name, kernel, compiled, is_wanted

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            configs = getattr(self._kernel, "configs", None)
            function = self._kernel if configs is None else self._kernel.fn
            options = configs[0].all_kwargs() if configs else {}
            if self._is_wanted:
                self._compiled[self._name] = function.warmup(*args, grid=(1,), **kwargs, **options)

        return launch


@contextmanager
def _recording(compiled: dict[str, Any], wanted: list[str] | None) -> Iterator[None]:
    with ExitStack() as replaced:
        for module, name in KERNELS:
            short = name.strip("_").removesuffix("_kernel")
            recorder = _Recorder(short, getattr(module, name), compiled, wanted is None or short in wanted)
            replaced.enter_context(patch.object(module, name, recorder))
        yield


def _launch_all(layer: LayerState) -> None:
    """One step of two requests through all operations."""
    operations = TritonOperations(layer)
    num_tokens = 100
    query = torch.zeros(num_tokens, NUM_HEADS, HEAD_SIZE, dtype=DTYPE)
    key = torch.zeros(num_tokens, NUM_KV_HEADS, HEAD_SIZE, dtype=DTYPE)
    step = StepPlan(
        query_start_loc=torch.tensor([0, 99, 100], dtype=torch.int32),
        seq_lens=torch.tensor([99, 200], dtype=torch.int32),
        vq_block_table=torch.zeros(2, 16, dtype=torch.int32),
        recency_block_table=torch.zeros(2, 16, dtype=torch.int32),
        max_query_len=99,
        max_seq_len=4096,
    )
    rows = StepRows(query, key, key, torch.zeros(num_tokens, dtype=torch.bool))
    operations.run(rows, torch.empty_like(query), step)
    operations.close_blocks(rows, step)
    # Prompts go through other kernels where the lengths are known to the host: here in pieces of a block.
    limits, seq_lens = prefill_limits(layer, layer.recency.score_slots), torch.tensor([299, 200], dtype=torch.int32)
    assert limits is not None
    rounds = plan_rounds(step.query_start_loc, seq_lens, replace(limits, piece=1), query.device)
    operations.attend(rows, torch.empty_like(query), replace(step, seq_lens=seq_lens, rounds=rounds))


def _layer(preset: Preset, three_part: bool, jensen: bool, drafts: int) -> LayerState:
    """A layer in the shape of Llama-3-8B's, pages of zeros.

    three_part: tokens have three positions (M-RoPE). jensen: logits of coded keys are corrected.
    """
    config = AntKVConfig()
    layout = PageLayout.of(config, preset, HEAD_SIZE, DTYPE, 1 + drafts)
    raw = torch.zeros(4, NUM_KV_HEADS, 1, pool_block_bytes([layout]), dtype=torch.uint8)
    angles = torch.arange(MAX_LEN)[:, None] * torch.logspace(0, -3, HEAD_SIZE // 2)
    sections = torch.arange(HEAD_SIZE // 2) % NUM_POSITIONS if three_part else None
    setup = replace(
        layer_setup(config, preset.name, NUM_KV_HEADS, MAX_LEN, 2, "cpu"),
        k_order=None,
        rotary=RotaryTable(angles.cos(), angles.sin(), True, sections),
        jensen_weights=torch.full((NUM_HEADS, HEAD_SIZE), float(jensen)),
        varlen=Varlen(lambda query, *rest: query.new_zeros(query.shape[1::-1], dtype=torch.float32), 100, 256),
    )
    return LayerState.of(
        setup,
        VQPages.view(raw[..., : layout.vq_page_bytes], layout),
        RecencyPages.view(raw[..., : layout.recency_page_bytes], layout, DTYPE),
        torch.zeros(4, VQ_BLOCK_SIZE, NUM_POSITIONS, dtype=torch.int32) if three_part else None,
    )


if __name__ == "__main__":
    main()
