"""Instructions of antkv_decode per tile of 32 tokens by kind, counted while its machine code runs.

python -m scripts.sm_model.instructions                print them
python -m scripts.sm_model.instructions --write FILE   record them
"""

import argparse
import json
from pathlib import Path

from scripts.sm_model.constants import Constants
from scripts.sm_model.decode import TILE, Run, Work, per_tile, run
from vllm_antkv.config import AntKVConfig

#: Tables in shared memory, read 16 and 8 bytes at a time, in L2, and in both: K's in that of a cluster.
PRESETS = ("antkv-1bit", "antkv-2bit", "antkv-0.375bit", "antkv-0.75bit")
#: Tokens: the second run has so many tiles more.
LENGTHS = (256, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    table = {preset: count(measure(preset)) for preset in PRESETS}
    text = json.dumps(table, indent=1)
    print(text)
    if arguments.write:
        arguments.write.write_text(text + "\n")


def measure(preset: str) -> tuple[Run, Run]:
    """A short and a longer run at default settings."""
    short, long = (run(preset, Work(length), AntKVConfig(), Constants()) for length in LENGTHS)
    return short, long


def count(runs: tuple[Run, Run]) -> dict[str, float]:
    """By kind."""
    short, long = runs
    return per_tile(short.report, long.report, (LENGTHS[1] - LENGTHS[0]) / TILE)


if __name__ == "__main__":
    main()
