"""Decode and prefill of real vLLM on this CPU: an antkv cache against vLLM's own in bfloat16 (`auto`) and FP8 (`fp8`).

All sides serve the same model with random weights, whose attention has the shape of Llama-3-8B's with fewer heads, in
processes that take turns. A decode step is timed as an engine step: scheduling, the whole model and sampling included.

    python benchmarks/cpu_decode.py                          # the table of docs/performance.md
    python benchmarks/cpu_decode.py --contexts 1024 --batches 1 --rounds 1
    python benchmarks/cpu_decode.py --kernels avx512         # insists on kernels, as the setting of that name
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HEAD_SIZE, NUM_KV_HEADS, NUM_LAYERS = 128, 2, 4
MAX_LEN = 33_000
#: Decode steps timed per setting, after a few that are not.
STEPS, WARM_UP = 24, 4
SIDES = ("auto", "fp8", "antkv")


@dataclass(frozen=True)
class Setting:
    """`batch` requests of `context` tokens."""

    context: int
    batch: int


def main() -> None:
    """Run both sides in turns, print the table, write the JSON."""
    arguments = _arguments()
    if arguments.worker:
        _work(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = _make_model(Path(folder), arguments.kv_cache_dtype, arguments.group)
        bandwidth = _memory_bandwidth()
        rounds: dict[str, list[dict[str, Any]]] = {"auto": [], "fp8": [], arguments.kv_cache_dtype: []}
        for number in range(arguments.rounds):
            for dtype in rounds:
                print(f"round {number + 1} of {arguments.rounds}: {dtype}", file=sys.stderr, flush=True)
                rounds[dtype].append(_run_worker(model, dtype, arguments))
    report = {"kv_cache_dtype": arguments.kv_cache_dtype, "group": arguments.group, "kernels": arguments.kernels}
    report |= {"machine": processor() | {"cpus": os.cpu_count(), "bandwidth": bandwidth}}
    report["rows"] = _rows(rounds, bandwidth, _settings(arguments), arguments.kv_cache_dtype)
    print(_table(report))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-cache-dtype", default="antkv-1bit")
    parser.add_argument("--kernels", default="auto", help="The antkv setting kernels.")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--group", type=int, default=4, help="Query heads per KV head (Llama-3-8B has 4, 70B 8).")
    parser.add_argument("--rounds", type=int, default=2, help="Processes per side.")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="OMP_NUM_THREADS of both sides.")
    parser.add_argument("--json", help="Write everything measured to this file.")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


def _settings(arguments: argparse.Namespace) -> list[Setting]:
    return [Setting(context, batch) for context in arguments.contexts for batch in arguments.batches]


def _make_model(folder: Path, preset_name: str, group: int) -> Path:
    """A model with random weights, and a codebook of random centroids beside it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from vllm_antkv.codebook import FORMAT_VERSION, Codebook, CodebookHeader, ModelIdentity, codebook_path
    from vllm_antkv.ops.rope import RotaryTable, interleaved
    from vllm_antkv.presets import get_preset

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=group * NUM_KV_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_LEN,
        torch_dtype="bfloat16",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    preset, identity = get_preset(preset_name), ModelIdentity.from_hf_config(config)
    shape = (NUM_LAYERS, NUM_KV_HEADS, preset.num_sub_vectors(HEAD_SIZE), preset.num_centroids, preset.sub_vector_size)
    pairs = torch.zeros(1, HEAD_SIZE // 2)
    order = interleaved(RotaryTable(pairs, pairs), HEAD_SIZE, preset.sub_vector_size)
    header = CodebookHeader(
        format_version=FORMAT_VERSION,
        preset=preset_name,
        model=identity,
        sinks=None,
        k_orders={preset_name: tuple(order)},
        calibration={},
    )
    path = codebook_path(folder / "antkv", preset_name)
    path.parent.mkdir()
    # As spread out as the keys and values of these weights, so that all codes are used.
    k, v = (0.3 * torch.randn(shape) for _ in "kv")
    Codebook(header, tuple(k.half()), tuple(v.half())).save(path)
    return folder


def _run_worker(model: Path, dtype: str, arguments: argparse.Namespace) -> dict[str, Any]:
    out = model / "worker.json"
    command = [sys.executable, __file__, "--worker", str(out), "--model", str(model), "--kv-cache-dtype", dtype]
    command += [
        "--kernels",
        arguments.kernels,
        "--contexts",
        *map(str, arguments.contexts),
        "--batches",
        *map(str, arguments.batches),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())


def _work(arguments: argparse.Namespace) -> None:
    """One side: an engine in this process, every setting once."""
    from vllm import LLM

    llm = LLM(
        arguments.model,
        skip_tokenizer_init=True,
        kv_cache_dtype=arguments.kv_cache_dtype,
        additional_config={"antkv": {"kernels": arguments.kernels}},
        max_model_len=MAX_LEN,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        enforce_eager=True,
        seed=0,
    )
    results = {f"{setting.context}x{setting.batch}": _time(llm, setting) for setting in _settings(arguments)}
    Path(arguments.worker).write_text(json.dumps(results))


def _time(llm: Any, setting: Setting) -> dict[str, Any]:
    """Seconds of the prefill of one prompt, and of each decode step of the batch."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    # The batch must be complete before anybody finishes: with chunked prefill, the first ones decode meanwhile.
    waiting = setting.batch * (setting.context // 2048 + 2)
    parameters = SamplingParams(max_tokens=waiting + STEPS + WARM_UP, ignore_eos=True, temperature=0, detokenize=False)
    for index in range(setting.batch):
        tokens = [(7 * position + 13 * index) % 4000 + 3 for position in range(setting.context)]
        engine.add_request(f"{setting}-{index}", {"prompt_token_ids": tokens}, parameters)
    scheduler = engine.engine_core.engine_core.scheduler
    prefill = 0.0
    while scheduler.waiting or any(request.num_output_tokens < 1 for request in scheduler.running):
        start = time.perf_counter()
        engine.step()
        prefill += time.perf_counter() - start
    steps = []
    for _ in range(STEPS + WARM_UP):
        start = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - start)
    engine.abort_request([f"{setting}-{index}" for index in range(setting.batch)])
    while engine.has_unfinished_requests():
        engine.step()
    return {"prefill": prefill, "steps": steps[WARM_UP:]}


def _memory_bandwidth() -> float:
    """Bytes per second of reading 512 MiB with all threads, the best of five."""
    import torch

    data = torch.ones(128 << 20, dtype=torch.float32)
    best = min(_seconds(data.sum) for _ in range(5))
    return data.nbytes / best


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _kv_bytes(dtype: str, setting: Setting) -> float:
    """Bytes of the cache that a decode step reads."""
    import torch

    from vllm_antkv.cache.footprint import footprint
    from vllm_antkv.cache.pages import PageLayout
    from vllm_antkv.config import AntKVConfig
    from vllm_antkv.presets import get_preset

    heads = NUM_LAYERS * NUM_KV_HEADS * setting.batch
    if dtype in ("auto", "fp8"):
        return heads * setting.context * HEAD_SIZE * 2 * (2 if dtype == "auto" else 1)
    config = AntKVConfig()
    layout = PageLayout.of(config, get_preset(dtype), HEAD_SIZE, torch.bfloat16)
    parts = footprint([layout], config, setting.context)
    return heads * (parts.codes + parts.anchors + parts.recency)


def processor() -> dict[str, Any]:
    """The model of this processor, its clock where known, its caches, and what matters of its instructions."""
    import torch

    has = torch.cpu.get_capabilities()
    clocks = re.findall(r"cpu MHz\s*: ([\d.]+)", Path("/proc/cpuinfo").read_text())
    instructions = ("avx2", "avx512_f", "avx512_bf16", "avx512_fp16", "amx_bf16")
    return {
        "processor": has.get("cpu_name") or platform.processor() or platform.machine(),
        "mhz": float(clocks[0]) if clocks else None,
        "instructions": [name for name in instructions if has.get(name)],
        "l1d_bytes": has.get("l1d_cache_size"),
        "l2_bytes": has.get("l2_cache_size"),
    }


def _rows(
    rounds: dict[str, list[dict[str, Any]]], bandwidth: float, settings: list[Setting], dtype: str
) -> list[dict[str, Any]]:
    rows = []
    for setting in settings:
        row: dict[str, Any] = asdict(setting)
        for side, name in (("auto", "auto"), ("fp8", "fp8"), (dtype, "antkv")):
            results = [result[f"{setting.context}x{setting.batch}"] for result in rounds[side]]
            step = statistics.median(value for result in results for value in result["steps"])
            quartiles = statistics.quantiles([value for result in results for value in result["steps"]])
            row[name] = {
                "step_seconds": step,
                "step_spread": quartiles[2] - quartiles[0],
                "tokens_per_second": setting.batch / step,
                "prefill_seconds": min(result["prefill"] for result in results),
                "kv_bytes": _kv_bytes(side, setting),
                "share_of_bandwidth": _kv_bytes(side, setting) / step / bandwidth,
            }
        for name in ("fp8", "antkv"):
            row[name]["speedup"] = row["auto"]["step_seconds"] / row[name]["step_seconds"]
            row[name]["prefill_ratio"] = row[name]["prefill_seconds"] / row["auto"]["prefill_seconds"]
        rows.append(row)
    return rows


def _table(report: dict[str, Any]) -> str:
    machine = report["machine"]
    clock = f" at {machine['mhz'] / 1000:.1f} GHz" if machine["mhz"] else ""
    lines = [
        f"{report['kv_cache_dtype']} (kernels: {report['kernels']}) against vLLM's own caches; {report['group']} "
        "query heads per KV head.",
        f"{machine['processor']}{clock} ({', '.join(machine['instructions'])}), {machine['cpus']} CPUs, "
        f"{machine['bandwidth'] / 1e9:.1f} GB/s.",
        "",
        "| context | batch | ms per step: auto | fp8 | antkv | tokens/s against auto: fp8 | antkv "
        "| KV MB read: auto | antkv | prefill time against auto: fp8 | antkv |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        sides = [row[name] for name in SIDES]
        steps = [f"{side['step_seconds'] * 1e3:.2f} ± {side['step_spread'] * 5e2:.2f}" for side in sides]
        speedups = [f"{side['speedup']:.2f}" for side in sides[1:]]
        bytes_read = [f"{row[name]['kv_bytes'] / 1e6:.1f}" for name in ("auto", "antkv")]
        prefills = [f"{side['prefill_ratio']:.2f}" for side in sides[1:]]
        lines.append(
            f"| {' | '.join(map(str, [row['context'], row['batch'], *steps, *speedups, *bytes_read, *prefills]))} |"
        )
    return "\n".join([*lines, "", *_growth(report["rows"])])


def _growth(rows: list[dict[str, Any]]) -> list[str]:
    """For every batch, what a token more in the context adds to a step: the cost of attention without all the rest."""
    lines = []
    for batch in sorted({row["batch"] for row in rows}):
        same = sorted((row for row in rows if row["batch"] == batch), key=lambda row: row["context"])
        first, last = same[0], same[-1]
        if first is last:
            continue
        tokens = batch * (last["context"] - first["context"]) * NUM_LAYERS * NUM_KV_HEADS
        seconds = {side: last[side]["step_seconds"] - first[side]["step_seconds"] for side in SIDES}
        ns = {side: grown / tokens * 1e9 for side, grown in seconds.items()}
        lines.append(
            f"Batch {batch}, from {first['context']} to {last['context']} tokens: a step grows by "
            + ", ".join(f"{ns[side]:.1f} ns ({side})" for side in SIDES)
            + " per token, layer and KV head."
        )
    return lines


if __name__ == "__main__":
    main()
