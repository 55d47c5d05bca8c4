"""Results of a load test: one record per request, and figures over all requests, in total and by kind."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import BaseModel
from rich.table import Table

from loadtest.scenario import KINDS, Kind
from loadtest.stream import Answer

PERCENTILES = (50, 95, 99)


class Record(BaseModel, frozen=True):
    """A request. Times are in seconds; `ended` is the time of day."""

    kind: Kind
    ended: float
    seconds: float
    first: float = 0.0
    gaps: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @classmethod
    def of(cls, kind: Kind, ended: float, answer: Answer) -> Self:
        """The record of an answered request."""
        return cls(kind=kind, ended=ended, **asdict(answer))


class Figures(BaseModel, frozen=True):
    """Figures over a number of requests. Percentiles are in milliseconds, by name: `p50`, `p95`, `p99`.

    output_tokens_per_second: over all requests, from the first one's start to the last one's end.
    """

    requests: int
    failures: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output_tokens_per_second: float
    time_to_first_token: dict[str, float]
    between_tokens: dict[str, float]
    whole_request: dict[str, float]


class Summary(BaseModel, frozen=True):
    """Summary of one run."""

    scenario: str
    model: str
    total: Figures
    by_kind: dict[Kind, Figures]
    errors: list[str]

    @classmethod
    def of(cls, scenario: str, model: str, records: Sequence[Record]) -> Self:
        """Of all records of a run, of which there is at least one."""
        kinds = {kind: [record for record in records if record.kind == kind] for kind in KINDS}
        return cls(
            scenario=scenario,
            model=model,
            total=_figures(records),
            by_kind={kind: _figures(own) for kind, own in kinds.items() if own},
            errors=sorted({record.error for record in records if record.error}),
        )


def read_records(path: Path) -> list[Record]:
    """Read a file with one JSON object per line; empty if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Record.model_validate_json(line) for line in lines]


def table(title: str, columns: Mapping[str, Figures]) -> Table:
    """The main figures, one row each."""
    result = Table(title=title, title_justify="left")
    result.add_column("")
    for name in columns:
        result.add_column(name, justify="right")
    for figures in zip(*map(_rows, columns.values()), strict=True):
        result.add_row(figures[0][0], *(text for _, text in figures))
    return result


def _rows(figures: Figures) -> list[tuple[str, str]]:
    return [
        ("requests", str(figures.requests)),
        ("failures", str(figures.failures)),
        ("tokens/s", f"{figures.output_tokens_per_second:.1f}"),
        ("TTFT p50, ms", f"{figures.time_to_first_token['p50']:.0f}"),
        ("TTFT p95, ms", f"{figures.time_to_first_token['p95']:.0f}"),
        ("ITL p50, ms", f"{figures.between_tokens['p50']:.1f}"),
        ("ITL p95, ms", f"{figures.between_tokens['p95']:.1f}"),
        ("request p50, ms", f"{figures.whole_request['p50']:.0f}"),
        ("request p95, ms", f"{figures.whole_request['p95']:.0f}"),
    ]


def _figures(records: Sequence[Record]) -> Figures:
    good = [record for record in records if record.error is None]
    seconds = max(record.ended for record in records) - min(record.ended - record.seconds for record in records)
    output_tokens = sum(record.output_tokens for record in good)
    return Figures(
        requests=len(records),
        failures=len(records) - len(good),
        prompt_tokens=sum(record.prompt_tokens for record in good),
        output_tokens=output_tokens,
        seconds=seconds,
        output_tokens_per_second=output_tokens / seconds,
        time_to_first_token=_percentiles([record.first for record in good]),
        between_tokens=_percentiles([gap for record in good for gap in record.gaps]),
        whole_request=_percentiles([record.seconds for record in good]),
    )


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds; 0 where there is nothing to measure."""
    values = np.percentile(seconds, PERCENTILES) * 1000 if seconds else np.zeros(len(PERCENTILES))
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, values, strict=True)}
