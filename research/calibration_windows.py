"""How good a codebook is by the number of windows it is learned from: text of the model's own, and real text beside it.

    python -m research.calibration_windows NAME MODEL --text HELD_OUT --calibration TEXT

learns codebooks of 1 bit from ever more windows of 512 tokens, measures them on held-out text with the server's
defaults, puts the numbers into research/calibration-windows.json under NAME, and draws all models that stand there.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from research.figures import style
from vllm_antkv.calibrate.run import calibrate
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.methods import build_method
from vllm_antkv.evaluate.methods.request import MethodRequest
from vllm_antkv.evaluate.report import perplexity_of
from vllm_antkv.evaluate.windows import load_windows
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.offline.score import score

FIGURE = Path(__file__).with_name("calibration-windows.svg")
NUMBERS = FIGURE.with_suffix(".json")
PRESET = "antkv-1bit"
#: Of windows. The last has all the tokens that k-means takes at 1 bit.
COUNTS = (4, 8, 16, 32, 64, 128)
SEQ_LEN = 512
OWN, REAL = "its own text", "real text"
#: Held-out windows that judge.
JUDGES = 16


def measure(model: str, text: Path, calibration: Sequence[Path], seeds: int) -> dict[str, Any]:
    """Divergence from the model's own predictions in nats, and perplexity, by source, number of windows and seed."""
    card = ModelCard.read(model)
    loaded, held_out = card.load(), load_windows(text, card.tokenizer, SEQ_LEN, JUDGES)
    request = MethodRequest(model, card.identity, None, AntKVConfig())
    found: dict[str, Any] = {
        "full precision": perplexity_of(score(loaded, build_method("fp16", request), held_out).nll),
    }
    sources: dict[str, list[str]] = {OWN: []}
    if calibration:
        sources[REAL] = list(map(str, calibration))
    for source, texts in sources.items():
        rows = [
            [_of_codebook(card, loaded, held_out, texts, (count, seed)) for seed in range(seeds)] for count in COUNTS
        ]
        found[source] = {
            name: [[result[index] for result in row] for row in rows] for index, name in enumerate(("kl", "perplexity"))
        }
    return found


def _of_codebook(
    card: ModelCard, model: PreTrainedModel, held_out: torch.Tensor, texts: list[str], drawn: tuple[int, int]
) -> tuple[float, float]:
    """Of one that is learned from so many windows, drawn with this seed."""
    samples, seed = drawn
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        calibrate(CalibrationSettings(card.name, [PRESET], texts, out, samples=samples, seq_len=SEQ_LEN, seed=seed))
        method = build_method(PRESET, MethodRequest(card.name, card.identity, out, AntKVConfig()))
        scores = score(model, method, held_out, against_own=True)
    assert scores.fidelity is not None
    print(f"{samples} windows, seed {seed}: KL {scores.fidelity.kl:.5f}, perplexity {perplexity_of(scores.nll):.4f}")
    return scores.fidelity.kl, perplexity_of(scores.nll)


def draw(models: dict[str, Any]) -> None:
    """Write the figure: a panel for each model, the mean over the seeds."""
    figure, panels = style.canvas("Divergence by the number of windows a codebook is learned from (1 bit)", len(models))
    for panel, (name, found) in zip(panels, models.items(), strict=True):
        sources = {
            source: [1e3 * statistics.mean(kl) for kl in found[source]["kl"]]
            for source in (OWN, REAL)
            if source in found
        }
        style.lines(panel, COUNTS, sources)
        panel.set_xscale("log", base=2)
        panel.set_xticks(COUNTS, [str(count) for count in COUNTS])
        panel.set_ylim(bottom=0)
        style.label(panel, name, f"windows of {SEQ_LEN} tokens", "KL from full precision, thousandths of a nat")
    with tempfile.TemporaryDirectory() as folder:
        style.save(figure, Path(folder), FIGURE.stem)
        shutil.copyfile(Path(folder, FIGURE.name), FIGURE)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the model, in the figure")
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True, help="held-out text that judges")
    parser.add_argument("--calibration", type=Path, action="append", default=[], help="real text to learn from")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    models = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    models[given.name] = measure(given.model, given.text, given.calibration, given.seeds)
    NUMBERS.write_text(json.dumps(models, indent=1) + "\n")
    draw(models)


if __name__ == "__main__":
    main()
