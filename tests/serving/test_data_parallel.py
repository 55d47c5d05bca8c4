"""Two engines behind two API servers: each answers as one alone, and the routes and metrics show both."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.patience import PATIENCE
from tests.serving.conftest import EMBEDDED
from tests.serving.server import PRESET, answer, serving

pytestmark = [pytest.mark.serving, pytest.mark.long]


def stored(url: str) -> dict[str, float]:
    """The metric of stored tokens, by engine."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=PATIENCE).text)
    samples = [sample for family in families for sample in family.samples]
    return {each.labels["engine"]: each.value for each in samples if each.name == "vllm:antkv_tokens_stored_total"}


def test_two_engines_behind_two_api_servers(
    start_engine: Callable[..., Any], default: dict[str, Any], prompts: list[list[int]], tmp_path: Path
) -> None:
    with start_engine(EMBEDDED, PRESET, default) as engine:
        alone = [list(completion.tokens) for completion in engine.complete(prompts)]
    options = {
        "--data-parallel-size": "2",
        "--api-server-count": "2",
        "--kv-cache-memory-bytes": str(1 << 25),
        "--additional-config": json.dumps({"antkv": default}),
    }
    with serving(EMBEDDED, tmp_path / "log", **options) as url, ThreadPoolExecutor(4) as clients:
        answers = clients.map(lambda prompt: answer(url, prompt), 2 * prompts)
        assert list(answers) == 2 * alone
        # Whichever API server is asked.
        for _ in range(4):
            engines = httpx.get(f"{url}/antkv/status", timeout=PATIENCE).json()["engines"]
            assert [engine["engine"] for engine in engines] == [0, 1]
        expected = {str(engine["engine"]): engine["tokens_stored"] for engine in engines}
        assert all(expected.values())
        deadline = time.monotonic() + PATIENCE
        while stored(url) != expected:
            assert time.monotonic() < deadline, (stored(url), expected)
            time.sleep(0.5)
