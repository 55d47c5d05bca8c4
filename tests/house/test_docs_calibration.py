"""docs/calibration.md has what is computed, and what was measured."""

import json
import statistics
from pathlib import Path

from benchmarks.calibration_windows import COUNTS, NUMBERS, OWN, SEQ_LEN
from scripts.calibration_time import stages
from vllm_antkv.calibrate.once import TOKENS_PER_CENTROID

PAGE = (Path(__file__).parents[2] / "docs" / "calibration.md").read_text()


def test_the_time_of_an_8b_model_is_what_the_script_counts() -> None:
    found = stages("Llama-3-8B", "h100-80", "antkv-1bit", 26)
    for stage in found:
        assert f"| {stage.name} | {stage.work} | {stage.assumed} | {stage.seconds:.0f} |" in PAGE
    total = sum(stage.seconds for stage in found)
    assert f"| all | | | {total:.0f} |" in PAGE
    assert total < 300


def test_other_presets_and_fewer_cores_take_longer() -> None:
    def total(preset: str, cores: int) -> float:
        return sum(stage.seconds for stage in stages("Llama-3-8B", "h100-80", preset, cores))

    assert total("antkv-1bit", 26) < total("antkv-1bit", 16) < total("antkv-0.75bit", 16)


def test_the_table_of_windows_has_the_measured_means() -> None:
    found = json.loads(NUMBERS.read_text())["Llama of 3M parameters, on real stories"][OWN]
    rows = {
        "windows of 512 tokens": [str(count) for count in COUNTS],
        "divergence, thousandths of a nat": [f"{1e3 * statistics.mean(kl):.1f}" for kl in found["kl"]],
        "perplexity": [f"{statistics.mean(values):.3f}" for values in found["perplexity"]],
    }
    for name, cells in rows.items():
        assert f"| {name} | {' | '.join(cells)} |" in PAGE


def test_more_windows_than_a_server_takes_gain_less_than_seeds_differ() -> None:
    """What `TOKENS_PER_CENTROID` is chosen by."""
    found = json.loads(NUMBERS.read_text())["Llama of 3M parameters, on real stories"][OWN]["kl"]
    chosen = COUNTS.index(TOKENS_PER_CENTROID * 256 // SEQ_LEN)
    gained = statistics.mean(found[chosen]) - statistics.mean(found[-1])
    assert gained < max(found[chosen]) - min(found[chosen])
