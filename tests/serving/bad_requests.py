"""Requests that a server must refuse: what is wrong with each, and words of the answer.

The model has 1024 positions. A good request is `GOOD`, or `GOOD_CHAT`, sent to its path with the API key.
"""

import json
from dataclasses import dataclass, field
from typing import Any

MAX_MODEL_LEN = 1024
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
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
    "no prompt": ({"prompt": None}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "token id just beyond the vocabulary": ({"prompt": [5, 50_257]}, "vocabulary"),
    "token id negative": ({"prompt": [5, -1]}, "greater than or equal to 0"),
    "token id beyond 64 bits": ({"prompt": [5, HUGE]}, "vocab"),
    "max_tokens over the context": ({"max_tokens": MAX_MODEL_LEN + 1}, "cannot be greater than max_model_len"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "n absurd": ({"n": 10**9}, "n must be"),
    "logprobs absurd": ({"logprobs": 10**6}, "logprobs"),
    "prompt_logprobs of a stream": ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    "temperature negative": ({"temperature": -0.1}, "temperature"),
    "allowed_token_ids beyond the vocabulary": ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    "logit_bias beyond the vocabulary": ({"logit_bias": {"1000000": 1}}, "logit_bias"),
    "beams without end": ({"use_beam_search": True, "n": 10**9}, "n"),
    "truncate_prompt_tokens over the context": ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
    "JSON schema that is none": ({"structured_outputs": {"json": "{"}}, "Invalid JSON grammar"),
    "regex that is none": ({"structured_outputs": {"regex": "("}}, "rammar"),
    "unknown model": ({"model": "larger"}, "larger"),
    "path for a model": ({"model": "../../etc/passwd"}, "passwd"),
    "cache_salt empty": ({"cache_salt": ""}, "cache_salt"),
}

#: As above, of a good chat request.
CHAT_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": None}, "messages"),
    "conversation over the context": ({"messages": [{"role": "user", "content": "word " * 5000}]}, "context length"),
    "an image for a language model": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
            ]
        },
        "multimodal",
    ),
    "n absurd": ({"n": 10**9}, "n must be"),
    "template of the request": ({"chat_template": "{{ ''.__class__ }}"}, "template"),
    "tool_choice without tools": ({"tool_choice": "required"}, "tool"),
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
    "body nested a hundred thousand times": Raw("error parsing the body", content=(DEEP + "]" * 100_000).encode()),
    "body not UTF-8": Raw("error parsing the body", content=b'{"model": "embedded", "prompt": "\xff\xfe"}'),
    "half of a surrogate pair": Raw(
        "TextEncodeInput", content=b'{"model": "embedded", "prompt": "\\ud800", "max_tokens": 2}'
    ),
    "temperature not a number": Raw("temperature", content=b'{"model": "embedded", "prompt": "a", "temperature": NaN}'),
    "number of 5000 digits": Raw(
        "error parsing the body", content=b'{"model": "embedded", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}"
    ),
    "ten MiB of prompt": Raw("context length", content=_json({"prompt": "a" * (10 << 20)})),
    "a million token ids": Raw("context length", content=_json({"prompt": [5] * 10**6})),
    "plain text": Raw(
        "Only 'application/json' is allowed", content=_json(GOOD), headers={"Content-Type": "text/plain"}
    ),
    "no API key": Raw("Unauthorized", content=_json(GOOD), headers={"Authorization": ""}, status=401),
    "another API key": Raw("Unauthorized", content=_json(GOOD), headers={"Authorization": "Bearer x"}, status=401),
    "path out of the tree": Raw("Not Found", path="/v1/../../etc/passwd", status=404),
    "POST to the status": Raw("Method Not Allowed", path="/antkv/status", status=405),
    "embeddings of a generating model": Raw(
        "Not Found", path="/v1/embeddings", content=_json({"input": "a"}), status=404
    ),
    "LoRA adapters at run time": Raw("Not Found", path="/v1/load_lora_adapter", content=_json({}), status=404),
}

_HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\n"

#: What is no HTTP, as it goes over the wire. The answer is 400.
WIRE: dict[str, bytes] = {
    "a TLS greeting": b"\x16\x03\x01 hello\r\n\r\n",
    "two lengths": f"{_HEAD}Content-Length: 2\r\nContent-Length: 5\r\n\r\n{{}}".encode(),
    "length and chunks": f"{_HEAD}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode(),
    "chunk of no size": f"{_HEAD}Transfer-Encoding: chunked\r\n\r\nxyz\r\n{{}}\r\n0\r\n\r\n".encode(),
}
