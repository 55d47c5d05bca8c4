"""What clients ask of an OpenAI server beside plain completions: each once, through OpenAI's own client.

A question returns what two servers must agree on, or one server with itself: tokens, texts, log-probabilities.
"""

import base64
import io
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from openai import OpenAI
from safetensors import safe_open

from tests.serving.embedded_server import EMBEDDED, MODEL_NAME

TEXT = (EMBEDDED.parents[1] / "LICENSE").read_text()
#: Ends in the third VQ block.
PROMPT: list[int] = [0, *range(100, 400)]
MESSAGES: Any = [{"role": "user", "content": TEXT[:1500]}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "size": {"enum": [1, 2, 3]}},
    "required": ["colour", "size"],
    "additionalProperties": False,
}


def complete(client: OpenAI, prompt: list[int] = PROMPT, /, **options: Any) -> Any:
    """A greedy completion with log-probabilities, unless `options` say otherwise."""
    options = {"max_tokens": 12, "temperature": 0, "logprobs": 3, "extra_body": {}, **options}
    options["extra_body"] = {"ignore_eos": True, **options["extra_body"]}
    return client.completions.create(model=MODEL_NAME, prompt=prompt, **options)


def chat(client: OpenAI, **options: Any) -> Any:
    options = {"max_tokens": 60, "temperature": 0, **options}
    return client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, **options).choices[0].message


def _seen(choice: Any) -> Any:
    return choice.text, choice.logprobs.token_logprobs


def structured_outputs(client: OpenAI) -> Any:
    schema = {"type": "json_schema", "json_schema": {"name": "wall", "schema": SCHEMA}}
    letters = {"structured_outputs": {"regex": "[a-f]{8}"}}
    return chat(client, response_format=schema).content, chat(client, extra_body=letters).content


def tool_calls(client: OpenAI) -> Any:
    paint = {"name": "paint", "description": "Paint a wall.", "parameters": SCHEMA}
    named = {"type": "function", "function": {"name": "paint"}}
    message = chat(client, tools=[{"type": "function", "function": paint}], tool_choice=named)
    (call,) = message.tool_calls
    assert call.function.name == "paint"
    return call.function.arguments


def beam_search(client: OpenAI) -> Any:
    answer = complete(client, n=3, logprobs=None, extra_body={"use_beam_search": True})
    return [choice.text for choice in answer.choices]


def several_answers(client: OpenAI) -> Any:
    choices = complete(client, n=3, temperature=1, seed=1).choices
    assert len({choice.text for choice in choices}) > 1
    return [_seen(choice) for choice in choices]


def prompt_logprobs(client: OpenAI) -> Any:
    (choice,) = complete(client, extra_body={"prompt_logprobs": 0}).choices
    assert len(choice.prompt_logprobs) == len(PROMPT)
    return [next(iter(token.values()))["logprob"] for token in choice.prompt_logprobs[1:]]


def echo(client: OpenAI) -> Any:
    (choice,) = complete(client, echo=True).choices
    return _seen(choice)


def cache_salt(client: OpenAI) -> Any:
    """Requests with another salt find no page of this one."""
    salts = [uuid.uuid4().hex, uuid.uuid4().hex]
    prompt = PROMPT * 2
    answers = [complete(client, prompt, extra_body={"cache_salt": salts[index]}) for index in (0, 1, 0)]
    first, other, again = (answer.usage.prompt_tokens_details.cached_tokens or 0 for answer in answers)
    assert first == other == 0 < again
    return [_seen(answer.choices[0]) for answer in answers]


def priority(client: OpenAI) -> Any:
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda number: complete(client, extra_body={"priority": number}), (5, -1, 0, 3))
        return [_seen(answer.choices[0]) for answer in answers]


def stream(client: OpenAI) -> Any:
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 12
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    return "".join(part.text for part in parts), [x for part in parts for x in part.logprobs.token_logprobs]


def prompt_embeds(client: OpenAI) -> Any:
    """The embeddings of tokens get the answer of those tokens."""
    with safe_open(EMBEDDED / "model.safetensors", "pt") as file:
        embeddings = file.get_tensor("model.embed_tokens.weight").float()
    buffer = io.BytesIO()
    torch.save(embeddings[PROMPT], buffer)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    (choice,) = complete(client, [], extra_body={"prompt_embeds": encoded}).choices
    assert choice.text == complete(client).choices[0].text
    return _seen(choice)


def responses(client: OpenAI) -> Any:
    answer = client.responses.create(model=MODEL_NAME, input=TEXT[:1500], temperature=0, max_output_tokens=12)
    return answer.output_text


def batch(client: OpenAI) -> Any:
    conversations = [MESSAGES, [{"role": "user", "content": TEXT[2000:3000]}]]
    body = {"model": MODEL_NAME, "messages": conversations, "max_tokens": 12, "temperature": 0}
    answer: Any = client.post("/chat/completions/batch", cast_to=object, body=body)
    return [choice["message"]["content"] for choice in answer["choices"]]


def sleep(client: OpenAI) -> Any:
    """Level 0, which pauses the scheduler: vLLM has the others on GPUs alone."""
    root = str(client.base_url).removesuffix("v1/")
    client.post(f"{root}sleep?level=0", cast_to=object)
    client.post(f"{root}wake_up?tags=scheduling", cast_to=object)
    return _seen(complete(client).choices[0])


QUESTIONS: dict[str, Callable[[OpenAI], Any]] = {
    question.__name__: question
    for question in (
        structured_outputs,
        tool_calls,
        beam_search,
        several_answers,
        prompt_logprobs,
        echo,
        cache_salt,
        priority,
        stream,
        prompt_embeds,
        responses,
        batch,
        sleep,
    )
}
