"""The methods that `antkv eval` measures: one file each, and the table of names that the CLI and the tests read."""

from vllm_antkv.errors import SettingsError
from vllm_antkv.evaluate.methods import antkv, cq, fp16
from vllm_antkv.evaluate.methods.request import Builder, MethodRequest
from vllm_antkv.offline.method import Method

#: Name of a method -> what builds it.
METHODS: dict[str, Builder] = {name: module.build for module in (fp16, cq, antkv) for name in module.NAMES}


def check_method(name: str) -> str:
    """`name` itself; SettingsError names the known methods when it is none of them."""
    if name not in METHODS:
        raise SettingsError(f"Unknown method '{name}': choose among {', '.join(METHODS)}.")
    return name


def build_method(name: str, request: MethodRequest) -> Method:
    """The method called `name`.

    Raises SettingsError when there is none, CodebookError when its codebook is missing or does not fit.
    """
    return METHODS[check_method(name)](name, request)
