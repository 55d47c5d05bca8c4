"""The table of releases says what vouches for each, and no more."""

from scripts.compatibility_page import PAGE, ROOT, is_locked_for_cpus, render, written
from scripts.vllm_lane import PARTS
from vllm_antkv.releases import LOCKED, SUPPORTED


def cells(minor: str) -> list[str]:
    rows = [line.split(" | ") for line in render().splitlines() if line.startswith("| ")]
    index = 1 + list(SUPPORTED).index(minor)
    return [row[index].strip(" |") for row in rows[1:]]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == written(PAGE.read_text()), "run `make docs`"


def test_a_release_runs_only_where_a_lock_installs_it() -> None:
    """A chimera is no engine of its release: it never fills a cell with "run"."""
    for minor, version in SUPPORTED.items():
        has_run = [cell for cell in cells(minor) if cell.startswith("run")]
        assert bool(has_run) == (version == LOCKED) == is_locked_for_cpus(minor)


def test_every_part_is_there() -> None:
    assert all((ROOT / part).exists() for part in PARTS)
