"""Decode and prefill of real vLLM on this CPU: an antkv cache against vLLM's own (`auto`, and `fp8` where it runs).

All sides serve the same model: one with random weights, whose attention has the shape of Llama-3-8B's with fewer heads,
or the one that --model names. A decode step is timed as an engine step: scheduling, the whole model and sampling
included. The engines take turns every few steps, and a ratio is the median over turns: a machine that is slower for a
second is so for all of them. With --against, the package of another commit takes the place of vLLM's caches.

    python -m benchmarks.cpu_decode                          # the table of docs/performance.md
    python -m benchmarks.cpu_decode --against HEAD~1         # before kernels are changed for good
    python -m benchmarks.cpu_decode --model FOLDER --dtype float32 --contexts 1024 2048 4096 8000
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.checkout import built_at
from benchmarks.cpu_engine import ENVIRONMENT, Setting, start
from benchmarks.gpu.llama import random_codebook
from benchmarks.gpu.tables import table
from benchmarks.remote import Remote

HEAD_SIZE, NUM_KV_HEADS, NUM_LAYERS = 128, 2, 4
#: Query heads per KV head.
GROUP = 4
MAX_LEN = 33_000
#: Turns of each engine for a setting, and decode steps of a turn after those that only warm up.
TURNS, STEPS, WARM_UP = 8, 6, 2


def main() -> None:
    """Run all sides in turns, print the table, write the JSON."""
    from transformers import AutoConfig

    arguments = _arguments()
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or _make_model(Path(folder), arguments.kv_cache_dtype)
        longest = AutoConfig.from_pretrained(model).get_text_config().max_position_embeddings
        options = {"max_model_len": min(MAX_LEN, longest), "dtype": arguments.dtype}
        options["additional_config"] = {"antkv": {"kernels": arguments.kernels}}
        sides = {
            side: Remote(start, model, dtype, options, checkout)
            for side, (dtype, checkout) in _sides(arguments).items()
        }
        for engine in sides.values():
            # Nobody is to pay for what happens once in a process.
            engine.call("prefill", Setting(256, 1), STEPS)
            engine.call("decode", STEPS)
            engine.call("finish")
        settings = [Setting(context, batch) for context in arguments.contexts for batch in arguments.batches]
        rows = [_row(setting, _measure(sides, setting, arguments.rounds)) for setting in tqdm(settings)]
    name = arguments.model.name if arguments.model else f"random weights, {GROUP} query heads per KV head"
    report = {"kv_cache_dtype": arguments.kv_cache_dtype, "kernels": arguments.kernels, "model": name}
    report |= {"dtype": arguments.dtype, "machine": processor() | {"cpus": os.cpu_count()}, "rows": rows}
    print(_table(report))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-cache-dtype", default="antkv-1bit")
    parser.add_argument(
        "--against", metavar="COMMIT", help="Compare with a commit of this repository, not with vLLM's caches."
    )
    parser.add_argument("--model", type=Path, help="Folder of a model, served with its codebook (default: random).")
    parser.add_argument("--dtype", default="auto", help="Of weights and activations: float32 or bfloat16.")
    parser.add_argument("--kernels", default="auto", help="The antkv setting kernels.")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=2, help="Times that each setting is run from its prompts on.")
    parser.add_argument("--json", help="Write everything measured to this file.")
    return parser.parse_args()


def _sides(arguments: argparse.Namespace) -> dict[str, tuple[str, Path | None]]:
    """The KV cache's dtype of each side, and the folder of its package where that is not the installed one.

    The first is what the others are compared with.
    """
    sides: dict[str, tuple[str, Path | None]] = {"auto": ("auto", None), "fp8": ("fp8", None)}
    if arguments.against:
        sides = {arguments.against: (arguments.kv_cache_dtype, built_at(arguments.against))}
    elif "avx512_f" not in processor()["instructions"]:
        print("Without fp8: vLLM has no FP8 cache on processors without AVX-512.")
        del sides["fp8"]
    return sides | {"antkv": (arguments.kv_cache_dtype, None)}


def _make_model(folder: Path, preset: str) -> Path:
    """A model with random weights, and a codebook of random centroids beside it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from vllm_antkv.codebook import ModelIdentity, codebook_path

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=GROUP * NUM_KV_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_LEN,
        torch_dtype="bfloat16",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    # As spread out as the keys and values of these weights, so that all codes are used.
    codebook = random_codebook(ModelIdentity.from_hf_config(config), preset, (preset,) * NUM_LAYERS, spread=0.3)
    codebook.save(codebook_path(folder / "antkv", preset))
    return folder


def _measure(sides: dict[str, Remote], setting: Setting, rounds: int) -> dict[str, dict[str, list[Any]]]:
    """Of each side, seconds of each prefill and of the steps of each turn; who is first changes from turn to turn."""
    measured: dict[str, dict[str, list[Any]]] = {side: {"prefills": [], "turns": []} for side in sides}
    orders = cycle((list(sides), list(reversed(sides))))
    for _ in range(rounds):
        for side in next(orders):
            measured[side]["prefills"].append(sides[side].call("prefill", setting, TURNS * (STEPS + WARM_UP)))
        for _ in range(TURNS):
            for side in next(orders):
                measured[side]["turns"].append(sides[side].call("decode", STEPS + WARM_UP)[WARM_UP:])
        for engine in sides.values():
            engine.call("finish")
    return measured


def processor() -> dict[str, Any]:
    """The model of this processor, and what matters of its instructions."""
    import torch

    has = torch.cpu.get_capabilities()
    instructions = ("avx2", "avx512_f", "avx512_bf16", "avx512_fp16", "amx_bf16")
    return {
        "processor": has.get("cpu_name") or platform.processor() or platform.machine(),
        "instructions": [name for name in instructions if has.get(name)],
    }


def _row(setting: Setting, measured: dict[str, dict[str, list[Any]]]) -> dict[str, Any]:
    row: dict[str, Any] = asdict(setting)
    turns = {side: [statistics.median(steps) for steps in timings["turns"]] for side, timings in measured.items()}
    for side in turns:
        first, median, third = statistics.quantiles(turns[side])
        row[side] = {
            "step_seconds": median,
            "step_spread": third - first,
            "prefill_seconds": min(measured[side]["prefills"]),
        }
    base, *others = turns
    for side in others:
        ratios = [before / other for before, other in zip(turns[base], turns[side], strict=True)]
        prefills = zip(measured[side]["prefills"], measured[base]["prefills"], strict=True)
        row[side] |= {
            "speedup": statistics.median(ratios),
            "speedup_quartiles": statistics.quantiles(ratios)[::2],
            "prefill_ratio": statistics.median(other / before for other, before in prefills),
        }
    return row


def _table(report: dict[str, Any]) -> str:
    machine, rows = report["machine"], report["rows"]
    sides = [name for name, side in rows[0].items() if isinstance(side, dict)]
    base, *others = sides
    header = [
        *("context", "batch"),
        *(f"{side}: ms per step" for side in sides),
        *(f"{side}: tokens/s against {base}" for side in others),
        *(f"{side}: prefill time against {base}" for side in others),
    ]
    lines = []
    for row in rows:
        cells = [
            *(str(row["context"]), str(row["batch"])),
            *(f"{row[side]['step_seconds'] * 1e3:.2f} ± {row[side]['step_spread'] * 5e2:.2f}" for side in sides),
            *(_with_quartiles(row[side]) for side in others),
            *(f"{row[side]['prefill_ratio']:.2f}" for side in others),
        ]
        lines.append(cells)
    return (
        f"{report['kv_cache_dtype']} (kernels: {report['kernels']}) against {base}; "
        f"{report['model']}; dtype {report['dtype']}.\n"
        f"{machine['processor']} ({', '.join(machine['instructions'])}), {machine['cpus']} CPUs.\n\n"
        f"{table(header, lines)}"
    )


def _with_quartiles(side: dict[str, Any]) -> str:
    first, third = side["speedup_quartiles"]
    return f"{side['speedup']:.2f} ({first:.2f} to {third:.2f})"


if __name__ == "__main__":
    main()
