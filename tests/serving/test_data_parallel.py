"""Two engines behind two API servers: each answers as one alone, and routes, metrics and Grafana show both."""

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.house.test_dashboard import DASHBOARD, queries
from tests.patience import PATIENCE, wait_for
from tests.serving.conftest import EMBEDDED, transfer
from tests.serving.embedded_server import MAX_BYTES
from tests.serving.server import MODEL_NAME, PRESET, answer, serving
from tests.serving.test_prometheus import PROMETHEUS, ask, filled_in, scraping

pytestmark = pytest.mark.long


def shown(prometheus: str) -> dict[tuple[str, str], float]:
    """What Grafana shows, by panel and name: the counters themselves in the place of their rates."""
    found = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            query = re.sub(r"rate\((.*?)\[\$__rate_interval\]\)", r"\1", target["expr"])
            for each in ask(prometheus, filled_in(query, MODEL_NAME)):
                name = "".join(each["metric"].values()) or target["legendFormat"]
                found[panel["title"], name] = float(each["value"][1])
    return found


def expected(engines: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """The same, of what two idle engines say of themselves."""
    total = {key: sum(engine[key] for engine in engines) for key in ("tokens_stored", "anchors_chosen", "sinks_found")}
    attention = Counter(engines[0]["sampled_attention"]) + Counter(engines[1]["sampled_attention"])
    found = {("Full precision per 1,000 tokens", "anchors"): 1000 * total["anchors_chosen"] / total["tokens_stored"]}
    found["Full precision per 1,000 tokens", "sinks"] = 1000 * total["sinks_found"] / total["tokens_stored"]
    found |= {("Where attention goes", rows): each / attention.total() for rows, each in attention.items()}
    for title, key in (("Calls per second", "calls"), ("Time in the operations", "seconds")):
        for name in engines[0]["operations"]:
            found[title, name] = sum(engine["operations"][name][key] for engine in engines)
    return found | {("Pages in use", page): 0 for page in engines[0]["pages_in_use"]} | {("Fall-backs", ""): 0}


@pytest.mark.release
def test_two_engines_behind_two_api_servers(start_engine, default, prompts, tmp_path):
    with start_engine(EMBEDDED, PRESET, default) as engine:
        alone = [list(completion.tokens) for completion in engine.complete(prompts)]
    options = {
        "--data-parallel-size": "2",
        "--api-server-count": "2",
        "--kv-cache-memory-bytes": str(1 << 25),
        "--additional-config": json.dumps({"antkv": default}),
        # So that all that the dashboard shows is there.
        "--kv-transfer-config": json.dumps(transfer(tmp_path / "pages", max_bytes=MAX_BYTES)),
    }
    with serving(EMBEDDED, tmp_path / "server.log", **options) as server, ThreadPoolExecutor(4) as clients:
        answers = clients.map(lambda prompt: answer(server.url, prompt), 2 * prompts)
        assert list(answers) == 2 * alone
        # Whichever API server is asked.
        for _ in range(4):
            engines = httpx.get(f"{server.url}/antkv/status", timeout=PATIENCE).json()["engines"]
            assert [engine["engine"] for engine in engines] == [0, 1]
        assert all(engine["tokens_stored"] for engine in engines)
        if PROMETHEUS is None:
            pytest.skip("no prometheus on the PATH: apt-get install prometheus")
        with scraping(server.url, tmp_path) as prometheus:
            list(clients.map(lambda prompt: answer(server.url, prompt), 2 * prompts))
            right = expected(httpx.get(f"{server.url}/antkv/status", timeout=PATIENCE).json()["engines"])
            wait_for(lambda: (found := shown(prometheus)) == pytest.approx(found | right, nan_ok=True))
            # A rate takes two scrapes.
            wait_for(lambda: all(ask(prometheus, filled_in(query, MODEL_NAME)) for query in queries()))
