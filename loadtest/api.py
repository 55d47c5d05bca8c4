"""Requests to an OpenAI-compatible server, and the queries that precede a test."""

import os
import random
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI, Timeout

from loadtest.prose import Prose, words

LOOPBACK = "http://127.0.0.1:8000"
_SAMPLE_WORDS = 1000
_TIMEOUT = 60.0
#: Between two arrivals of data, not for a whole answer.
_STREAM_TIMEOUT = Timeout(300, connect=10)


@dataclass(frozen=True)
class Request:
    """A request whose answer is a stream of exactly `max_tokens` tokens."""

    path: str
    body: dict[str, Any]
    max_tokens: int


def completion(model: str, prompt: str, max_tokens: int) -> Request:
    """Continue a prompt."""
    return _request("/completions", model, max_tokens, prompt=prompt)


def chat(model: str, messages: list[dict[str, str]], max_tokens: int) -> Request:
    """Answer the last message."""
    return _request("/chat/completions", model, max_tokens, messages=messages)


def _request(path: str, model: str, max_tokens: int, **content: Any) -> Request:
    """Ignore end-of-sequence tokens, so that the work does not depend on the model's answers."""
    fixed = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    body = {"model": model, "max_tokens": max_tokens, "temperature": 0.7, **fixed, **content}
    return Request(path, body, max_tokens)


def client_options(url: str) -> dict[str, Any]:
    """Of OpenAI's clients: a request that fails counts, and is not repeated."""
    key = os.environ.get("VLLM_API_KEY", "none")
    return {"base_url": f"{url}/v1", "api_key": key, "timeout": _STREAM_TIMEOUT, "max_retries": 0}


def headers() -> dict[str, str]:
    """With the API key of VLLM_API_KEY, if it is set."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def served_model(url: str) -> str:
    """Name of the model that the server serves."""
    return str(OpenAI(**client_options(url)).models.list().data[0].id)


def prose_for(url: str, model: str) -> Prose:
    """A prose writer with the served model's number of tokens per word."""
    body = {"model": model, "prompt": words(_SAMPLE_WORDS, random.Random(0))}
    response = httpx.post(f"{url}/tokenize", json=body, headers=headers(), timeout=_TIMEOUT).raise_for_status()
    return Prose(response.json()["count"] / _SAMPLE_WORDS)
