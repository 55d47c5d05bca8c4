"""Fuzz for as long as asked: `python -m tests.fuzz --minutes 10`. The exit code is 1 if anything was found."""

import argparse
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given

from tests.fuzz.targets import TARGETS, Target

#: Of one target before it is the next one's turn; each round begins with another seed.
_EXAMPLES_PER_TURN = 200


def fuzz(name: str, target: Target, path: Path, seed: int, tried: Counter[str]) -> None:
    """Try some inputs, and count them. One that fails is made smaller, and raised as an exception."""

    @hypothesis.seed(seed)
    @given(target.inputs)
    @hypothesis.settings(
        max_examples=_EXAMPLES_PER_TURN,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.target, Phase.shrink],
    )
    def check(example: Any) -> None:
        tried[name] += 1
        target.check(example, path)

    check()


def main() -> int:
    """Take turns until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next one's is 1 higher")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    tried: Counter[str] = Counter()
    found: Counter[str] = Counter()
    seed = arguments.seed
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            for name, target in TARGETS.items():
                try:
                    fuzz(name, target, Path(folder, "codebook"), seed, tried)
                except Exception:
                    found[name] += 1
                    traceback.print_exc()
            seed += 1
    for name in TARGETS:
        print(f"{name}: {tried[name]} examples, {found[name]} findings")
    print(f"{tried.total()} examples, {found.total()} findings, seeds {arguments.seed} to {seed - 1}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
