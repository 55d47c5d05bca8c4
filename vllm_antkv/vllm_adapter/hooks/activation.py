"""Installs every hook, or none."""

from vllm_antkv.presets import PRESETS
from vllm_antkv.vllm_adapter.hooks import HOOKS
from vllm_antkv.vllm_adapter.hooks.base import Patches
from vllm_antkv.vllm_adapter.hooks.dtype import known_dtypes


def activate() -> str | None:
    """Install the hooks; doing so twice changes nothing.

    Returns None, or the reason why they are not installed; vLLM is then as it was before.
    """
    for hook in HOOKS:
        if reason := hook.applies():
            return reason
    if set(PRESETS) <= set(known_dtypes()):
        return None
    patches = Patches()
    reason = _install(patches)
    if reason is not None:
        patches.undo()
    return reason


def _install(patches: Patches) -> str | None:
    hook = HOOKS[0]
    try:
        for hook in HOOKS:
            hook.install(patches)
        for hook in HOOKS:
            if reason := hook.verify():
                return f"its hook {hook.name} does not work with this vLLM ({reason})"
    # Whatever it is: other cache dtypes must go on working, and the reason is shown.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"its hook {hook.name} does not work with this vLLM ({reason})"
    return None
