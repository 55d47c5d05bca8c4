"""Servers that share a folder: none says anything wrong when one is killed under load."""

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import httpx
import pytest

from loadtest.server import Server
from loadtest.watch import metrics
from tests.patience import PATIENCE
from tests.serving.conftest import EMBEDDED, transfer
from tests.serving.server import answer, serving
from tests.serving.test_page_store import PRESET
from tests.serving.test_store_bytes import bytes_in
from vllm_antkv.vllm_adapter.kv_transfer.ledger import Ledger

pytestmark = pytest.mark.long


def test_a_server_that_is_killed_under_load_leaves_nothing_wrong(start_engine, default, prompts, tmp_path):
    """On a folder that is too small for all prompts; those that come later find what the others left."""
    rng = random.Random(0)
    some = [[*rng.choice(prompts[-3:])[: rng.randrange(200, 500)], *rng.choice(prompts)[:450]] for _ in range(12)]
    with start_engine(EMBEDDED, PRESET, default) as engine:
        alone = [list(each.tokens) for each in engine.complete(some, together=False)]
    folder, limit = tmp_path / "store", 1_800_000

    def started(name: str) -> Server:
        return held.enter_context(serving(EMBEDDED, tmp_path / f"{name}.log", **options))

    def asked(url: str, order: list[int]) -> dict[int, list[int]]:
        """As far as it answers."""
        answers = {}
        with suppress(httpx.TransportError):
            for index in order:
                answers[index] = answer(url, some[index])
                # Nothing makes room meanwhile: files would be counted that are gone, and those in their place.
                with Ledger(folder).entering(0):
                    assert bytes_in(folder) <= limit
        return answers

    options = {
        "--additional-config": json.dumps({"antkv": default}),
        "--kv-transfer-config": json.dumps(transfer(folder, max_bytes=limit)),
        # Few prompts fit: what was asked before is looked for in the folder.
        "--kv-cache-memory-bytes": "3000000",
    }
    with ExitStack() as held, ThreadPoolExecutor() as clients:
        killed, other = started("killed"), started("other")
        orders = [rng.sample(range(len(some)), len(some)) for _ in range(4)]
        answering = [
            clients.submit(asked, url, order)
            for url, order in zip([killed.url, other.url, killed.url, other.url], orders, strict=True)
        ]
        while metrics(other.url)["vllm:request_success_total"] < len(some) // 2:
            pass
        os.killpg(killed.pid, signal.SIGKILL)
        again = started("again")
        found = [each.result(PATIENCE) for each in answering]
        # Those that were used last come first.
        found += [asked(again.url, order[::-1]) for order in (orders[3], orders[1])]
        assert metrics(again.url)["vllm:external_prefix_cache_hits_total"] > 0
    assert len(found[1]) == len(found[3]) == len(found[4]) == len(some)
    assert all(tokens == alone[index] for answers in found for index, tokens in answers.items())
