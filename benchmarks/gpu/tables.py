"""What was measured on a GPU, as Markdown tables; from the JSON alone, so that they can be made anew anywhere."""

from typing import Any

Row = dict[str, Any]


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; every column but the first is aligned to the right."""
    lines = [header, ["---", *(["---:"] * (len(header) - 1))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def decode_table(report: Row) -> str:
    """Of gpu_decode.py: a line per setting and side."""
    lines = []
    for row in report["rows"]:
        baseline = row["sides"][report["baseline"]].get("median_ms")
        for name, side in row["sides"].items():
            setting = [name, f"{row['context']:,}", str(row["batch"])]
            if "error" in side:
                lines.append([*setting, first_line(side["error"]), "", "", ""])
                continue
            ratio = f"{baseline / side['median_ms']:.2f}" if baseline else ""
            lines.append([*setting, _time(side), ratio, f"{side['bytes'] / 1e6:.1f}", f"{side['roofline']:.0%}"])
    header = ["side", "context", "batch", "ms", "speed-up over FA3 bfloat16", "KV MB", "of memory bandwidth"]
    return f"Memory copies at {report['bandwidth'] / 1e12:.2f} TB/s.\n\n{table(header, lines)}"


def prefill_table(report: Row) -> str:
    """Of gpu_prefill.py: a line per prompt and past, with the sum of our operations."""
    operations = ("encode_store, CUDA", "encode_store", "anchor_score", "attend", "attend, Triton")
    lines = []
    for row in report["rows"]:
        timings, baseline = row["timings"], row["timings"][report["baseline"]]
        cells = [_time(baseline), *(_time(timings[name]) for name in operations)]
        ratios = (_over(baseline, timings["anchor_score"], timings["attend"]), _over(baseline, timings["encode_store"]))
        lines.append([f"{row['tokens']:,} behind {row['past']:,}", *cells, *ratios])
    header = ["tokens", "FA3 bfloat16, ms", *operations, "anchor_score + attend over FA3", "encode_store over FA3"]
    return table(header, lines)


def engines_table(report: Row) -> str:
    """Of gpu_engines.py: a line per figure, a column per side; ratios to `auto` where it is among them."""
    sides = report["rows"]
    names = [name for name in dict.fromkeys(name for side in sides for name in side) if name not in _IN_WORDS]
    lines = [[name, *(_figure(side, sides, name) for side in sides)] for name in names]
    caption = f"{report['kv_gib']:g} GiB of KV memory, outputs of {report['output']} tokens; over `auto`."
    return f"{caption}\n\n{table(['', *(side['side'] for side in sides)], lines)}"


#: Of a side: what is no figure.
_IN_WORDS = ("side", "profile")


def _figure(side: Row, sides: list[Row], name: str) -> str:
    value = side.get(name, "")
    if isinstance(value, dict):
        return f"{value['capacity']:,} tokens, {value['batch']} requests: {value['tokens_per_second']:,.0f} tokens/s"
    if not isinstance(value, float):
        return first_line(str(value))
    auto = next((each.get(name) for each in sides if each["side"] == "auto"), None)
    ratio = f", {value / auto:.2f}" if auto else ""
    return f"{value:,.4g}{ratio}"


def first_line(text: str) -> str:
    """The first line of an error, fit for a cell."""
    lines = text.strip().splitlines() or [""]
    return lines[0].replace("|", "\\|")[:120]


def _over(baseline: Row, *parts: Row) -> str:
    """The parts' time over the baseline's; empty where one of them could not run."""
    if any("error" in timing for timing in (baseline, *parts)):
        return ""
    return f"{sum(part['median_ms'] for part in parts) / baseline['median_ms']:.2f}"


def _time(timing: Row) -> str:
    if "error" in timing:
        return first_line(timing["error"])
    return f"{timing['median_ms']:.4f} ± {timing['spread_ms'] / 2:.4f}"
