"""A real server refuses requests that reach for what it does not have with an HTTP 4xx that says why, and goes on.

vLLM refuses them, with checks of its own: what must not happen is that one of them harms a cache that others use.
"""

import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.patience import PATIENCE, wait_for
from tests.serving.embedded_server import API_KEY, MAX_MODEL_LEN, MODEL_NAME
from vllm_antkv.vllm_adapter.server.routes import STATUS_PATH

COMPLETIONS = "/v1/completions"
#: Ends in the third VQ block, so that its answer depends on codes, anchors and recent tokens. No other test that shares
#: the server begins a prompt so: it would find this one in the prefix cache.
PROBE = {"prompt": [0, *range(399, 100, -1)], "max_tokens": 12, "temperature": 0, "logprobs": 3, "ignore_eos": True}
#: Fields that replace those of a good completion request; words of the answer.
COMPLETION_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "prompt one over the context": ({"prompt": [5] * (MAX_MODEL_LEN + 1)}, "context length"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "token id just beyond the vocabulary": ({"prompt": [5, 50_257]}, "vocabulary"),
    "token id beyond 64 bits": ({"prompt": [5, 10**30]}, "vocab"),
    "max_tokens over the context": ({"max_tokens": MAX_MODEL_LEN + 1}, "cannot be greater than max_model_len"),
    "n absurd": ({"n": 10**9}, "n must be"),
    "cache_salt empty": ({"cache_salt": ""}, "cache_salt"),
}
#: Method, path and body of requests, with the key; status and words of the answer.
RAW: dict[str, tuple[str, str, bytes, int, str]] = {
    "body nested deep": ("POST", COMPLETIONS, b"[" * 100_000 + b"]" * 100_000, 400, "error parsing the body"),
    "ten MiB of prompt": ("POST", COMPLETIONS, b'{"prompt": "' + b"a" * (10 << 20) + b'"}', 400, "context length"),
    "path out of the tree": ("GET", "/antkv/../../etc/passwd", b"", 404, "Not Found"),
    "POST to the status": ("POST", STATUS_PATH, b"", 405, "Method Not Allowed"),
}


@pytest.fixture(scope="module")
def client(server) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="module")
def answer_before(client) -> dict[str, Any]:
    """To the probe, before the first bad request."""
    return probe(client)


def probe(client: httpx.Client) -> dict[str, Any]:
    response = client.post(COMPLETIONS, json={"model": MODEL_NAME, **PROBE})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def assert_refused(client: httpx.Client, response: httpx.Response, status: int, words: str) -> None:
    assert response.status_code == status, response.text
    answer = response.json()
    error = answer.get("error", answer.get("detail"))
    sentence = error["message"] if isinstance(error, dict) else error
    assert words.lower() in sentence.lower()
    assert "Traceback" not in sentence
    assert client.get("/health").status_code == 200


@pytest.mark.usefixtures("answer_before")
@pytest.mark.parametrize("name", COMPLETION_FIELDS)
def test_a_bad_completion(client, name) -> None:
    changes, words = COMPLETION_FIELDS[name]
    body = {"model": MODEL_NAME, "prompt": [0, 5, 6], "max_tokens": 2, "temperature": 0, **changes}
    assert_refused(client, client.post(COMPLETIONS, json=body), 400, words)


@pytest.mark.usefixtures("answer_before")
@pytest.mark.parametrize("name", RAW)
def test_a_bad_request(client, name) -> None:
    method, path, content, status, words = RAW[name]
    assert_refused(client, client.request(method, path, content=content), status, words)


def test_a_client_that_goes_away_in_the_middle_of_its_request(client):
    address = urlsplit(str(client.base_url))
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    assert client.get("/health").status_code == 200


def test_the_server_goes_on_as_before(client, answer_before):
    assert probe(client) == answer_before
    wait_for(lambda: not any(client.get(STATUS_PATH).json()["engines"][0]["pages_in_use"].values()))
