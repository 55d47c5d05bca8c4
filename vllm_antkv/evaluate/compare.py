"""Several methods on one model and text, and how much of CQ's loss each closes."""

from collections.abc import Sequence

from vllm_antkv.evaluate.report import PerplexityReport

_BASELINE, _REFERENCE, _OURS = "cq-", "fp16", "antkv-"


def gap_closed(results: Sequence[PerplexityReport]) -> dict[str, float]:
    """(PPL_cq - PPL_x) / (PPL_cq - PPL_fp16) of every vector quantiser x whose CQ and fp16 are among the results.

    1 means as good as fp16, 0 no better than plain k-means centroids. The figure that carries from small models to
    large ones. Left out where CQ loses nothing.
    """
    perplexity = {result.method: result.perplexity for result in results}
    closed = {}
    for method, value in perplexity.items():
        baseline = perplexity.get(method.replace(_OURS, _BASELINE))
        if method.startswith(_OURS) and baseline is not None and baseline > perplexity.get(_REFERENCE, baseline):
            closed[method] = (baseline - value) / (baseline - perplexity[_REFERENCE])
    return closed
