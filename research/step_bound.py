"""Print what bounds a decode step: computed from sizes, nothing is measured.

python -m research.step_bound                                  the table
python -m research.step_bound --gpus h200-141 --contexts 16384     others
"""

import argparse
from collections.abc import Iterator

from transformers import LlamaConfig

from vllm_antkv.capacity.gpus import GPUS
from vllm_antkv.capacity.memory import DecodeShape, largest_batch
from vllm_antkv.capacity.step_bound import step_bound


def _llama(hidden: int, intermediate: int, layers: int, heads: int, head_dim: int, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=head_dim,
        tie_word_embeddings=tied,
    )


MODELS = {
    "Llama-3-8B": _llama(4096, 14336, 32, 32, 128, tied=False),
    "Llama-3.2-3B": _llama(3072, 8192, 28, 24, 128, tied=True),
}
HEADER = (
    "model",
    "GPU",
    "context",
    "batch of `auto`",
    "ms of it: matrices + attention",
    "batch of {cache}",
    "ms of it: matrices + attention",
    "gain at most",
    "if attention took no time",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=["h100-80", "h200-141"])
    parser.add_argument(
        "--contexts", nargs="+", type=int, default=[1024, 4096, 16384, 65536], help="tokens of a request"
    )
    parser.add_argument("--cache", default="antkv-1bit", help="value of --kv-cache-dtype (default: antkv-1bit)")
    arguments = parser.parse_args()
    header = [title.format(cache=arguments.cache) for title in HEADER]
    print(f"| {' | '.join(header)} |")
    print(f"|---|---|{'---:|' * (len(header) - 2)}")
    for line in rows(arguments.models, arguments.gpus, arguments.contexts, arguments.cache):
        print(f"| {' | '.join(line)} |")


def rows(models: list[str], gpus: list[str], contexts: list[int], cache: str) -> Iterator[list[str]]:
    """A line per model, GPU and context: both caches at the largest batches that fit."""
    for model in models:
        shape = DecodeShape.of(MODELS[model])
        for gpu in gpus:
            for context in contexts:
                batches = {dtype: largest_batch(shape, GPUS[gpu], dtype, context) for dtype in ("auto", cache)}
                auto, ours = (step_bound(shape, GPUS[gpu], dtype, context, n) for dtype, n in batches.items())
                cells = []
                for bound in (auto, ours):
                    cells += [f"{bound.batch:,}", f"{bound.matrices * 1e3:.1f} + {bound.attention * 1e3:.1f}"]
                gains = (
                    bound / auto.tokens_per_second for bound in (ours.tokens_per_second, ours.batch / ours.matrices)
                )
                yield [model, gpu.partition("-")[0].upper(), f"{context:,}", *cells, *(f"{gain:.1f}" for gain in gains)]


if __name__ == "__main__":
    main()
