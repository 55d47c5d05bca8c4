"""Every question of `surface.py` to real servers: answers of an exact cache are those of `auto`, and with default
settings they do not depend on what else runs."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from tests.serving.embedded_server import API_KEY
from tests.serving.surface import QUESTIONS, complete

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def clients(shared_servers) -> list[OpenAI]:
    """Of `auto`, of an exact cache and of default settings; the servers start side by side."""
    with ThreadPoolExecutor() as pool:
        running = list(pool.map(shared_servers.running, ("auto", "exact", "default")))
    return [OpenAI(base_url=f"{each.url}/v1", api_key=API_KEY, max_retries=0) for each in running]


def assert_close(mine: Any, theirs: Any) -> None:
    """The same but for log-probabilities, which differ by little."""
    if isinstance(mine, list | tuple):
        assert len(mine) == len(theirs)
        for pair in zip(mine, theirs, strict=True):
            assert_close(*pair)
    else:
        assert mine == (pytest.approx(theirs, abs=1e-3) if isinstance(mine, float) else theirs)


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_exact_cache_answers_as_auto(clients, name):
    auto, exact, _ = clients
    assert_close(QUESTIONS[name](exact), QUESTIONS[name](auto))


@pytest.mark.parametrize("name", QUESTIONS)
def test_no_answer_depends_on_neighbours(clients, name):
    client = clients[2]
    alone = QUESTIONS[name](client)
    with ThreadPoolExecutor(4) as pool:
        others = ([0, *range(first, first + 200)] for first in range(4))
        beside = [pool.submit(complete, client, other, max_tokens=60) for other in others]
        assert_close(QUESTIONS[name](client), alone)
        for each in beside:
            each.result()


def test_codes_are_read(clients):
    """The comparisons can fail."""
    auto, _, default = (QUESTIONS["prompt_logprobs"](client) for client in clients)
    with pytest.raises(AssertionError):
        assert_close(default, auto)
