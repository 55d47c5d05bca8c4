"""Compile every Triton kernel ahead of time, without a GPU, and read what it takes: registers, shared memory, spills.

    python -m scripts.compile_triton                    print the table
    python -m scripts.compile_triton --write FILE       record it
    python -m scripts.compile_triton --check FILE       compare with a record; exit status 1 when something got worse

For `decode` it counts instructions too, in its machine code: of the loop that takes the coded past, per token.

The kernels are launched as in serving, on small CPU tensors, with a driver that compiles and does not run. Every preset
is compiled for every architecture, other layers for one, and the configurations beside the default for one layer.
"""

# The kernels lie at the top of the repository and are installed inside vllm_antkv, where mypy does not look.
# mypy: disable-error-code="import-not-found"

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from scripts.sass_loops import nested_loops
from vllm_antkv.cache.pages import PageLayout, RecencyPages, VQPages, pool_block_bytes
from vllm_antkv.cache.positions import NUM_POSITIONS
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops.counters import Counters
from vllm_antkv.ops.layer import LayerState, StepRows
from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.ops.step import Step
from vllm_antkv.ops.triton import TritonOperations
from vllm_antkv.ops.varlen_call import Varlen
from vllm_antkv.presets import PRESETS
from vllm_antkv.select.recency import last_query_table
from vllm_antkv.triton_kernels import anchor_score, close_blocks, decode, encode_store, plain_pages, prefill

ARCHITECTURES = (80, 90, 100)
KERNELS = (
    (encode_store, "_encode_store_kernel"),
    (anchor_score, "_anchor_score_kernel"),
    (close_blocks, "_close_blocks_kernel"),
    (decode, "_decode_kernel"),
    (decode, "_merge_kernel"),
    (prefill, "_prefill_kernel"),
    (plain_pages, "_plain_pages_kernel"),
    (plain_pages, "_merge_attention_kernel"),
)
MAX_LEN = 256
#: The architecture for which all layers are compiled.
REFERENCE_ARCHITECTURE = 90
#: Tokens whose anchors are taken together with the default settings: 16 rows, two per block.
_ANCHORED_TOGETHER = 1024
#: Share by which registers and instructions may grow before a check fails.
TOLERANCE = 0.1


@dataclass(frozen=True)
class Case:
    """A layer and its settings.

    rotary_dim: None is all of a head, 0 is no RoPE.
    three_part: tokens have three positions (M-RoPE).
    """

    preset: str
    head_size: int = 128
    num_heads: int = 32
    num_kv_heads: int = 8
    dtype: torch.dtype = torch.bfloat16
    rotary_dim: int | None = None
    neox: bool = True
    ordered: bool = False
    three_part: bool = False

    @property
    def name(self) -> str:
        """Short, for the table."""
        kind = PRESETS[self.preset]
        parts = [f"d{kind.sub_vector_size}c{kind.num_centroids}", f"h{self.head_size}"]
        parts.append(f"g{self.num_heads // self.num_kv_heads}")
        if self.dtype != torch.bfloat16:
            parts.append(str(self.dtype).removeprefix("torch."))
        if self.rotary_dim is not None:
            parts.append(f"rope{self.rotary_dim}")
        if not self.neox:
            parts.append("gptj")
        if self.ordered:
            parts.append("ordered")
        if self.three_part:
            parts.append("mrope")
        return " ".join(parts)


#: The layer whose kernels are compiled in every configuration that they are tuned over.
TUNED = Case("antkv-1bit")
PRESET_CASES = tuple(Case(name) for name in PRESETS)
OTHER_CASES = (
    Case("antkv-1bit", 64),
    Case("antkv-1bit", 80, 32, 32),
    Case("antkv-2bit", 96, 32, 32, torch.float16),
    Case("antkv-1bit", 256, 8, 4),
    Case("antkv-1bit", 128, 64, 8),
    Case("antkv-1bit", 128, rotary_dim=64, neox=False),
    Case("antkv-1bit", rotary_dim=0),
    Case("antkv-1bit", ordered=True),
    Case("antkv-1bit", 64, dtype=torch.float32),
    Case("antkv-1bit", three_part=True),
)


@dataclass(frozen=True)
class Resources:
    """Of one compiled kernel: registers and stack bytes per thread (spills live there), shared bytes per program.

    per_token: warp instructions per token and KV head in the loop over the coded past; only `decode` has it.
    """

    registers: int
    stack: int
    shared: int
    per_token: float | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="record the table")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare with a record")
    parser.add_argument("--arch", type=int, nargs="*", default=ARCHITECTURES, help="compute capabilities, as 90")
    parser.add_argument("--layer", help="only this layer, by its name in the table")
    parser.add_argument("--kernel", nargs="*", help="only these kernels, in their default configuration")
    arguments = parser.parse_args()
    table = measure(arguments.arch, arguments.layer, arguments.kernel)
    print_table(table)
    if arguments.write:
        record = {"triton": triton.__version__, "kernels": {key: vars(value) for key, value in table.items()}}
        arguments.write.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.check:
        complaints = compare(table, json.loads(arguments.check.read_text()))
        agreement = f"{len(table)} kernels agree with {arguments.check} (Triton {triton.__version__})"
        print("\n".join(complaints) or agreement)
        return int(bool(complaints))
    return 0


def measure(architectures: Sequence[int], layer: str | None, kernels: list[str] | None) -> dict[str, Resources]:
    """Compile everything, or the layer and the kernels named; keys are `kernel configuration | layer | sm_xx`."""
    table = {}
    for architecture in architectures:
        triton.runtime.driver.set_active(_CompileOnly(architecture))
        others = OTHER_CASES if architecture == REFERENCE_ARCHITECTURE else ()
        for case in (*PRESET_CASES, *others):
            if layer in (None, case.name):
                for kernel, compiled in compiled_kernels(case, kernels):
                    # With three positions there is no loop over tiles that are turned together.
                    counts = kernel.startswith("decode") and not case.three_part
                    table[f"{kernel} | {case.name} | sm_{architecture}"] = resources(kernel, compiled, counts)
    return table


def compiled_kernels(case: Case, kernels: list[str] | None) -> list[tuple[str, Any]]:
    """Name, configuration and compiled form of kernels: of these, or of all."""
    compiled: list[tuple[str, Any]] = []
    with _recording(compiled, kernels, every_configuration=case == TUNED and kernels is None):
        _launch_all(case)
    return compiled


def resources(kernel: str, compiled: Any, counts: bool) -> Resources:
    """Read the cubin with the tools that come with Triton; counts: the instructions of decode too."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    per_token = None
    if counts and (decode := re.fullmatch(r"decode (\d+) w(\d+)", kernel)) is not None:
        per_token = instructions_per_token(compiled.asm["cubin"], int(decode[1]), int(decode[2]))
    return Resources(usage["REG"], usage["STACK"] + usage["LOCAL"], compiled.metadata.shared, per_token)


def instructions_per_token(cubin: bytes, block_n: int, num_warps: int) -> float:
    """Of all warps, per token and KV head of the coded past: a tile's turn, and its part of the anchors'."""
    loops = nested_loops(cubin)
    if loops is None:
        raise ValueError("decode has no loop over tiles in a loop over anchors any more: count something else")
    chunk, tile = loops
    per_tile, per_chunk = tile.instructions, chunk.instructions - tile.instructions
    return round(num_warps * (per_tile / block_n + per_chunk / _ANCHORED_TOGETHER), 1)


def compare(table: dict[str, Resources], record: dict[str, Any]) -> list[str]:
    """What is worse than recorded. Of another version of Triton only the spills are compared."""
    same_version = record["triton"] == triton.__version__
    complaints = []
    for key, now in table.items():
        if key not in record["kernels"]:
            complaints.append(f"{key}: not recorded")
            continue
        then = Resources(**record["kernels"][key])
        if now.stack > then.stack:
            complaints.append(f"{key}: {now.stack} bytes of stack, recorded {then.stack}")
        if not same_version:
            continue
        if now.registers > then.registers * (1 + TOLERANCE):
            complaints.append(f"{key}: {now.registers} registers, recorded {then.registers}")
        if (now.per_token or 0) > (then.per_token or 0) * (1 + TOLERANCE):
            complaints.append(f"{key}: {now.per_token} instructions per token, recorded {then.per_token}")
        if now.shared > then.shared:
            complaints.append(f"{key}: {now.shared} bytes of shared memory, recorded {then.shared}")
    return complaints


def print_table(table: dict[str, Resources]) -> None:
    width = max(len(key) for key in table)
    print(f"{'kernel | layer | architecture':{width}}  registers  stack  shared  instructions per token")
    for key, value in table.items():
        print(f"{key:{width}}  {value.registers:9}  {value.stack:5}  {value.shared:6}  {value.per_token or ''}")


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
    """Stands in for a kernel: compiles `num_configs` of its configurations where it is launched."""

    def __init__(self, name: str, kernel: Any, compiled: list[tuple[str, Any]], num_configs: int | None) -> None:
        self._name, self._kernel, self._compiled, self._num_configs = name, kernel, compiled, num_configs

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            configs = getattr(self._kernel, "configs", None)
            function = self._kernel if configs is None else self._kernel.fn
            for config in (configs or [None])[: self._num_configs]:
                options = {} if config is None else config.all_kwargs()
                sizes = [str(value) for key, value in options.items() if key.startswith("BLOCK")]
                name = " ".join([self._name, *sizes, f"w{(options or kwargs)['num_warps']}"])
                self._compiled.append((name, function.warmup(*args, grid=(1,), **kwargs, **options)))

        return launch


@contextmanager
def _recording(compiled: list[tuple[str, Any]], kernels: list[str] | None, every_configuration: bool) -> Iterator[None]:
    originals = [(module, name, getattr(module, name)) for module, name in KERNELS]
    for module, name, kernel in originals:
        short = name.strip("_").removesuffix("_kernel")
        num_configs = None if every_configuration else int(kernels is None or short in kernels)
        setattr(module, name, _Recorder(short, kernel, compiled, num_configs))
    try:
        yield
    finally:
        for module, name, kernel in originals:
            setattr(module, name, kernel)


def _launch_all(case: Case) -> None:
    """One step of two requests through all operations."""
    layer = _layer(case, AntKVConfig())
    operations = TritonOperations(layer)
    num_tokens = 100
    query = torch.zeros(num_tokens, case.num_heads, case.head_size, dtype=case.dtype)
    key = torch.zeros(num_tokens, case.num_kv_heads, case.head_size, dtype=case.dtype)
    step = Step(
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
    # Prompts go through other kernels where the lengths are known to the host.
    known = replace(step, query_start_loc_cpu=step.query_start_loc, seq_lens_cpu=step.seq_lens)
    TritonOperations(layer, decodes=False).prefill(rows, torch.empty_like(query), known)


def _layer(case: Case, config: AntKVConfig) -> LayerState:
    preset = PRESETS[case.preset]
    layout = PageLayout.of(config, preset, case.head_size, case.dtype)
    raw = torch.zeros(4, case.num_kv_heads, 1, pool_block_bytes([layout]), dtype=torch.uint8)
    tables = (preset.num_sub_vectors(case.head_size), preset.num_centroids, preset.sub_vector_size)
    centroids = torch.zeros(case.num_kv_heads, *tables)
    rotary_dim = case.head_size if case.rotary_dim is None else case.rotary_dim
    angles = torch.arange(MAX_LEN)[:, None] * torch.logspace(0, -3, rotary_dim // 2)
    sections = torch.arange(rotary_dim // 2) % NUM_POSITIONS if case.three_part else None
    return LayerState(
        vq=VQPages.view(raw[..., : layout.vq_page_bytes], layout),
        recency=RecencyPages.view(raw[..., : layout.recency_page_bytes], layout, case.dtype),
        k_centroids=centroids,
        v_centroids=centroids,
        preset=preset,
        k_order=torch.arange(case.head_size, dtype=torch.int32) if case.ordered else None,
        rotary=RotaryTable(angles.cos(), angles.sin(), case.neox, sections) if rotary_dim else None,
        positions=torch.zeros(4, VQ_BLOCK_SIZE, NUM_POSITIONS, dtype=torch.int32) if case.three_part else None,
        jensen_weights=torch.zeros(case.num_heads, case.head_size),
        last_query=last_query_table(config, MAX_LEN),
        config=config,
        num_heads=case.num_heads,
        rules=LogitRules(case.head_size**-0.5),
        counters=Counters(torch.device("cpu"), "compiled"),
        counts_rows=False,
        max_num_reqs=2,
        scratch=lambda *sizes: [torch.empty(shape, dtype=dtype) for shape, dtype in sizes],
        varlen=Varlen(lambda query, *rest: query.new_zeros(query.shape[1::-1], dtype=torch.float32), 100),
    )


if __name__ == "__main__":
    sys.exit(main())
