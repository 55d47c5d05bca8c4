"""Loads the codebook in a worker, and refuses to start when another rank of the engine has another.

Over several machines a path may lead to other files, and with vLLM's `--nnodes` each finds, or learns, its own.
"""

from pathlib import Path

import torch
from vllm.distributed import get_pp_group, get_tp_group

from vllm_antkv.codebook import Codebook
from vllm_antkv.errors import CodebookError
from vllm_antkv.vllm_adapter.attention.startup import ResolvedCodebook


def load_codebook(resolved: ResolvedCodebook) -> Codebook:
    """The codebook that was chosen at start-up. All ranks of the engine call this.

    Raises:
        CodebookError: the file cannot be served, changed since start-up, or is another than other ranks have.
    """
    codebook = Codebook.load(Path(resolved.path))
    found = _of_all_ranks({resolved.identity, codebook.identity})
    if len(found) > 1:
        raise CodebookError(
            f"The server and its ranks do not have the same {resolved.path} (they have {', '.join(sorted(found))}): "
            "copy one file to all machines, and start again."
        )
    return codebook


def _of_all_ranks(found: set[str]) -> set[str]:
    """Identities on all ranks of all stages of a pipeline; those of other engines have nothing to do with ours."""
    for group in (get_tp_group(), get_pp_group()):
        gathered: list[set[str]] = [set()] * group.world_size
        torch.distributed.all_gather_object(gathered, found, group=group.cpu_group)
        found = set().union(*gathered)
    return found
