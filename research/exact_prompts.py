"""How far answers are from the model's own behind prompts that attend to themselves exactly (`prefill_reads_cache`).

python -m research.exact_prompts MODEL --codebooks DIR --text FILE --prompts 512 1024 4096

Windows are twice as long as the prompt, and what is measured is their second half, whose tokens see the prompt through
the cache as a decode step does. The prompt is one step, in which its queries see each other through the cache
(`prefill_reads_cache: true`), or in full precision (`false`, the default).
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.methods import build_method
from vllm_antkv.evaluate.methods.request import MethodRequest
from vllm_antkv.evaluate.windows import load_windows
from vllm_antkv.offline.attention import attend_window
from vllm_antkv.offline.method import Attention, LayerWindow, Method
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.offline.score import score


def main() -> None:
    """Print a row for each length of prompts, as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--codebooks", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--method", default="antkv-1bit")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--tokens", type=int, default=16_384, help="that answers have, over all windows")
    given = parser.parse_args()
    card = ModelCard.read(given.model)
    model = card.load()
    request = MethodRequest(card.name, card.identity, given.codebooks, AntKVConfig())
    method = build_method(given.method, request)
    print("| prompt | windows | nats, true | false | same token, true | false |\n|---:|---:|---:|---:|---:|---:|")
    for prompt in given.prompts:
        windows = load_windows(given.text, card.tokenizer, 2 * prompt, max(given.tokens // prompt, 1))
        both = [answers(model, each, windows) for each in (method, replace(method, attention=exact_within(prompt)))]
        kl, same = zip(*both, strict=True)
        cells = [f"{prompt}", f"{len(windows)}", *(f"{each:.4f}" for each in kl), *(f"{each:.1%}" for each in same)]
        print(f"| {' | '.join(cells)} |", flush=True)


def answers(model: torch.nn.Module, method: Method, windows: torch.Tensor) -> tuple[float, float]:
    """Divergence from the model's own predictions and share of equal ones, in the second half of windows."""
    fidelity = score(model, method, windows, against_own=True).fidelity
    assert fidelity is not None
    band = fidelity.by_position[-1]
    assert band.first == windows.shape[1] // 2, "bands double: a prompt has 128 tokens or twice as many, and so on"
    return band.kl, band.top1_agreement


def exact_within(prompt: int) -> Attention:
    """The first `prompt` queries attend exactly, those behind them through the cache."""

    def attend(window: LayerWindow, method: Method, is_sink: torch.Tensor | None) -> torch.Tensor:
        output = attend_window(window, method, is_sink)
        rules = window.rules
        assert (rules.soft_cap, rules.sinks) == (None, None), "soft caps and learned sinks are not handled here"
        rows = (each[:, :prompt].transpose(1, 2) for each in (window.query, window.key, window.value))
        positions = torch.arange(prompt)
        seen = rules.visible(positions[:, None], positions)
        own = scaled_dot_product_attention(*rows, attn_mask=seen, scale=rules.scale, enable_gqa=True)
        return torch.cat([own.transpose(1, 2), output[:, prompt:]], dim=1)

    return attend


if __name__ == "__main__":
    main()
