"""The results of the GPU check as Markdown, for docs/gpu-log.md."""

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.gpu.records import Record
from benchmarks.gpu.tables import decode_table, encode_store_table, end_to_end_table, first_line, prefill_table, table

#: Titles and tables of the benchmarks, by the first word of a step's name.
_TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "first-decode": ("Decode attention of a layer at 32K tokens, batch 8", decode_table),
    "decode": ("Decode attention of a layer", decode_table),
    "prefill": ("Prefill of a layer", prefill_table),
    "encode-store": ("Writing to the cache", encode_store_table),
    "end-to-end": ("Output tokens per second", end_to_end_table),
}


def markdown(records: Iterable[Record]) -> str:
    """Machine, outcome of every step, and the tables of the benchmarks that ran, if only in part."""
    kept = list(records)
    machines = [record.result["machine"] for record in kept if record.result]
    # Several machines, if short runs on different ones were added up: the reader must see it.
    described = dict.fromkeys(_machine(machine) for machine in machines)
    sections = ["\n".join(described), _outcomes(kept)]
    for word, (title, render) in _TABLES.items():
        results = [record.result for record in kept if record.step.split()[0] == word and record.result]
        if results:
            # Steps that measure one side each make one table.
            together = {**results[0], "rows": [row for result in results for row in result["rows"]]}
            sections.append(f"#### {title}\n\n{render(together)}")
    return "\n\n".join(section for section in sections if section) + "\n"


def _machine(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{machine['gpu']}, {machine['memory_gib']} GiB, driver {machine['driver']}; {versions}."


def _outcomes(records: list[Record]) -> str:
    rows = []
    for record in records:
        # What a step prints last is its summary, or the error that ended it.
        last = record.output.strip().splitlines()[-1:] or [""]
        said = "" if record.result and record.status == "passed" else first_line(last[0].strip("= "))
        rows.append([record.step, record.status, f"{record.seconds:.0f}", record.commit or record.source, said])
    return table(["step", "outcome", "seconds", "commit", "last line"], rows)
