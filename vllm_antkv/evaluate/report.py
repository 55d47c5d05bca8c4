"""The results of an evaluation as JSON: their fields, and how the file is written."""

import importlib.metadata
import json
import math
import platform
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from vllm_antkv import __version__
from vllm_antkv.errors import SettingsError, UnsupportedModelError
from vllm_antkv.offline.fidelity import OwnFidelity
from vllm_antkv.whole_file import write_whole

Report = TypeVar("Report", bound=BaseModel)


class PerplexityReport(BaseModel, frozen=True):
    """The JSON of `antkv eval perplexity` and `antkv eval served`; `antkv eval compare` holds a list of them.

    tokens: positions scored, over all windows.
    nll: mean negative log-likelihood of a token, in nats; perplexity is its exponential.
    nominal_bits: bits per K or V element, codes alone.
    effective_bits: bits per K or V element, everything the cache holds for one sequence of `context` tokens.
    fidelity: how close predictions are to the model's own, where that was asked for; not part of this JSON.
    """

    model: str
    method: str
    text: str
    context: int
    windows: int
    tokens: int
    perplexity: float
    nll: float
    nominal_bits: float
    effective_bits: float
    fidelity: OwnFidelity | None = Field(default=None, exclude=True)
    settings: dict[str, Any]
    versions: dict[str, str]


def perplexity_of(nll: float) -> float:
    """exp(nll); infinity where that overflows, UnsupportedModelError when `nll` is not a number."""
    if math.isnan(nll):
        raise UnsupportedModelError(
            "The model's loss on this text is not a number: its weights are damaged, or too large for their dtype."
        )
    return math.exp(nll) if nll < 700 else math.inf


def gap_closed(results: Sequence[PerplexityReport]) -> dict[str, float]:
    """(PPL_cq - PPL_x) / (PPL_cq - PPL_fp16) of every vector quantiser x whose CQ and fp16 are among the results.

    1 means as good as fp16, 0 no better than plain k-means centroids. The figure that carries from small models to
    large ones. Left out where CQ loses nothing.
    """
    perplexity = {result.method: result.perplexity for result in results}
    closed = {}
    for method, value in perplexity.items():
        baseline = perplexity.get(method.replace("antkv-", "cq-"))
        if method.startswith("antkv-") and baseline is not None and baseline > perplexity.get("fp16", baseline):
            closed[method] = (baseline - value) / (baseline - perplexity["fp16"])
    return closed


def versions(*packages: str) -> dict[str, str]:
    """Versions of this package, of Python and of the named distributions that are installed."""
    installed = {"vllm-antkv": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def check_writable(path: Path) -> None:
    """SettingsError when `path` cannot be written: better before an hour of work than after it."""
    if path.is_dir():
        raise SettingsError(f"{path} cannot be written: it is a folder.")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError:
        raise SettingsError(
            f"{path} cannot be written: {path.parent} must be a folder that exists and can be written to."
        ) from None


def as_json(content: dict[str, Any]) -> str:
    """The text of a result's file."""
    return json.dumps(content, indent=2) + "\n"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write atomically: readers see the old file or the whole new one."""
    write_whole(path, as_json(content).encode())


def written_one_by_one(reports: Iterable[Report], path: Path) -> list[Report]:
    """All of them. The file is written after every one, so that what was measured outlives what fails later."""
    measured = []
    for report in reports:
        measured.append(report)
        write_json(path, {"results": [each.model_dump() for each in measured]})
    return measured
