"""Requests to an OpenAI-compatible server, as paths and bodies; and the three things to ask it before a test."""

import os
import random
from dataclasses import dataclass
from typing import Any

import httpx

from loadtest.prose import Prose, words

LOOPBACK = "http://127.0.0.1:8000"
_SAMPLE_WORDS = 1000
_TIMEOUT = 60.0


@dataclass(frozen=True)
class Request:
    """A request whose answer is a stream of exactly `max_tokens` tokens."""

    path: str
    body: dict[str, Any]
    max_tokens: int


def completion(model: str, prompt: str, max_tokens: int, temperature: float = 0.7) -> Request:
    """Continue a prompt."""
    return _request("/v1/completions", model, max_tokens, temperature, prompt=prompt)


def chat(model: str, messages: list[dict[str, str]], max_tokens: int, temperature: float = 0.7) -> Request:
    """Answer the last message."""
    return _request("/v1/chat/completions", model, max_tokens, temperature, messages=messages)


def _request(path: str, model: str, max_tokens: int, temperature: float, **content: Any) -> Request:
    """Answers never stop early: the work is then the same, whatever the model says."""
    fixed = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    body = {"model": model, "max_tokens": max_tokens, "temperature": temperature, **fixed, **content}
    return Request(path, body, max_tokens)


def headers() -> dict[str, str]:
    """The API key that vLLM reads, too, where there is one."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def served_model(url: str) -> str:
    """Name of the model that the server serves."""
    response = httpx.get(f"{url}/v1/models", headers=headers(), timeout=_TIMEOUT).raise_for_status()
    return str(response.json()["data"][0]["id"])


def prose_for(url: str, model: str) -> Prose:
    """Prose that knows how many tokens the served model's tokenizer makes of a word."""
    body = {"model": model, "prompt": words(_SAMPLE_WORDS, random.Random(0))}
    response = httpx.post(f"{url}/tokenize", json=body, headers=headers(), timeout=_TIMEOUT).raise_for_status()
    return Prose(response.json()["count"] / _SAMPLE_WORDS)
