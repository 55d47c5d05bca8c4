"""`docker/prefill_proxy.py` over HTTP: nothing that a client says of pages reaches a server.

The servers are two that note what they are asked; a real pair is in `tests/serving/test_pair.py`.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.http_server import Handler, Server
from tests.patience import PATIENCE
from tests.prefill_proxy import proxy

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
#: Where the prefill server says that its pages are, and where a client says so.
TRUE, FALSE = {"remote_host": "prefill"}, {"remote_host": "evil"}
ASKED = {"model": "m", "prompt": "Once", "max_tokens": 9, "vllm_xargs": {"beams": 2}}
JSON = {"Content-Type": "application/json"}


class Noted(Server):
    """A server that notes its requests, and answers each with `answer`; None: not before `silent` is over."""

    def __init__(self, answer: bytes | None) -> None:
        super().__init__(_Handler)
        self.answer, self.silent = answer, threading.Event()
        self.requests: list[tuple[str, bytes]] = []

    def __exit__(self, *_: object) -> None:
        self.silent.set()
        super().__exit__()


class _Handler(Handler):
    server: Noted

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.path, body))
        if self.server.answer is None:
            self.server.silent.wait(PATIENCE)
        self.send(200, self.server.answer or b"")

    do_GET = do_POST


#: Answers of the prefill server.
ANSWERS = {
    "pages": json.dumps({"kv_transfer_params": TRUE}).encode(),
    "no pages": b"{}",
    "no object": b"[]",
    "no JSON": b"Internal Server Error",
    "too late": None,
}


@contextmanager
def pair(answer: bytes | None, log: Path) -> Iterator[tuple[str, Noted, Noted]]:
    """The URL of a proxy, and its servers."""
    with ExitStack() as stack:
        prefill, decode = stack.enter_context(Noted(answer)), stack.enter_context(Noted(b'{"of": "decode"}'))
        options = ["--timeout=5"] if answer is None else []
        url = stack.enter_context(proxy(log, prefill.url, decode.url, *options))
        decode.requests.clear()
        yield url, prefill, decode


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[tuple[str, Noted, Noted]]:
    with pair(ANSWERS["pages"], tmp_path_factory.mktemp("proxy") / "log") as found:
        yield found


@pytest.fixture
def servers(running) -> tuple[str, Noted, Noted]:
    """A pair that was asked nothing."""
    for each in running[1:]:
        each.requests.clear()
    return running


def hidden(key: str) -> bytes:
    """A request in which an attacker's pages have a name that is written so."""
    return f'{{{json.dumps(ASKED)[1:-1]}, "{key}": {json.dumps(FALSE)}}}'.encode()


ATTACKS = {
    "in the open": json.dumps({**ASKED, "kv_transfer_params": FALSE}).encode(),
    "among vLLM's": json.dumps({**ASKED, "vllm_xargs": {"kv_transfer_params": FALSE}}).encode(),
    "twice": hidden("kv_transfer_params")[:-1] + b', "kv_transfer_params": null}',
    "escaped": hidden(r"kv\u005ftransfer\u005fparams"),
    "in UTF-16": hidden("kv_transfer_params").decode().encode("utf-16"),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("attack", ATTACKS)
def test_pages_that_a_client_names_are_not_passed_on(servers, attack, path):
    url, prefill, decode = servers
    answer = httpx.post(url + path, content=ATTACKS[attack], headers=JSON, timeout=PATIENCE)
    assert answer.json() == {"of": "decode"}
    ((to_prefill, computed), (to_decode, asked)) = (*prefill.requests, *decode.requests)
    assert to_prefill == to_decode == path
    assert json.loads(computed)["kv_transfer_params"] == {"do_remote_decode": True}
    assert json.loads(asked)["kv_transfer_params"] == TRUE
    assert b"evil" not in computed + asked


@pytest.mark.parametrize("answer", [name for name in ANSWERS if name != "pages"])
def test_nor_where_the_prefill_server_names_none(tmp_path, answer):
    with pair(ANSWERS[answer], tmp_path / "log") as (url, prefill, decode):
        done = httpx.post(url + COMPLETIONS, json={**ASKED, "kv_transfer_params": FALSE}, timeout=PATIENCE)
        assert done.json() == {"of": "decode"}
        assert len(prefill.requests) == 1
        ((_, asked),) = decode.requests
        assert json.loads(asked).pop("kv_transfer_params", None) is None
        assert {key: value for key, value in json.loads(asked).items() if key in ASKED} == ASKED


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/version"])
def test_what_a_server_says_of_itself_is_the_decode_servers(servers, path):
    url, prefill, decode = servers
    assert httpx.get(url + path, timeout=PATIENCE).json() == {"of": "decode"}
    assert decode.requests == [(path, b"")]
    assert prefill.requests == []


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses",
        "/v1/messages",
        "/v1/chat/completions/batch",
        "/v1/completions/derender",
        "/inference/v1/generate",
        "/v1/completions/../responses",
        "/v1/completions/..%2Fresponses",
        "//v1/completions",
        "/V1/completions",
        "/reset_prefix_cache",
        "/",
    ],
)
def test_no_other_path_is_known(servers, path):
    url, prefill, decode = servers
    target = httpx.URL(url, raw_path=path.encode())
    for method in ("GET", "POST"):
        answer = httpx.request(method, target, json={**ASKED, "kv_transfer_params": FALSE}, timeout=PATIENCE)
        assert answer.status_code == 404
        message = answer.json()["error"]["message"]
        assert message.startswith("The proxy knows only /v1/completions, /v1/chat/completions, /health")
    assert prefill.requests == decode.requests == []


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff\xff", b"[" * 100_000], ids=lambda body: body[:4])
def test_what_is_no_object_is_not_passed_on(servers, body):
    url, prefill, decode = servers
    answer = httpx.post(url + COMPLETIONS, content=body, headers=JSON, timeout=PATIENCE)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("The body is no JSON object (")
    assert prefill.requests == decode.requests == []
