"""A model that sees images is served as any other: to the cache, the tokens of an image are tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from tests.serving.conftest import Engine, assert_all_same
from tests.serving.tiny import make_codebook, make_model_with_images
from vllm_antkv.codebook import ModelIdentity, SinkRule
from vllm_antkv.config import AntKVConfig
from vllm_antkv.doctor.verify import EXACT, MAX_MODEL_LEN, STEP_TOKENS, Completion
from vllm_antkv.evaluate.methods import build_method
from vllm_antkv.laboratory.base import MethodRequest
from vllm_antkv.offline.attention import quantised_past

pytestmark = pytest.mark.serving

PRESET = "antkv-1bit"
OPTIONS: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": STEP_TOKENS,
    "kv_cache_memory_bytes": 64 << 20,
}
#: Tokens before and after each image; the last prompt has none.
LENGTHS = ((3, 30), (120, 40), (5, 290), (200, None))


class Prompts(NamedTuple):
    """What is asked."""

    model: Path
    requests: list[dict[str, Any]]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    folder = tmp_path_factory.mktemp("model")
    image_token = make_model_with_images(folder)
    make_codebook(folder / "antkv", folder, PRESET, SinkRule(layer=0, channels=(3,), threshold=0.05))
    requests = []
    for number, (before, after) in enumerate(LENGTHS):
        ids, more = [0, *range(3 + number, 2 + number + before)], {}
        if after is not None:
            ids = [*ids, image_token, *range(900, 900 + after)]
            # One colour each.
            more = {"multi_modal_data": {"image": Image.new("RGB", (64, 64), (90 * number, 40, 200))}}
        requests.append({"prompt_token_ids": ids, **more})
    return Prompts(folder, requests)


class Answer(NamedTuple):
    """To one request.

    ids: of the prompt, with as many tokens as an image has.
    """

    ids: list[int]
    completion: Completion


def ask(engine: Engine, requests: list[dict[str, Any]], together: bool = True) -> list[Answer]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5, ignore_eos=True)
    answers = []
    for batch in [requests] if together else [[request] for request in requests]:
        for output in engine.llm.generate(batch, params, use_tqdm=False):
            (best,) = output.outputs
            logprobs = tuple({token: each.logprob for token, each in step.items()} for step in best.logprobs)
            completion = Completion(tuple(best.token_ids), logprobs, output.num_cached_tokens)
            answers.append(Answer(output.prompt_token_ids, completion))
    return answers


def completions(answers: list[Answer]) -> list[Completion]:
    return [answer.completion for answer in answers]


def evaluated(prompts: Prompts, answers: list[Answer]) -> list[torch.Tensor]:
    """Log-probabilities after each prompt, from the offline evaluator on what the text model is given."""
    identity = ModelIdentity.from_hf_config(AutoConfig.from_pretrained(prompts.model))
    method = build_method(PRESET, MethodRequest(str(prompts.model), identity, None, AntKVConfig()))
    model = AutoModelForImageTextToText.from_pretrained(prompts.model, dtype=torch.float32).eval()
    text_model, given = model.get_decoder(), []
    processor = AutoProcessor.from_pretrained(prompts.model)
    hook = text_model.register_forward_pre_hook(
        lambda module, args, options: given.append(options["inputs_embeds"]), with_kwargs=True
    )
    with torch.inference_mode():
        for request, answer in zip(prompts.requests, answers, strict=True):
            images = [data["image"] for data in [request.get("multi_modal_data")] if data]
            pixels = processor.image_processor(images=[images], return_tensors="pt") if images else {}
            model(input_ids=torch.tensor([answer.ids]), use_cache=False, **pixels)
        hook.remove()
        with quantised_past(model, method, MAX_MODEL_LEN):
            hidden = [text_model(inputs_embeds=rows, use_cache=False).last_hidden_state[0, -1] for rows in given]
        return [model.lm_head(row).log_softmax(-1) for row in hidden]


def test_serves_what_the_evaluator_computes(start_engine: Callable[..., Any], prompts: Prompts) -> None:
    with start_engine(prompts.model, PRESET, **OPTIONS) as engine:
        batched = ask(engine, prompts.requests)
        alone = ask(engine, prompts.requests, together=False)
        assert_all_same(completions(batched), completions(alone))
        assert any(answer.completion.num_cached_tokens for answer in alone)
        engine.assert_all_blocks_free()
    # An image has 16 tokens here, and three that say that it is one.
    assert [len(answer.ids) for answer in batched] == [
        before + (0 if after is None else 19 + after) for before, after in LENGTHS
    ]
    for answer, logprobs in zip(batched, evaluated(prompts, batched), strict=True):
        for token, logprob in answer.completion.top_logprobs[0].items():
            assert logprob == pytest.approx(float(logprobs[token]), abs=1e-3)


def test_equals_auto_where_every_row_is_exact(start_engine: Callable[..., Any], prompts: Prompts) -> None:
    with start_engine(prompts.model, "auto", **OPTIONS) as engine:
        auto = ask(engine, prompts.requests)
    with start_engine(prompts.model, PRESET, EXACT, **OPTIONS) as engine:
        assert_all_same(completions(ask(engine, prompts.requests)), completions(auto))
    seen = [answer.completion.tokens for answer in auto]
    assert len(set(seen)) > 1, "images and prompts make a difference"
