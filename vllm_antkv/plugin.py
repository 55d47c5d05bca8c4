"""The entry point that vLLM loads in every one of its processes."""

import logging

logger = logging.getLogger("vllm.antkv")


def register() -> None:
    """Install the hooks; doing so twice changes nothing.

    On a vLLM that the hooks do not fit nothing is touched, and a warning says so: the antkv values of
    `--kv-cache-dtype` are then unknown to vLLM, and everything else works as if the plugin were not there.
    """
    from vllm_antkv.hooks import HOOKS

    for hook in HOOKS:
        if reason := hook.applies():
            logger.warning("vllm-antkv is not active: %s.", reason)
            return
    for hook in HOOKS:
        hook.install()
