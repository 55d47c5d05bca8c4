"""Loads the codebook in a worker, and refuses to start when ranks of the engine would not make the same pages.

Over several machines a path may lead to other files, and with vLLM's `--nnodes` each has its own command line, its own
version of this package, and finds, or learns, its own codebook.
"""

from pathlib import Path

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tp_group

from vllm_antkv import __version__
from vllm_antkv.codebook import Codebook
from vllm_antkv.errors import SettingsError
from vllm_antkv.vllm_adapter.plan.engine_plan import engine_plan


def load_codebook(vllm_config: VllmConfig) -> Codebook:
    """The codebook that was chosen at start-up. All ranks of the engine call this.

    Raises:
        CodebookError, SettingsError: the file cannot be served; it changed since start-up, or ranks differ.
    """
    plan = engine_plan(vllm_config)
    codebook = Codebook.load(Path(plan.codebook.path))
    mine = {
        "version": __version__,
        "--kv-cache-dtype": vllm_config.cache_config.cache_dtype,
        "--kv-cache-dtype-skip-layers": list(plan.exact),
        **plan.settings.of_pages,
        "codebook": plan.codebook.identity,
    }
    found = _of_all_ranks({*((name, str(value)) for name, value in mine.items()), ("codebook", codebook.identity)})
    values = {name: sorted(value for of, value in found if of == name) for name in mine}
    differing = [f"{name} ({', '.join(each)})" for name, each in values.items() if len(each) > 1]
    if differing:
        raise SettingsError(
            f"The server and its ranks differ in {' and '.join(differing)}: give all machines the same version of "
            "vllm-antkv, the same options and the same codebook."
        )
    return codebook


def _of_all_ranks(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """What is found on all ranks of all stages of a pipeline; other engines have nothing to do with ours."""
    for group in (get_tp_group(), get_pp_group()):
        gathered: list[set[tuple[str, str]]] = [set()] * group.world_size
        torch.distributed.all_gather_object(gathered, found, group=group.cpu_group)
        found = set().union(*gathered)
    return found
