"""`BASE+intactkv-N`: the KV of the prompt's first N tokens come from the full-precision model (IntactKV, section 3.1).

N is the length of the pivot prefix: 1 for [BOS], a whole system prompt for chat models. Where nothing but the cache is
quantised, as here, a causal prefix computed in full precision is the model's own, so that the plain method is
preserve-first-N by construction; the paper's gain over it lies in quantised weights and in training the prefix (section
3.2). The prefix is counted per sequence, although requests that share a system prompt share its rows.
"""

from dataclasses import replace

from research.literature import preserve_first
from research.literature.method import LiteratureMethod
from research.literature.request import LiteratureRequest
from vllm_antkv.offline.method import Method

NAME = "intactkv"


def apply(base: Method, number: int, request: LiteratureRequest) -> Method:
    """`base` with the first `number` tokens exact in every layer, as the model itself computes them."""
    name = f"{base.name}+{NAME}-{number}"
    if not isinstance(base, LiteratureMethod):
        config = base.config.model_copy(update={"prefix": number})
        return replace(base, name=name, config=config)
    return replace(preserve_first.apply(base, number, request), name=name)
