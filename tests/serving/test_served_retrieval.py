"""What is retrieved through real vLLM is what the offline evaluator says."""

import pytest

from tests.serving.conftest import ROOT
from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.methods import build_method
from vllm_antkv.evaluate.retrieval import evaluate_retrieval
from vllm_antkv.evaluate.retrieval_prompts import make_prompts
from vllm_antkv.evaluate.served import evaluate_retrieval_served
from vllm_antkv.laboratory.base import MethodRequest
from vllm_antkv.offline.models import ModelCard

pytestmark = pytest.mark.serving

#: Nothing exact but the current token: what is lost shows.
BARE = AntKVConfig(anchor_share=0.0, recency="none", prefix=0, sinks=False)


@pytest.mark.long
def test_served_retrieval_agrees_with_offline(eager: None) -> None:
    card = ModelCard.read(str(ROOT / "models" / "retrieval"))
    prompts = make_prompts(card.tokenizer, ["pairs", "passkey"], [400], [0.0, 0.5], 6)
    method = build_method("antkv-1bit", MethodRequest(card.name, card.identity, None, BARE))
    offline = evaluate_retrieval(card, card.load(), method, prompts)
    served = evaluate_retrieval_served(card, "antkv-1bit", BARE, prompts)
    # The engine computes in bfloat16: an answer on the edge may fall to either side.
    assert served.exact_match == pytest.approx(offline.exact_match, abs=2 / len(prompts))
    assert [cell.prompts for cell in served.cells] == [6] * 4
