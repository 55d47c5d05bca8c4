"""The dashboard asks for metrics that exist, in PromQL that parses, and Prometheus and Grafana find each other."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from tests.places import ROOT

DOCKER = ROOT / "docker"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "vllm-antkv.json"
#: Of our metrics, what the dashboard leaves out: the bytes are there.
NOT_ON_IT = {"vllm:antkv_tokens_in_use"}
#: Counters are exported with `_total`, histograms in several series.
_SUFFIXES = ("_total", "_bucket", "_sum", "_count")


def queries():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"].replace("$__rate_interval", "5m") for p in panels for target in p.get("targets", [])]


def documented_queries():
    """Those of docs/metrics.md."""
    return re.findall(r"```promql\n(.*?)```", (ROOT / "docs" / "metrics.md").read_text(), re.DOTALL)


def known_metrics():
    """Those of our documentation and those that vLLM's source defines."""
    spec = importlib.util.find_spec("vllm")
    source = Path(spec.submodule_search_locations[0], "v1", "metrics", "loggers.py").read_text()
    return {
        *re.findall(r"`(vllm:\w+)`", (ROOT / "docs" / "metrics.md").read_text()),
        *re.findall(r'"(vllm:\w+)"', source),
    }


def documented_metrics():
    """Ours, of docs/metrics.md."""
    return set(re.findall(r"`(vllm:antkv_\w+)`", (ROOT / "docs" / "metrics.md").read_text()))


def test_every_metric_of_ours_is_documented():
    source = (ROOT / "vllm_antkv" / "vllm_adapter" / "server" / "metrics.py").read_text()
    made = re.findall(r'= _(gauge|counter)\(\s*"(\w+)"', source)
    ends = {"gauge": "", "counter": "_total"}
    assert documented_metrics() == {f"vllm:antkv_{name}{ends[kind]}" for kind, name in made}


def test_the_dashboard_shows_every_metric_of_ours():
    shown = set(re.findall(r"vllm:antkv_\w+", DASHBOARD.read_text()))
    assert documented_metrics() - shown == NOT_ON_IT


@pytest.mark.parametrize("query", [*queries(), *documented_queries()])
def test_the_dashboard_asks_for_metrics_that_exist(query):
    used = set(re.findall(r"vllm:\w+", query))
    assert used
    for name in used:
        ends = [name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)]
        assert {name, *ends} & known_metrics()


@pytest.mark.parametrize("query", [*queries(), *documented_queries()])
def test_the_dashboard_speaks_promql(query):
    promql = pytest.importorskip(
        "promql_parser", reason="promql-parser is not installed: requirements/deploy.lock has it"
    )
    promql.parse(query)


def test_grafana_finds_prometheus_and_prometheus_the_server():
    source = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    (job,) = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8000"]}]
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert {"server", "prometheus"} <= services.keys()
