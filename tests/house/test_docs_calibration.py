"""docs/calibration.md has what is computed, and what was measured."""

from pathlib import Path

from scripts.calibration_time import stages

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
