"""`BASE+pfn-N`: the first N tokens stay exact (preserve-first-N, what KVSink is held against in its figure 9)."""

from dataclasses import replace

from research.literature.method import LiteratureMethod
from research.literature.request import LiteratureRequest
from vllm_antkv.offline.method import Method

NAME = "pfn"


def apply(base: Method, number: int, request: LiteratureRequest) -> Method:
    """`base` with at least `number` first tokens exact in every layer."""
    del request
    assert isinstance(base, LiteratureMethod)
    assert base.retention is not None
    retention = replace(base.retention, first=max(base.retention.first, number))
    return replace(base, name=f"{base.name}+{NAME}-{number}", retention=retention)
