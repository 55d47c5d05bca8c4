"""A real Prometheus scrapes a real server: every query of the dashboard and of the docs has an answer."""

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from loadtest.server import free_port
from tests.house.test_dashboard import DASHBOARD, documented_queries, queries
from tests.patience import PATIENCE
from tests.serving.conftest import ROOT
from tests.serving.embedded_server import MODEL_NAME, Server

PROMETHEUS = shutil.which("prometheus")

pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on the PATH: apt-get install prometheus"),
]

#: As in our configuration but for the address, and so often that a test can wait for it.
SCRAPE_SECONDS = 2
#: Longer than these tests take: whenever they ask, the load lies in it.
WINDOW = "1h"


def ask(url: str, query: str) -> list[dict]:
    """The samples that answer a query now."""
    response = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=PATIENCE)
    answer = response.raise_for_status().json()
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Prometheus that has scraped the server often enough while it was busy."""
    folder = tmp_path_factory.mktemp("prometheus")
    settings = yaml.safe_load((ROOT / "docker" / "prometheus" / "prometheus.yml").read_text())
    settings["global"].update(scrape_interval=f"{SCRAPE_SECONDS}s", scrape_timeout=f"{SCRAPE_SECONDS}s")
    settings["scrape_configs"][0]["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    command = [
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_for_rates(f"http://{address}", server, folder / "log")
            yield f"http://{address}"
        finally:
            process.terminate()


def _wait_for_rates(url: str, server: Server, log: Path) -> None:
    """Keep the server busy until the slowest of the counters, ours, has been seen to grow."""
    done = threading.Event()

    def work() -> None:
        # Counters grow as well while the machine does something else at times.
        while not done.wait(0.2):
            server.complete([0, *range(100, 260)], 40)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                if any(float(each["value"][1]) > 0 for each in ask(url, _SLOWEST)):
                    return
            except httpx.HTTPError:
                # It does not listen yet, or listens and says 503 until its storage is open.
                pass
            time.sleep(0.5)
        pytest.fail(f"Prometheus saw nothing grow:\n{log.read_text()[-2000:]}")
    finally:
        done.set()
        worker.join()


_SLOWEST = f'rate(vllm:antkv_sampled_attention_total{{rows="codes"}}[{WINDOW}])'


def filled_in(query: str) -> str:
    """A query as Grafana would send it."""
    return re.sub(r"\[\w+\]", f"[{WINDOW}]", query).replace("$model_name", MODEL_NAME)


@pytest.mark.parametrize("query", [*queries(), *documented_queries()])
def test_prometheus_answers_every_query(prometheus: str, query: str) -> None:
    samples = ask(prometheus, filled_in(query))
    assert samples


def test_shares_of_attention_add_up(prometheus: str) -> None:
    panels = {panel["title"]: panel for panel in json.loads(DASHBOARD.read_text())["panels"]}
    (target,) = panels["Where attention goes"]["targets"]
    samples = ask(prometheus, filled_in(target["expr"].replace("$__rate_interval", WINDOW)))
    assert {each["metric"]["rows"] for each in samples} == {"recent", "anchors", "codes"}
    assert sum(float(each["value"][1]) for each in samples) == pytest.approx(1)
