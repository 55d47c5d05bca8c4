"""A real server refuses every bad request of `bad_requests.py` with an HTTP 4xx that says why, and goes on."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.patience import PATIENCE
from tests.serving.bad_requests import (
    CHAT,
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    COMPLETIONS,
    GOOD,
    GOOD_CHAT,
    RAW,
    UNKNOWN_MODELS,
    WIRE,
)
from tests.serving.embedded_server import API_KEY, MODEL_NAME, Server
from vllm_antkv.vllm_adapter.server.routes import STATUS_PATH

pytestmark = pytest.mark.serving

#: Ends in the third VQ block, so that its answer depends on codes, anchors and recent tokens. No other test that shares
#: the server begins a prompt so: it would find this one in the prefix cache.
PROBE = {"prompt": [0, *range(399, 100, -1)], "max_tokens": 12, "temperature": 0, "logprobs": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="module")
def answer_before(client: httpx.Client) -> dict[str, Any]:
    """To the probe, before the first bad request."""
    return probe(client)


def probe(client: httpx.Client) -> dict[str, Any]:
    response = client.post(COMPLETIONS, json={"model": MODEL_NAME, **PROBE})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]  # type: ignore[no-any-return]


def send(client: httpx.Client, path: str, good: dict[str, Any], changes: dict[str, Any]) -> httpx.Response:
    """A good request with some fields replaced; those that become None are left out."""
    body = {name: value for name, value in {"model": MODEL_NAME, **good, **changes}.items() if value is not None}
    return client.post(path, content=json.dumps(body))


def assert_refused(client: httpx.Client, response: httpx.Response, status: int, words: str) -> None:
    assert response.status_code == status, response.text
    answer = response.json()
    error = answer.get("error", answer.get("detail"))
    sentence = error["message"] if isinstance(error, dict) else error
    # Of vLLM's own checks, which list every kind of prompt that a wrong one is not.
    assert 0 < len(sentence) < 3000
    assert words.lower() in sentence.lower()
    assert "Traceback" not in sentence
    assert client.get("/health").status_code == 200


@pytest.mark.usefixtures("answer_before")
@pytest.mark.parametrize("name", COMPLETION_FIELDS)
def test_a_bad_completion(client: httpx.Client, name: str) -> None:
    changes, words = COMPLETION_FIELDS[name]
    status = 404 if changes.get("model") in UNKNOWN_MODELS else 400
    assert_refused(client, send(client, COMPLETIONS, GOOD, changes), status, words)


@pytest.mark.usefixtures("answer_before")
@pytest.mark.parametrize("name", CHAT_FIELDS)
def test_a_bad_chat(client: httpx.Client, name: str) -> None:
    changes, words = CHAT_FIELDS[name]
    assert_refused(client, send(client, CHAT, GOOD_CHAT, changes), 400, words)


@pytest.mark.usefixtures("answer_before")
@pytest.mark.parametrize("name", RAW)
def test_a_bad_request(client: httpx.Client, name: str) -> None:
    raw = RAW[name]
    request = client.build_request(raw.method, raw.path, content=raw.content, headers=raw.headers)
    for header in [header for header, value in raw.headers.items() if not value]:
        del request.headers[header]
    assert_refused(client, client.send(request), raw.status, raw.says)


@pytest.mark.usefixtures("answer_before")
@pytest.mark.parametrize("name", WIRE)
def test_what_is_no_http(client: httpx.Client, name: str) -> None:
    address = urlsplit(str(client.base_url))
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as connection:
        connection.sendall(WIRE[name])
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
    assert client.get("/health").status_code == 200


def test_a_client_that_goes_away_in_the_middle_of_its_request(client: httpx.Client) -> None:
    address = urlsplit(str(client.base_url))
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    assert client.get("/health").status_code == 200


def test_the_server_goes_on_as_before(client: httpx.Client, answer_before: dict[str, Any]) -> None:
    assert probe(client) == answer_before
    deadline = time.monotonic() + PATIENCE
    while any(client.get(STATUS_PATH).json()["engines"][0]["pages_in_use"].values()):
        assert time.monotonic() < deadline, "a refused request holds pages"
        time.sleep(0.1)
