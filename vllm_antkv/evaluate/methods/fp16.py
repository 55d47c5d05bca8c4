"""`fp16`: the model's own attention, untouched. What every other method is measured against."""

from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.methods.request import MethodRequest
from vllm_antkv.offline.method import Method

NAMES = ("fp16",)

#: Whatever the checkpoint is stored in: the name is the papers', and 16-bit K and V are what is served otherwise.
_BITS = 16.0


def build(name: str, request: MethodRequest) -> Method:
    """No quantiser and no settings."""
    del request
    return Method(name=name, nominal_bits=_BITS, config=AntKVConfig())
