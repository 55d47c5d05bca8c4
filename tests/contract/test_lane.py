"""What runs on a release of vLLM that is not installed."""

from scripts.vllm_lane import PARTS, ROOT, selected


def test_options_with_values_run_the_parts() -> None:
    """Not the whole suite, most of which needs what a chimera lacks."""
    options = ["-n", "2", "--dist", "loadfile", "-k", "hooks"]
    assert selected(options) == [*options, *PARTS]


def test_a_named_path_runs_alone() -> None:
    named = ["-x", "tests/serving/test_hooks.py::test_nothing"]
    assert selected(named) == named


def test_every_part_exists() -> None:
    assert all((ROOT / part.split("::")[0]).exists() for part in PARTS)
