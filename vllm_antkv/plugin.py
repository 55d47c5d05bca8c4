"""The entry point that vLLM loads in every one of its processes."""

import logging

from vllm_antkv.releases import not_supported

logger = logging.getLogger("vllm.antkv")


def register() -> None:
    """Install the hooks; doing so twice changes nothing.

    On a vLLM that the hooks do not fit nothing is touched, and a warning says so: the antkv values of
    `--kv-cache-dtype` are then unknown to vLLM, and everything else works as if the plugin were not there.
    """
    import vllm

    if reason := not_supported(vllm.__version__) or _not_activated():
        logger.warning("vllm-antkv is not active: %s.", reason)


def _not_activated() -> str | None:
    # Only in a vLLM of a known version: in another one a module that the hooks import may have moved. An error here
    # would end that vLLM, whatever its cache dtype.
    try:
        from vllm_antkv.vllm_adapter.hooks.activation import activate
    except ImportError as error:
        return f"its hooks cannot be imported ({error})"
    return activate()
