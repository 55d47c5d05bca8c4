"""A real server shows its antkv cache under /antkv/ and at /metrics, and refuses what it cannot serve."""

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.patience import PATIENCE, wait_for
from tests.serving.conftest import EMBEDDED
from tests.serving.embedded_server import API_KEY, EXACT, MAX_BYTES, MODEL_NAME, PRESET, STORE, Server
from tests.serving.server import run_vllm
from vllm_antkv.codebook import Codebook
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops import cpu
from vllm_antkv.ops.dispatch import REFERENCE
from vllm_antkv.vllm_adapter.server.routes import PREFIX, STATUS_PATH

NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE = 5, 2, 64
ROUTES = [f"{PREFIX}/{name}" for name in ("status", "config", "anchors")]
PROMPT, OUTPUT = [0, *range(100, 399)], 12


def status(server: Server) -> dict[str, Any]:
    response = server.get(STATUS_PATH)
    assert response.status_code == 200, response.text
    return response.json()


def server_settings(server: Server) -> dict[str, Any]:
    """What `embedded_server` set, and the defaults of the rest."""
    return AntKVConfig(codebooks=str(server.codebook.parent), prefill_reads_cache=True).model_dump()


def samples(server: Server) -> dict[tuple[str, ...], float]:
    """Values of the antkv metrics, by name and by what the labels say that are not on every metric."""
    values = {}
    for family in text_string_to_metric_families(server.get("/metrics", key=None).text):
        for sample in family.samples:
            if sample.name.startswith("vllm:antkv_") and not sample.name.endswith("_created"):
                labels = dict(sample.labels)
                assert labels.pop("model_name") == MODEL_NAME
                assert labels.pop("engine") == "0"
                values[sample.name.removeprefix("vllm:antkv_"), *sorted(labels.values())] = sample.value
    return values


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("key", [None, "wrong"])
def test_the_api_key_is_needed_as_for_the_v1_routes(server, key, route):
    refused, like_vllm = server.get(route, key), server.get("/v1/models", key)
    assert refused.status_code == like_vllm.status_code == 401
    assert refused.json() == like_vllm.json()


def test_status_says_how_the_cache_is_set_up(server):
    answer = status(server)
    codebook = Codebook.load(server.codebook)
    assert answer["active"] is True
    assert answer["preset"] == PRESET
    assert answer["codebook"] == {
        "identity": codebook.identity,
        "path": str(server.codebook),
        "bytes": codebook.num_bytes,
    }
    assert answer["settings"] == server_settings(server)
    bits = answer["bits"]
    assert bits["nominal"] == bits["parts"]["codes"] == 1
    assert bits["effective"] == pytest.approx(sum(bits["parts"].values()))
    assert bits["at_tokens"] == 1024
    elements = 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_SIZE
    assert answer["bf16_bytes_per_token"] == 2 * elements
    assert sum(answer["kv_bytes_per_token"].values()) == pytest.approx(bits["effective"] * elements / 8)
    assert answer["pages"]["vq"]["block_size"] == VQ_BLOCK_SIZE
    assert answer["pages"]["recency"]["block_size"] < VQ_BLOCK_SIZE
    largest = max(page["bytes"] for page in answer["pages"].values())
    assert answer["pool_page_bytes"] == NUM_KV_HEADS * largest
    assert answer["layers"] == NUM_LAYERS * [PRESET]
    assert {"vllm", "vllm_antkv", "torch"} == answer["versions"].keys()


def test_config_says_what_is_in_effect(server):
    config = server.get(f"{PREFIX}/config").json()
    assert config["model"] == MODEL_NAME
    assert config["kv_cache_dtype"] == PRESET
    assert config["settings"] == server_settings(server)
    assert config["anchor_rows"] == AntKVConfig().anchor_rows
    assert config["codebook"] == str(server.codebook)
    assert config["engine"]["max_model_len"] == 1024
    assert config["engine"]["dtype"] == "float32"


def test_status_counts_what_a_request_does(server):
    # No other test sends it: what the prefix cache holds is not stored again.
    prompt = list(reversed(PROMPT))
    before = status(server)["engines"][0]
    server.complete(prompt, OUTPUT)
    wait_for(lambda: sum(status(server)["engines"][0]["pages_in_use"].values()) == 0)
    after = status(server)["engines"][0]
    # The last token is never stored.
    num_tokens = len(prompt) + OUTPUT - 1
    assert after["tokens_stored"] - before["tokens_stored"] == num_tokens
    assert after["sinks_found"] - before["sinks_found"] == num_tokens
    # A sample is due after each question, and is taken in the next step.
    sampled_before, sampled = (sum(engine["sampled_attention"].values()) for engine in (before, after))
    assert sampled == pytest.approx(round(sampled))
    assert round(sampled) > round(sampled_before)
    assert after["sampled_attention"]["recent"] > before["sampled_attention"]["recent"]
    assert after["fallbacks"] == 0
    rows = AntKVConfig().anchor_rows
    assert after["anchors_chosen"] - before["anchors_chosen"] == num_tokens // VQ_BLOCK_SIZE * rows
    assert after["implementation"] == (cpu.best() or REFERENCE).name
    for name, operation in after["operations"].items():
        assert operation["calls"] > before["operations"][name]["calls"]
        assert operation["seconds"] > before["operations"][name]["seconds"]
    for name in after["operations"]:
        # The prompt is one step.
        assert after["operations"][name]["calls"] - before["operations"][name]["calls"] == NUM_LAYERS * OUTPUT


def test_metrics_show_what_status_says(server):
    server.complete(PROMPT[:40], 4)
    wait_for(lambda: status(server)["engines"][0]["tokens_in_use"] == 0)
    answer = status(server)
    engine = answer["engines"][0]
    wait_for(lambda: samples(server).get(("tokens_stored_total",)) == engine["tokens_stored"])
    wait_for(lambda: samples(server)["pages_in_use", "vq"] == 0)
    assert samples(server) == pytest.approx(
        {
            ("nominal_bits",): answer["bits"]["nominal"],
            ("effective_bits",): answer["bits"]["effective"],
            ("codebook_info", *sorted([PRESET, answer["codebook"]["identity"]])): 1,
            ("tokens_stored_total",): engine["tokens_stored"],
            ("anchors_chosen_total",): engine["anchors_chosen"],
            ("sinks_found_total",): engine["sinks_found"],
            ("fallbacks_total",): 0,
            ("tokens_in_use",): 0,
            ("bf16_kv_bytes",): 0,
            **{(name, page): 0 for name in ("pages_in_use", "kv_bytes") for page in ("vq", "recency")},
            **{("sampled_attention_total", rows): value for rows, value in engine["sampled_attention"].items()},
            **{("kv_bytes_per_token", part): value for part, value in answer["kv_bytes_per_token"].items()},
            **{("operation_calls_total", name): work["calls"] for name, work in engine["operations"].items()},
            **{("operation_seconds_total", name): work["seconds"] for name, work in engine["operations"].items()},
        }
    )


@pytest.mark.long
def test_status_and_metrics_show_what_a_store_is_worth(shared_servers):
    server = shared_servers.running(STORE)
    # No other test sends it.
    prompt = list(range(3000, 3000 + 300))
    before = status(server)["engines"][0]["store"]
    server.complete(prompt, 1)
    wait_for(lambda: status(server)["engines"][0]["store"]["num_bytes"] != before["num_bytes"])
    httpx.post(
        f"{server.url}/reset_prefix_cache", headers={"Authorization": f"Bearer {API_KEY}"}, timeout=PATIENCE
    ).raise_for_status()
    server.complete(prompt, 1)
    after = status(server)["engines"][0]["store"]
    counted = {name: after[name] - before[name] for name in ("lookups", "hits", "hit_tokens")}
    assert counted == {"lookups": 2, "hits": 1, "hit_tokens": 256}
    assert after["num_bytes"] <= after["max_bytes"] == MAX_BYTES
    assert after["seconds_saved"] >= 0
    wait_for(lambda: samples(server).get(("store_hits_total",)) == after["hits"])
    wait_for(lambda: samples(server)["store_bytes",] == status(server)["engines"][0]["store"]["num_bytes"])
    assert samples(server)["store_evictions_total",] == after["evictions"]
    assert samples(server)["store_seconds_saved",] >= 0


def test_the_routes_are_in_the_servers_api_description(server):
    paths = httpx.get(server.url + "/openapi.json", timeout=PATIENCE).json()["paths"]
    assert all("get" in paths[route] for route in ROUTES)


@pytest.mark.long
def test_a_server_whose_plugins_are_not_named_has_metrics_and_no_routes(shared_servers):
    server = shared_servers.running(EXACT)
    server.complete(PROMPT, OUTPUT)
    wait_for(lambda: "vllm:antkv_tokens_stored_total" in server.get("/metrics").text)
    assert {server.get(route).status_code for route in [f"{PREFIX}/", *ROUTES]} == {404}


@pytest.mark.long
def test_what_cannot_be_served_ends_the_server_with_a_sentence(tmp_path):
    additional = f'{{"antkv": {{"codebooks": "{tmp_path}"}}}}'
    ended = run_vllm("serve", str(EMBEDDED), "--kv-cache-dtype", PRESET, "--additional-config", additional)
    assert ended.returncode != 0
    last_line = ended.stdout.strip().splitlines()[-1]
    assert f"make one with `antkv calibrate {EMBEDDED} --preset {PRESET}" in last_line
    assert last_line.endswith(".")
