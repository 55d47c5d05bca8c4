"""Model runner V2's block tables with antkv pages, its kernels in Triton's interpreter; run by test_v2_block_tables.py.

What runs is vLLM's: `BlockTables`, its kernels, and the loop of its model runner that reads the specs. Only the device
is a CPU, for which vLLM would not have chosen this runner.
"""

import ast
import importlib.util
import inspect
import os
import tempfile
import textwrap
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: test_v2_block_tables.py runs it", allow_module_level=True)

import numpy as np
import torch
import triton
import triton.language as tl
import vllm.triton_utils

# Without a device vLLM would take stand-ins.
vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl

from vllm.config import VllmConfig  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.worker.gpu import buffer_utils, model_runner  # noqa: E402
from vllm.v1.worker.gpu.block_table import BlockTables  # noqa: E402

from tests.places import EMBEDDED  # noqa: E402
from vllm_antkv import plugin  # noqa: E402
from vllm_antkv.cache.pages import page_layouts  # noqa: E402
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig  # noqa: E402
from vllm_antkv.presets import PRESETS  # noqa: E402
from vllm_antkv.vllm_adapter.block_pool.specs import RecencySpec, recency_spec, vq_spec  # noqa: E402

# There is no device to share pinned memory with.
buffer_utils.is_uva_available = lambda: False

#: As long as the embedded model allows.
MAX_LEN = 2048
#: Lengths of the requests of a step, before the step: in the first window, and far behind it.
COMPUTED = (5, 127, 300, 1000, 1800)


@cache
def engine_config() -> VllmConfig:
    plugin.register()
    return EngineArgs(str(EMBEDDED), kv_cache_dtype="antkv-1bit", max_model_len=MAX_LEN).create_engine_config()


def specs(settings: AntKVConfig) -> list[Any]:
    """Of VQ pages and of recency pages."""
    layout = page_layouts(settings, [PRESETS["antkv-1bit"]], 64, torch.bfloat16)[0]
    return [vq_spec(layout, 2), recency_spec(layout, 2, settings, engine_config())]


def what_the_runner_reads(kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    """Arguments of BlockTables, by the very loop over groups of the model runner that is installed."""
    method = model_runner.GPUModelRunner.initialize_kv_cache
    function = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
    assert isinstance(function, ast.FunctionDef)
    loops = [node for node in function.body if isinstance(node, ast.For) and "dcp_sharded.append" in ast.unparse(node)]
    assert len(loops) == 1
    wanted = set(inspect.signature(BlockTables).parameters)
    lists = {
        node.func.value.id: []
        for node in ast.walk(loops[0])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append"
        if isinstance(node.func.value, ast.Name)
    }
    theirs = {name: value for name, value in vars(model_runner).items() if not name.startswith("__")}
    names = {**theirs, **lists, "kv_cache_config": kv_cache_config}
    names |= {"self": SimpleNamespace(vllm_config=engine_config()), "block_table_max_model_len": MAX_LEN}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "loop_of_the_model_runner.py")
        path.write_text(ast.unparse(loops[0]))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        vars(module).update(names)
        spec.loader.exec_module(module)
    return {name: names[name] for name in lists if name in wanted}


def tables(settings: AntKVConfig) -> tuple[BlockTables, list[Any]]:
    groups = specs(settings)
    config = KVCacheConfig(
        num_blocks=10_000,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(groups)],
    )
    arguments = what_the_runner_reads(config)
    found = BlockTables(
        max_num_reqs=len(COMPUTED) + 2, max_num_batched_tokens=MAX_LEN, device=torch.device("cpu"), **arguments
    )
    return found, groups


def allocated(spec: Any, computed: int, first_block: int) -> list[int]:
    """A request's row as its manager gives it: real ids where a later step reads, 0 elsewhere."""
    num_pages = -(-(computed + 1) // spec.block_size)
    pages = np.arange(num_pages)
    live = spec.retention.needed_after(pages, computed) if isinstance(spec, RecencySpec) else np.ones(num_pages, bool)
    return np.where(live, pages + first_block, 0).tolist()


def gathered(settings: AntKVConfig) -> list[tuple[Any, list[list[int]], torch.Tensor]]:
    """Of each group: its spec, the rows that were allocated, and what the runner gives to attention."""
    block_tables, groups = tables(settings)
    # Rows are not in the order of the step.
    order = [3, 0, 4, 1, 2]
    rows: list[list[list[int]]] = [[], []]
    for request, computed in zip(order, COMPUTED, strict=True):
        ids = [allocated(spec, computed, 1 + 1000 * request) for spec in groups]
        block_tables.append_block_ids(request, tuple(ids), overwrite=True)
        for group, each in zip(rows, ids, strict=True):
            group.append(each)
    block_tables.apply_staged_writes()
    mapping = torch.tensor(order, dtype=torch.int32)
    arguments = {}
    if "num_computed_tokens" in inspect.signature(BlockTables.gather_block_tables).parameters:
        computed_of_row = torch.zeros(block_tables.max_num_reqs, dtype=torch.int32)
        computed_of_row[mapping.long()] = torch.tensor(COMPUTED, dtype=torch.int32)
        arguments["num_computed_tokens"] = computed_of_row
    shown = block_tables.gather_block_tables(mapping, len(order), **arguments)
    return list(zip(groups, rows, shown, strict=True))


@pytest.mark.parametrize("prefix", [0, 8])
@pytest.mark.parametrize("recency", ["none", "sliding:32", "sliding:512", "log:42"])
def test_attention_is_shown_every_live_page(recency, prefix):
    for spec, rows, shown in gathered(AntKVConfig(recency=recency, prefix=prefix)):
        for row, computed, table in zip(rows, COMPUTED, shown, strict=True):
            lost = [page for page, block in enumerate(row) if table[page] != block]
            assert not lost, (
                f"{type(spec).__name__}, {computed} tokens: pages that are live, or dead, are shown otherwise"
            )


def test_tokens_are_stored_in_their_pages():
    """A step of a few tokens for each request; slots of pages that are not real lie in the null block."""
    block_tables, groups = tables(AntKVConfig())
    order, num_new = [3, 0, 4, 1, 2], 3
    for request, computed in zip(order, COMPUTED, strict=True):
        ids = [allocated(spec, computed + num_new, 1 + 1000 * request) for spec in groups]
        block_tables.append_block_ids(request, tuple(ids), overwrite=True)
    block_tables.apply_staged_writes()
    positions = torch.cat([torch.arange(computed, computed + num_new) for computed in COMPUTED])
    starts = torch.arange(0, num_new * len(COMPUTED) + 1, num_new, dtype=torch.int32)
    mapping = torch.tensor(order, dtype=torch.int32)
    slots = block_tables.compute_slot_mappings(mapping, starts, positions, len(positions))
    requests = np.repeat(order, num_new)
    for group, spec in enumerate(groups):
        for slot, position, request in zip(slots[group].tolist(), positions.tolist(), requests, strict=True):
            block = block_tables.block_tables[group].gpu[request, position // spec.block_size].item()
            assert slot == block * spec.block_size + position % spec.block_size
            assert block != 0, "new tokens are always stored"
    assert groups[0].block_size == VQ_BLOCK_SIZE
