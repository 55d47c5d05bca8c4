"""The commands of the documentation on a model: calibrate, and evaluate."""

import json
from pathlib import Path

from tests.serving.conftest import TEXT
from vllm_antkv import cli


def calibrate(model: Path, preset: str, out: Path) -> None:
    """`antkv calibrate`, on as few windows as there can be."""
    command = ["calibrate", str(model), "--preset", preset, "--text", str(TEXT), "--out", str(out)]
    assert cli.run([*command, "--samples", "2", "--seq-len", "160"]) == 0


def divergence(model: Path, preset: str, codebooks: Path) -> float:
    """`antkv eval compare`: how far predictions through a codebook are from the model's own, in nats per token."""
    report = codebooks / "report.json"
    command = ["eval", "compare", str(model), "--methods", preset, "--text", str(TEXT), "--json", str(report)]
    assert cli.run([*command, "--codebooks", str(codebooks), "--context", "256", "--max-windows", "1"]) == 0
    return float(json.loads(report.read_text())["fidelity"][preset]["kl"])
