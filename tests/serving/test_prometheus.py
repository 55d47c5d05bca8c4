"""A real Prometheus scrapes a real server: every query of the dashboard and of the docs has an answer."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from loadtest.server import free_port
from tests.house.test_dashboard import documented_queries, queries
from tests.patience import PATIENCE, wait_for
from tests.places import ROOT
from tests.serving.embedded_server import MODEL_NAME, STORE

PROMETHEUS = shutil.which("prometheus")

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on the PATH: apt-get install prometheus")

#: As in our configuration but for the address, and so often that a test can wait for it.
SCRAPE_SECONDS = 2
#: Longer than these tests take: whenever they ask, the load lies in it.
WINDOW = "1h"


def ask(url: str, query: str) -> list[dict]:
    """The samples that answer a query now: none before Prometheus listens, or while its storage is not open."""
    try:
        response = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=PATIENCE)
    except httpx.TransportError:
        return []
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return []
    answer = response.raise_for_status().json()
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


@contextmanager
def scraping(url: str, folder: Path) -> Iterator[str]:
    """Address of a Prometheus with our configuration that scrapes a server."""
    settings = yaml.safe_load((ROOT / "docker" / "prometheus" / "prometheus.yml").read_text())
    settings["global"].update(scrape_interval=f"{SCRAPE_SECONDS}s", scrape_timeout=f"{SCRAPE_SECONDS}s")
    settings["scrape_configs"][0]["static_configs"] = [{"targets": [url.removeprefix("http://")]}]
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
            yield f"http://{address}"
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def prometheus(shared_servers, tmp_path_factory) -> Iterator[str]:
    """One that has seen the slowest of the counters, ours, grow, of a server with all that has metrics."""
    server = shared_servers.running(STORE)
    with scraping(server.url, tmp_path_factory.mktemp("prometheus")) as url:

        def has_grown() -> bool:
            server.complete([0, *range(100, 260)], 40)
            return any(float(each["value"][1]) > 0 for each in ask(url, _SLOWEST))

        wait_for(has_grown)
        yield url


_SLOWEST = f'rate(vllm:antkv_sampled_attention_total{{rows="codes"}}[{WINDOW}])'


def filled_in(query: str, model_name: str = MODEL_NAME) -> str:
    """A query as Grafana would send it."""
    return re.sub(r"\[\w+\]", f"[{WINDOW}]", query).replace("$model_name", model_name)


@pytest.mark.parametrize("query", [*queries(), *documented_queries()])
def test_prometheus_answers_every_query(prometheus, query):
    samples = ask(prometheus, filled_in(query))
    assert samples
