"""Requests that a server must refuse: what is wrong with each, and words of the answer.

The model has 1024 positions. A good request is `GOOD`, or `GOOD_CHAT`, sent to its path with the API key.
"""

import json
from dataclasses import dataclass, field
from typing import Any

MAX_MODEL_LEN = 1024
COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
GOOD: dict[str, Any] = {"prompt": [0, 5, 6], "max_tokens": 2, "temperature": 0}
GOOD_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
HUGE = 10**30
DEEP = "[" * 100_000
#: Neither a model of this name nor any file is looked for.
UNKNOWN_MODELS = {"larger", "../../etc/passwd"}

#: Fields that replace those of a good completion request; words of the answer.
COMPLETION_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "prompt that leaves no room for an answer": ({"prompt": [5] * MAX_MODEL_LEN}, "max_tokens must be at least 1"),
    "prompt one over the context": ({"prompt": [5] * (MAX_MODEL_LEN + 1)}, "context length"),
    "prompt far over": ({"prompt": [5] * 200_000}, "context length"),
    "text far over": ({"prompt": "word " * 200_000}, "context length"),
    "no prompt": ({"prompt": None}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "empty list of prompts": ({"prompt": []}, "prompt"),
    "prompt is a number": ({"prompt": 7}, "prompt"),
    "prompt is an object": ({"prompt": {"a": 1}}, "prompt"),
    "prompt of text and ids": ({"prompt": ["a", 1]}, "prompt"),
    "prompt of fractions": ({"prompt": [1.5, 2.5]}, "prompt"),
    "prompt nested too deeply": ({"prompt": [[[1]]]}, "prompt"),
    "token id beyond the vocabulary": ({"prompt": [5, 10**6]}, "out of vocabulary"),
    "token id just beyond the vocabulary": ({"prompt": [5, 50_257]}, "vocabulary"),
    "token id negative": ({"prompt": [5, -1]}, "greater than or equal to 0"),
    "token id beyond 64 bits": ({"prompt": [5, HUGE]}, "vocab"),
    "max_tokens over the context": ({"max_tokens": MAX_MODEL_LEN + 1}, "cannot be greater than max_model_len"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens negative": ({"max_tokens": -1}, "max_tokens"),
    "max_tokens beyond 64 bits": ({"max_tokens": HUGE}, "max_tokens"),
    "max_tokens a fraction": ({"max_tokens": 1.5}, "max_tokens"),
    "max_tokens a word": ({"max_tokens": "many"}, "max_tokens"),
    "min_tokens over max_tokens": ({"min_tokens": 3}, "min_tokens"),
    "min_tokens negative": ({"min_tokens": -1}, "min_tokens"),
    "n 0": ({"n": 0}, "n must be"),
    "n negative": ({"n": -3}, "n must be"),
    "n absurd": ({"n": 10**9}, "n must be"),
    "n beyond 64 bits": ({"n": HUGE}, "n"),
    "n a word": ({"n": "all"}, "n"),
    "n of a greedy request": ({"n": 2}, "n must be 1"),
    "logprobs absurd": ({"logprobs": 10**6}, "logprobs"),
    "logprobs negative": ({"logprobs": -7}, "logprobs"),
    "logprobs a word": ({"logprobs": "all"}, "logprobs"),
    "prompt_logprobs absurd": ({"prompt_logprobs": 10**6}, "logprobs"),
    "prompt_logprobs negative": ({"prompt_logprobs": -7}, "logprobs"),
    "prompt_logprobs of a stream": ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    "temperature negative": ({"temperature": -0.1}, "temperature"),
    "temperature a word": ({"temperature": "hot"}, "temperature"),
    "top_p 0": ({"top_p": 0, "temperature": 1}, "top_p"),
    "top_p over 1": ({"top_p": 1.1}, "top_p"),
    "top_k below -1": ({"top_k": -2}, "top_k"),
    "top_k a fraction": ({"top_k": 1.5}, "top_k"),
    "min_p over 1": ({"min_p": 2}, "min_p"),
    "min_p negative": ({"min_p": -1}, "min_p"),
    "presence_penalty over 2": ({"presence_penalty": 2.1}, "presence_penalty"),
    "frequency_penalty below -2": ({"frequency_penalty": -2.1}, "frequency_penalty"),
    "repetition_penalty 0": ({"repetition_penalty": 0}, "repetition_penalty"),
    "seed a word": ({"seed": "lucky"}, "seed"),
    "seed beyond 64 bits": ({"seed": HUGE}, "seed"),
    "stop is empty": ({"stop": [""]}, "stop"),
    "stop is a number": ({"stop": 7}, "stop"),
    "stop_token_ids of words": ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    "allowed_token_ids empty": ({"allowed_token_ids": []}, "allowed_token_ids"),
    "allowed_token_ids beyond the vocabulary": ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    "logit_bias beyond the vocabulary": ({"logit_bias": {"1000000": 1}}, "logit_bias"),
    "logit_bias of no token": ({"logit_bias": {"a": 1}}, "logit_bias"),
    "logit_bias is a list": ({"logit_bias": [1]}, "logit_bias"),
    "bad_words of numbers": ({"bad_words": [1]}, "bad_words"),
    "beams without end": ({"use_beam_search": True, "n": 10**9}, "n"),
    "echo a word": ({"echo": "perhaps"}, "echo"),
    "stream a word": ({"stream": "perhaps"}, "stream"),
    "stream_options without a stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "truncate_prompt_tokens over the context": ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
    "truncate_prompt_tokens below -1": ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    "response_format unknown": ({"response_format": {"type": "poem"}}, "response_format"),
    "structured output of nothing": ({"structured_outputs": {}}, "structured"),
    "structured output of two kinds": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured"),
    "JSON schema that is none": ({"structured_outputs": {"json": "{"}}, "Invalid JSON grammar"),
    "regex that is none": ({"structured_outputs": {"regex": "("}}, "rammar"),
    "grammar that is none": ({"structured_outputs": {"grammar": "no grammar"}}, "rammar"),
    "suffix": ({"suffix": "the end"}, "suffix"),
    "prompt_embeds switched off": ({"prompt": None, "prompt_embeds": "AAAA"}, "prompt"),
    "priority a word": ({"priority": "high"}, "priority"),
    "unknown model": ({"model": "larger"}, "larger"),
    "model a number": ({"model": 5}, "model"),
    "path for a model": ({"model": "../../etc/passwd"}, "passwd"),
    "cache_salt empty": ({"cache_salt": ""}, "cache_salt"),
    "cache_salt a number": ({"cache_salt": 5}, "cache_salt"),
    "request_id an object": ({"request_id": {"a": 1}}, "request_id"),
}

#: As above, of a good chat request.
CHAT_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": None}, "messages"),
    "messages empty": ({"messages": []}, "message"),
    "messages a text": ({"messages": "Hello"}, "messages"),
    "message without a role": ({"messages": [{"content": "Hello"}]}, "role"),
    "message without content": ({"messages": [{"role": "user", "content": 7}]}, "content"),
    "conversation over the context": ({"messages": [{"role": "user", "content": "word " * 5000}]}, "context length"),
    "an image for a language model": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
            ]
        },
        "multimodal",
    ),
    "content of an unknown kind": ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "smell"),
    "top_logprobs without logprobs": ({"top_logprobs": 3}, "logprobs"),
    "top_logprobs absurd": ({"logprobs": True, "top_logprobs": 10**6}, "logprobs"),
    "top_logprobs negative": ({"logprobs": True, "top_logprobs": -3}, "logprobs"),
    "max_completion_tokens negative": ({"max_completion_tokens": -1}, "max"),
    "max_completion_tokens over the context": ({"max_completion_tokens": 10**6}, "max"),
    "n absurd": ({"n": 10**9}, "n must be"),
    "template of the request": ({"chat_template": "{{ ''.__class__ }}"}, "template"),
    "tools that are none": ({"tools": "hammer"}, "tools"),
    "tool_choice without tools": ({"tool_choice": "required"}, "tool"),
    "tool_choice automatic": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool"),
}


@dataclass(frozen=True)
class Raw:
    """A request as bytes.

    status: of the answer, where it is not 400.
    """

    says: str
    path: str = COMPLETIONS
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 400
    method: str = "POST"


def _json(body: object) -> bytes:
    return json.dumps({"model": "embedded", **body} if isinstance(body, dict) else body).encode()


RAW: dict[str, Raw] = {
    "body empty": Raw("body"),
    "body cut": Raw("JSON", content=_json(GOOD)[:-1]),
    "body no JSON": Raw("JSON", content=b"prompt=hello"),
    "body a list": Raw("dict", content=b"[]"),
    "body a number": Raw("dict", content=b"7"),
    "body null": Raw("body", content=b"null"),
    "body without a closing bracket a hundred thousand times": Raw("error parsing the body", content=DEEP.encode()),
    "body nested a hundred thousand times": Raw("error parsing the body", content=(DEEP + "]" * 100_000).encode()),
    "body not UTF-8": Raw("error parsing the body", content=b'{"model": "embedded", "prompt": "\xff\xfe"}'),
    "body of zeros": Raw("JSON", content=bytes(1000)),
    "half of a surrogate pair": Raw(
        "TextEncodeInput", content=b'{"model": "embedded", "prompt": "\\ud800", "max_tokens": 2}'
    ),
    "temperature not a number": Raw("temperature", content=b'{"model": "embedded", "prompt": "a", "temperature": NaN}'),
    "temperature infinite": Raw(
        "temperature", content=b'{"model": "embedded", "prompt": "a", "temperature": Infinity}'
    ),
    "number of 5000 digits": Raw(
        "error parsing the body", content=b'{"model": "embedded", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}"
    ),
    "ten MiB of prompt": Raw("context length", content=_json({"prompt": "a" * (10 << 20)})),
    "a million token ids": Raw("context length", content=_json({"prompt": [5] * 10**6})),
    "hundred thousand unknown fields, bad prompt": Raw("prompt", content=_json({f"x{i}": i for i in range(10**5)})),
    "a form": Raw(
        "Only 'application/json' is allowed",
        content=b"prompt=a",
        headers={"Content-Type": "application/x-www-form-urlencoded"},
    ),
    "plain text": Raw(
        "Only 'application/json' is allowed", content=_json(GOOD), headers={"Content-Type": "text/plain"}
    ),
    "no content type": Raw("Only 'application/json' is allowed", content=_json(GOOD), headers={"Content-Type": ""}),
    "gzip that is announced and not there": Raw(
        "error parsing the body", content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"}
    ),
    "no API key": Raw("Unauthorized", content=_json(GOOD), headers={"Authorization": ""}, status=401),
    "another API key": Raw("Unauthorized", content=_json(GOOD), headers={"Authorization": "Bearer x"}, status=401),
    "API key without its scheme": Raw(
        "Unauthorized", content=_json(GOOD), headers={"Authorization": "sesame"}, status=401
    ),
    "unknown path": Raw("Not Found", path="/v1/poems", content=_json(GOOD), status=404),
    "path out of the tree": Raw("Not Found", path="/v1/../../etc/passwd", status=404),
    "GET of completions": Raw("Method Not Allowed", method="GET", status=405),
    "DELETE of completions": Raw("Method Not Allowed", method="DELETE", status=405),
    "POST to the status": Raw("Method Not Allowed", path="/antkv/status", status=405),
    "embeddings of a generating model": Raw(
        "Not Found", path="/v1/embeddings", content=_json({"input": "a"}), status=404
    ),
    "answer to an unknown response": Raw("not found", path="/v1/responses/resp_none", method="GET", status=404),
    "LoRA adapters at run time": Raw("Not Found", path="/v1/load_lora_adapter", content=_json({}), status=404),
    "detokenize negative": Raw("greater than or equal to 0", path=DETOKENIZE, content=_json({"tokens": [-1]})),
    "detokenize words": Raw("tokens", path=DETOKENIZE, content=_json({"tokens": ["a"]})),
    "tokenize a number": Raw("valid string", path=TOKENIZE, content=_json({"prompt": 5})),
    "tokenize nothing": Raw("Field required", path=TOKENIZE, content=_json({})),
}

_HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\n"

#: What is no HTTP, as it goes over the wire. The answer is 400.
WIRE: dict[str, bytes] = {
    "a TLS greeting": b"\x16\x03\x01 hello\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "HTTP of the far future": b"GET /health HTTP/9.9\r\n\r\n",
    "negative length": f"{_HEAD}Content-Length: -5\r\n\r\n".encode(),
    "length a word": f"{_HEAD}Content-Length: many\r\n\r\n".encode(),
    "two lengths": f"{_HEAD}Content-Length: 2\r\nContent-Length: 5\r\n\r\n{{}}".encode(),
    "length and chunks": f"{_HEAD}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode(),
    "chunk of no size": f"{_HEAD}Transfer-Encoding: chunked\r\n\r\nxyz\r\n{{}}\r\n0\r\n\r\n".encode(),
    "zero byte in a header": f"{_HEAD}X: a\0b\r\n\r\n".encode(),
}
