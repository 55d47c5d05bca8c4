"""What was predicted of GPUs beside what `make gpu-check` measured.

    python -m research.sm_model --preset antkv-1bit --anchor-share 0 --json predicted.json
    python -m research.predictions --predicted predicted.json
    python -m research.predictions --predicted predicted.json --measured gpu-results

What was not measured yet is left empty. Predictions are for an H100.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.tables import table
from research.sm_model.decode import Prediction
from research.sm_model.times import BATCH, CONTEXT, against_flash_attention

HEADER = ["what", "predicted", "measured"]
PRESET = "antkv-1bit"
PROMPTS = (1024, 8192, 32768)
_GPU = "H100"

#: What a step of `make gpu-check` measured, by the name of its file.
Results = dict[str, dict[str, Any]]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predicted", type=Path, metavar="FILE", help="written by research.sm_model")
    parser.add_argument("--measured", type=Path, metavar="FOLDER", help="of make gpu-check")
    arguments = parser.parse_args()
    predicted = {} if arguments.predicted is None else json.loads(arguments.predicted.read_text())
    measured = [] if arguments.measured is None else arguments.measured.glob("*.json")
    print(render(predicted, {path.stem: json.loads(path.read_text()) for path in measured}))


def render(predicted: dict[str, Any], results: Results) -> str:
    """As Markdown."""
    return table(HEADER, [*_decode(predicted, results), *_prompts(results)])


def _decode(predicted: dict[str, Any], results: Results) -> Iterator[list[str]]:
    for title, table_, step in (
        ("anchors as by default", predicted.get("decode", {}), "first-decode-default"),
        ("no anchors", predicted.get("decode_by_anchor_share", {}).get("0.0", {}), "first-decode-no-anchors"),
    ):
        what = f"decode, {PRESET}, {CONTEXT:,} tokens, batch {BATCH}, {title}: times faster than FlashAttention 3"
        model = table_.get(PRESET)
        ratio = f"{against_flash_attention(Prediction(**model))[_GPU]:.1f}" if model else ""
        yield [what, ratio, _speed_up(results.get(step, {}))]


def _speed_up(report: dict[str, Any]) -> str:
    """Of the CUDA kernels in a report of gpu_decode."""
    for row in report.get("rows", []):
        sides = row["sides"]
        ours: dict[str, float] = next((side for name, side in sides.items() if name.startswith("antkv, CUDA")), {})
        flash = sides[report["baseline"]]
        if (row["context"], row["batch"]) == (CONTEXT, BATCH) and "median_ms" in ours and "median_ms" in flash:
            return f"{flash['median_ms'] / ours['median_ms']:.1f}"
    return ""


def _prompts(results: Results) -> Iterator[list[str]]:
    report = results.get("prefill", {})
    timings = {row["tokens"]: row["timings"] for row in report.get("rows", []) if not row["past"]}
    for num_tokens in PROMPTS:
        what = f"attention of a prompt of {num_tokens:,}: times FlashAttention 3's time on rows"
        found = timings.get(num_tokens, {})
        ours, flash = found.get("attend", {}), found.get(report.get("baseline"), {})
        known = "median_ms" in ours and "median_ms" in flash
        ratio = f"{ours['median_ms'] / flash['median_ms']:.2f}" if known else ""
        yield [what, "1.0", ratio]


if __name__ == "__main__":
    main()
