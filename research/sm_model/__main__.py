"""How long antkv_decode takes on a Hopper multiprocessor, by a model that executes its machine code. No GPU is needed.

python -m research.sm_model                              default settings, every preset with CUDA kernels
python -m research.sm_model --anchor-share 0 0.05        and with other shares of anchors
python -m research.sm_model --json FILE                  also write what was found
python -m research.sm_model --constants FILE             with constants that research.gpu_constants measured
"""

import argparse
import dataclasses
import json
from pathlib import Path

from research.sm_model.constants import Constants, measured
from research.sm_model.decode import Prediction, predict
from research.sm_model.times import against_flash_attention
from vllm_antkv.ops.cuda import FORMATS
from vllm_antkv.presets import PRESETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    served = [name for name, p in PRESETS.items() if (p.sub_vector_size, p.num_centroids) in FORMATS]
    parser.add_argument("--preset", nargs="*", choices=served, default=served)
    parser.add_argument("--anchor-share", nargs="*", type=float, default=[], metavar="SHARE")
    parser.add_argument("--constants", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    constants = measured(arguments.constants)
    found: dict[str, dict[str, Prediction]] = {}
    print("Predicted cycles per (token, KV head) at head size 128, 4 query heads; speed against FlashAttention 3")
    columns = ("cycles", "a split", "a request", "votes", "the last", "instructions", "H100", "H200")
    print(f"{'preset':15} {'anchors':>8}", *(f"{column:>{len(column) + 2}}" for column in columns))
    for preset in arguments.preset:
        for share in (None, *arguments.anchor_share):
            name = "default" if share is None else str(share)
            prediction = predict(preset, constants, share)
            found.setdefault(name, {})[preset] = prediction
            ratios = against_flash_attention(prediction)
            print(
                f"{preset:15} {name:>8} {prediction.cycles:8.1f} {prediction.split_cycles:9.0f}"
                f" {prediction.request_cycles:11.0f} {prediction.vote_cycles:7.0f} {prediction.last_vote_cycles:10.0f}"
                f" {prediction.instructions:14.0f}"
                f" {ratios['H100']:5.1f}x {ratios['H200']:5.1f}x",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(_as_json(found, constants), indent=1) + "\n")


def _as_json(found: dict[str, dict[str, Prediction]], constants: Constants) -> dict[str, object]:
    tables = {name: {p: dataclasses.asdict(value) for p, value in table.items()} for name, table in found.items()}
    return {
        "decode": tables.pop("default", {}),
        "decode_by_anchor_share": tables,
        "constants": dataclasses.asdict(constants),
    }


if __name__ == "__main__":
    main()
