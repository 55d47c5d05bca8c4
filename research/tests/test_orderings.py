"""Orderings of the papers on the embedded model with the shipped codebooks, by more than noise."""

from pathlib import Path

from research.literature.registry import build_method
from research.literature.request import LiteratureRequest
from research.literature.sample import take_sample
from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.windows import load_windows
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.offline.score import score

ROOT = Path(__file__).parents[2]


def test_antkv_is_ahead_of_kvquant_and_kvquant_of_rounding() -> None:
    """KL divergence from the model's own predictions; margins are half of what was measured, or wider."""
    card = ModelCard.read(str(ROOT / "models" / "embedded"))
    model = card.load()
    windows = load_windows(ROOT / "LICENSE", card.tokenizer, context=768)[:2]
    sample = take_sample(model, windows[1:], "text")

    def divergence(name: str, recency: str, learned: bool = False) -> float:
        config = AntKVConfig(anchor_share=0.01, recency=recency, prefix=0, sinks=False)
        learned_from = sample if learned else None
        request = LiteratureRequest(card.name, card.identity, None, config, sample=learned_from)
        return score(model, build_method(name, request), windows[:1], against_own=True).fidelity.kl

    assert divergence("antkv-1bit", "none") < 0.6 * divergence("kvquant-1bit", "none")
    assert divergence("antkv-2bit", "none") < 0.8 * divergence("kvquant-2bit", "none")
    assert divergence("kvquant-2bit", "none") < 0.6 * divergence("rtn-2bit", "none")
    recent = divergence("antkv-1bit", "sliding:32")
    assert recent < 0.5 * divergence("kvquant-1bit", "sliding:32")
    assert recent < 0.4 * divergence("kvquant-1bit", "sliding:32", learned=True)
