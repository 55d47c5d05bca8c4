"""A model that sees images is served as any other: to the cache, the tokens of an image are tokens.

`test_images.py` runs this file, in a process that has torchvision.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.serving.conftest import Engine
from tests.serving.served_family import (
    OPTIONS,
    PRESET,
    assert_alike,
    assert_as_expected,
    assert_served,
    fills_a_block,
    learn,
    method_of,
)
from tests.serving.tiny_images import TEXT_ALONE, WITH_IMAGES
from tests.serving.turning import Turning
from vllm_antkv.doctor.verify import EXACT, MAX_MODEL_LEN, TOLERANCE, Completion, completion_of
from vllm_antkv.offline.attention import quantised_past
from vllm_antkv.offline.models import ModelCard

#: Tokens before and after the image of each prompt; the last prompt has none.
LENGTHS = ((3, 30), (120, 40), (5, 290), (200, None))


@dataclass(frozen=True)
class Answer:
    """To one request.

    ids: of the prompt, with as many tokens as an image has.
    """

    ids: list[int]
    completion: Completion


def make_requests(image_token: int) -> list[dict[str, Any]]:
    """As vLLM takes them; each image has pixels of its own."""
    requests = []
    for number, (before, after) in enumerate(LENGTHS):
        ids, more = [0, *range(3 + number, 2 + number + before)], {}
        if after is not None:
            ids = [*ids, image_token, *range(900, 900 + after)]
            pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
            more = {"multi_modal_data": {"image": Image.fromarray(pixels)}}
        requests.append({"prompt_token_ids": ids, **more})
    return requests


def ask(engine: Engine, requests: list[dict[str, Any]], together: bool = True) -> list[Answer]:
    """In one batch, or one after the other."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5, ignore_eos=True)
    answers = []
    for batch in [requests] if together else [[request] for request in requests]:
        for output in engine.llm.generate(batch, params, use_tqdm=False):
            answers.append(Answer(output.prompt_token_ids, completion_of(output)))
    return answers


def completions(answers: list[Answer]) -> list[Completion]:
    return [answer.completion for answer in answers]


def evaluated(
    folder: Path, codebooks: Path, requests: list[dict[str, Any]], answers: list[Answer]
) -> list[torch.Tensor]:
    """Log-probabilities after each prompt, from the offline evaluator on what the text model is given."""
    method = method_of(ModelCard.read(str(folder)), PRESET, codebooks)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    text_model, given = model.get_decoder(), []
    processor = AutoProcessor.from_pretrained(folder)
    hook = text_model.register_forward_pre_hook(
        lambda module, args, options: given.append({**options, "use_cache": False}), with_kwargs=True
    )
    with torch.inference_mode():
        for request, answer in zip(requests, answers, strict=True):
            data = request.get("multi_modal_data")
            pixels = processor.image_processor(images=[data["image"]], return_tensors="pt") if data else {}
            ids = torch.tensor([answer.ids])
            if "image_grid_thw" in pixels:
                pixels["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
            model(input_ids=ids, use_cache=False, **pixels)
        hook.remove()
        hidden = []
        for options in given:
            with turning_as(text_model, options.get("position_ids")), quantised_past(model, method, MAX_MODEL_LEN):
                hidden.append(text_model(**options).last_hidden_state[:, -1:])
        # Some scale what comes out.
        scale = getattr(model.config.get_text_config(), "logits_scaling", 1.0)
        return [(model.lm_head(row)[0, -1] / scale).log_softmax(-1) for row in hidden]


@contextmanager
def turning_as(text_model: Any, positions: torch.Tensor | None) -> Iterator[None]:
    """While open, a model with M-RoPE turns by these positions, (3, 1, num_tokens), of one prompt."""
    if positions is None or positions.ndim < 3:
        yield
        return
    rotary = text_model.rotary_emb
    text_model.rotary_emb = Turning(rotary, positions[-3:, 0])
    yield
    text_model.rotary_emb = rotary


@pytest.mark.parametrize(("model_type", "kind"), WITH_IMAGES.items(), ids=WITH_IMAGES.keys())
def test_with_images(start_engine, tmp_path, model_type, kind):
    model = tmp_path / "model"
    requests = make_requests(kind.make(model, model_type))
    random = learn(model)
    options = {**OPTIONS, "dtype": kind.dtype}
    with start_engine(model, PRESET, {"codebooks": str(random)}, **options) as engine:
        batched = ask(engine, requests)
        alone = ask(engine, requests, together=False)
        assert_alike(completions(batched), completions(alone), kind.dtype)
        found = any(answer.completion.num_cached_tokens for answer in alone)
        assert found == fills_a_block(engine, [answer.ids for answer in alone])
        engine.assert_all_blocks_free()
    assert [len(answer.ids) for answer in batched] == [
        before + (0 if after is None else kind.num_tokens + after) for before, after in LENGTHS
    ]
    expected = evaluated(model, random, requests, batched)
    assert_as_expected(completions(batched), expected, TOLERANCE[kind.dtype])
    with start_engine(model, "auto", **options) as engine:
        auto = ask(engine, requests)
    with start_engine(model, PRESET, EXACT, **options) as engine:
        assert_alike(completions(ask(engine, requests)), completions(auto), kind.dtype)
    assert len({answer.completion.tokens for answer in auto}) > 1, "images and prompts make a difference"


@pytest.mark.parametrize("model_type", TEXT_ALONE)
def test_text_alone(start_engine, tmp_path, model_type):
    model, kind = tmp_path / "model", WITH_IMAGES[model_type]
    kind.make(model, model_type)
    assert_served(start_engine, model, dtype=kind.dtype, language_model_only=True)
