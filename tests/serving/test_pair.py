"""A server that computes prompts, and one that has their pages from it, behind `docker/prefill_proxy.py`."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.server import Server, free_port
from loadtest.watch import metrics, wait_until_idle
from tests.patience import PATIENCE, wait_for
from tests.prefill_proxy import proxy
from tests.serving.conftest import EMBEDDED, transfer
from tests.serving.server import MODEL_NAME, answer, serving
from tests.serving.tiny import GEMMA, make_coded

pytestmark = pytest.mark.long


def body(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}


def stream(url: str, prompt: list[int], num_tokens: int) -> Iterator[str]:
    """A completion as it is made."""
    asked = {**body(prompt, num_tokens), "stream": True, "stream_options": {"include_usage": False}}
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=PATIENCE) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


def loaded_tokens(url: str) -> float:
    """Tokens whose pages a server has had from the folder."""
    return metrics(url)["vllm:external_prefix_cache_hits_total"]


def num_pulls(url: str) -> float:
    """How often its ranks have had a request's pages through NIXL: vLLM counts as loaded what it asks for."""
    return metrics(url)["vllm:nixl_bytes_transferred_count"]


def wait_for_pulls(url: str, expected: float) -> None:
    """A rank says with a later step what it has had."""
    wait_for(lambda: num_pulls(url) == expected)


def antkv(**settings: str) -> str:
    """The value of --additional-config; prompts are computed as a hit would be."""
    return json.dumps({"antkv": {"prefill_reads_cache": True, **settings}})


def connector(name: str, folder: Path) -> dict[str, Any]:
    """The value of --kv-transfer-config, without the role."""
    if name == "MultiConnector":
        inner = [{**connector(each, folder), "kv_role": "kv_both"} for each in ("NixlConnector", "AntKVStore")]
        return {"kv_connector": name, "kv_connector_extra_config": {"connectors": inner}}
    return transfer(folder) if name == "AntKVStore" else {"kv_connector": name}


@contextmanager
def pair(name: str, folder: Path, model: Path = EMBEDDED, **options: str) -> Iterator[tuple[Server, Server]]:
    """A server that computes prompts and one that has their pages from it, by this connector."""
    if name != "AntKVStore":
        pytest.importorskip("nixl", reason="NIXL is not installed")
    with (
        one(name, "kv_producer", folder, model, **options) as prefill,
        one(name, "kv_consumer", folder, model, **options) as decode,
    ):
        yield prefill, decode


@contextmanager
def one(name: str, role: str, folder: Path, model: Path = EMBEDDED, **options: str) -> Iterator[Server]:
    """Of such a pair."""
    transfer = json.dumps({**connector(name, folder / "pages"), "kv_role": role})
    also = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    options = {"--kv-transfer-config": transfer, "--additional-config": antkv(), **options}
    with serving(model, folder / f"{role}.log", also, **options) as server:
        yield server


@pytest.mark.parametrize("name", [pytest.param("AntKVStore", marks=pytest.mark.release), "MultiConnector"])
def test_no_request_ends_with_the_prefill_server(name, prompts, tmp_path):
    """Those that it computes then, and later ones, are computed by the decode server; what is refused says why."""
    some = prompts[-3:]
    others = [prompt[::-1] for prompt in some]
    with pair(name, tmp_path) as (prefill, decode), proxy(tmp_path / "proxy.log", prefill.url, decode.url) as url:
        alone = ["".join(stream(prefill.url, prompt, 100)) for prompt in some]
        assert ["".join(stream(url, prompt, 100)) for prompt in some] == alone
        hits = loaded_tokens(decode.url)
        assert hits == sum((len(prompt) - 1) // 128 * 128 for prompt in some) > 0
        refused = httpx.post(f"{url}/v1/completions", json=body(some[0], 10_000), timeout=PATIENCE)
        assert refused.status_code == httpx.codes.BAD_REQUEST
        assert "max_model_len=1024" in refused.text

        streams = [stream(url, prompt, 100) for prompt in some]
        begun = [next(each) for each in streams]
        # It accepts requests, and computes none.
        os.killpg(prefill.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(len(others)) as clients:
            waiting = [clients.submit(answer, url, prompt) for prompt in others]
            # Of the decode server's own.
            assert [begin + "".join(rest) for begin, rest in zip(begun, streams, strict=True)] == alone
            with proxy(tmp_path / "impatient.log", prefill.url, decode.url, "--timeout=1") as impatient:
                assert answer(impatient, others[0][:100]) == answer(decode.url, others[0][:100])
            os.killpg(prefill.pid, signal.SIGKILL)
            answers = [each.result() for each in waiting]
        assert answers == [answer(decode.url, prompt) for prompt in others]
        assert answer(url, others[0][1:])
        assert loaded_tokens(decode.url) == hits
        os.killpg(decode.pid, signal.SIGKILL)
        gone = httpx.post(f"{url}/v1/completions", json=body(some[0], 5), timeout=PATIENCE)
        assert gone.status_code == httpx.codes.BAD_GATEWAY
        assert "decode server does not answer" in gone.json()["error"]["message"]


def computed(prefill: str, prompt: list[int]) -> dict[str, Any]:
    """Where the pages of a prompt are that this server has just computed."""
    asked = {**body(prompt, 1), "kv_transfer_params": {"do_remote_decode": True}}
    response = httpx.post(f"{prefill}/v1/completions", json=asked, timeout=PATIENCE).raise_for_status()
    params: dict[str, Any] = response.json()["kv_transfer_params"]
    return params


def answers(url: str, prompt: list[int], params: dict[str, Any] | None = None, n: int = 1) -> list[Any]:
    """Each with the log-probabilities of its tokens."""
    likeliest = {"temperature": 1, "top_k": 1, "n": n}
    asked = {**body(prompt, 40), **likeliest, "logprobs": 1, "kv_transfer_params": params}
    response = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE).raise_for_status()
    return [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in response.json()["choices"]]


@pytest.mark.release
@pytest.mark.parametrize("num_ranks", [1, 2], ids=["windows, one exact", "two ranks"])
def test_what_is_pulled_is_a_local_hit(num_ranks, prompts, tmp_path):
    model, options = EMBEDDED, {"--tensor-parallel-size": str(num_ranks)}
    if num_ranks == 1:
        changes = {**GEMMA, "num_hidden_layers": 4, "max_position_embeddings": 1024}
        model = make_coded(tmp_path / "model", "gemma2", changes)
        options["--kv-cache-dtype-skip-layers"] = "0"
    with pair("NixlConnector", tmp_path, model, **options) as (prefill, decode):
        # Of the last one, some pages are those of a local hit.
        for number, prompt in enumerate((prompts[-1][:129], prompts[-2], prompts[-1]), start=1):
            answers(prefill.url, prompt)
            local = answers(prefill.url, prompt)
            ((text, logprobs),) = answers(decode.url, prompt, computed(prefill.url, prompt))
            # VLLM's own attention, of the exact layer, rounds by where a prompt was cut.
            tolerance = 1e-5 if model != EMBEDDED else 0
            assert [(text, pytest.approx(logprobs, rel=0, abs=tolerance))] == local
            wait_for_pulls(decode.url, number * num_ranks)
        # A client knows where the pages of a prompt are, and there is nobody to say so in its place.
        params = computed(prefill.url, prompts[-3])
        with proxy(tmp_path / "proxy.log", f"http://127.0.0.1:{free_port()}", decode.url) as url:
            assert answers(url, prompts[-3], params)
            assert httpx.post(f"{url}/v1/responses", json={"kv_transfer_params": params}).status_code == 404
        assert num_pulls(decode.url) == number * num_ranks
        # What was computed is there, and the prefill server is told to give its pages up.
        assert answers(decode.url, prompts[-3], params)
        pulls, other = num_pulls(decode.url), prompts[-3][::-1]
        assert answers(decode.url, other, computed(prefill.url, other))
        wait_for_pulls(decode.url, pulls + num_ranks)
        # Their pages are given up once they are there.
        assert not wait_until_idle(prefill.url, PATIENCE)


@pytest.mark.release
def test_pages_that_are_gone_or_foreign_are_computed(prompts, tmp_path):
    some, other, last = prompts[-1], prompts[-1][::-1], prompts[-2]
    foreign = {"--additional-config": antkv(recency="sliding:40")}
    (tmp_path / "foreign").mkdir()
    with (
        pair("NixlConnector", tmp_path) as (prefill, decode),
        one("NixlConnector", "kv_consumer", tmp_path / "foreign", **foreign) as stranger,
    ):
        assert answers(stranger.url, some, computed(prefill.url, some))
        assert num_pulls(stranger.url) == 0
        params = computed(prefill.url, some)
        # Offered are the pages of other tokens.
        assert answers(decode.url, other, params) == answers(prefill.url, other)
        assert num_pulls(decode.url) == 0
        # After the first of two answers has the pages, the prefill server gives them up.
        assert answers(decode.url, some, params, n=2) == 2 * answers(prefill.url, some)
        assert num_pulls(decode.url) == 1
        alone = answers(prefill.url, last)
        params = computed(prefill.url, last)
        os.killpg(prefill.pid, signal.SIGKILL)
        assert answers(decode.url, last, params) == alone
        assert num_pulls(decode.url) == 1
