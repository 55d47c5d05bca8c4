"""Scenarios are checked when they are read, and say the same to every server."""

import random
import re
from itertools import pairwise

import pytest
from pydantic import ValidationError

from loadtest.conversation import Speaker
from loadtest.prose import Prose
from loadtest.scenario import KINDS, Scenario, Spread
from loadtest.summary import Record, Summary
from tests.processes import ROOT, run_python

SCENARIOS = sorted((ROOT / "loadtest" / "scenarios").glob("*.yaml"))
#: One token per word, so that lengths can be counted.
PROSE = Prose(tokens_per_word=1.0)


def embedded(**changes):
    scenario = Scenario.load(ROOT / "loadtest" / "scenarios" / "embedded.yaml")
    return Scenario.model_validate(scenario.model_dump() | changes)


def ask(scenario, kind, times, number=0):
    """The requests of one user; every answer is as long as it may be."""
    speaker = Speaker(scenario, kind, number, "model", PROSE)
    requests = []
    for _ in range(times):
        request = speaker.request()
        requests.append(request)
        speaker.heard("word " * request.max_tokens, count(request) + request.max_tokens)
    return requests


def text(request):
    body = request.body
    return body.get("prompt") or " ".join(message["content"] for message in body["messages"])


def count(request):
    return len(re.findall(r"\w+", text(request)))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_scenarios_that_come_with_it_have_every_kind_of_traffic(path):
    scenario = Scenario.load(path)
    assert set(scenario.traffic) == set(KINDS)
    assert scenario.name == path.stem


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_user_says_the_same_again_and_another_something_else(kind):
    scenario = embedded()
    assert ask(scenario, kind, 8) == ask(scenario, kind, 8)
    assert ask(scenario, kind, 8) != ask(scenario, kind, 8, number=1)
    assert ask(scenario, kind, 8) != ask(embedded(seed=1), kind, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_answers_fit_the_context(kind):
    scenario = embedded()
    for request in ask(scenario, kind, 40):
        # The few words that frame a question about documents are not counted in the scenario's lengths.
        assert count(request) + request.max_tokens <= scenario.max_context + 20


def test_users_of_a_kind_share_the_beginning():
    first, second = (ask(embedded(), "chat", 1, number)[0].body["messages"] for number in (0, 1))
    assert first[0] == second[0]
    assert first[0]["role"] == "system"
    assert first[1] != second[1]


def test_a_conversation_repeats_what_was_said_until_it_starts_anew():
    requests = [request.body["messages"] for request in ask(embedded(), "multi_turn", 12)]
    lengths = [len(messages) for messages in requests]
    assert lengths[:6] == [2, 4, 6, 8, 10, 2]
    for before, after in pairwise(requests):
        assert after[: len(before)] == before or len(after) == 2


def test_a_conversation_starts_anew_where_the_next_turn_might_not_fit():
    multi_turn = embedded().model_dump()["traffic"]["multi_turn"]
    requests = ask(embedded(max_context=600, traffic={"multi_turn": multi_turn}), "multi_turn", 20)
    assert max(count(request) + request.max_tokens for request in requests) <= 600


@pytest.mark.parametrize(
    "changes",
    [
        {"max_context": 300},
        {"unknown": 1},
        {"think": {"median": 5, "high": 2}},
    ],
    ids=str,
)
def test_wrong_scenarios_are_refused(changes):
    with pytest.raises(ValidationError):
        embedded(**changes)


def test_lengths_are_cut_off_and_spread_around_their_median():
    spread = Spread(median=100, sigma=1.0, low=20, high=1000)
    rng = random.Random(0)
    drawn = sorted(spread.draw(rng) for _ in range(2001))
    assert drawn[0] == 20
    assert drawn[-1] == 1000
    assert drawn[1000] == pytest.approx(100, rel=0.1)


def test_figures_are_over_all_correct_answers():
    records = [
        Record(kind="chat", ended=12, seconds=2, first=0.5, gaps=(0.1, 0.3), prompt_tokens=5, output_tokens=30),
        Record(kind="rag", ended=20, seconds=5, first=1.5, gaps=(0.2,), prompt_tokens=7, output_tokens=70),
        Record(kind="rag", ended=15, seconds=1, error="HTTP 500."),
    ]
    summary = Summary.of("name", "model", records)
    assert (summary.total.requests, summary.total.failures, summary.errors) == (3, 1, ["HTTP 500."])
    assert summary.total.output_tokens_per_second == pytest.approx(100 / (20 - 10))
    assert summary.total.between_tokens["p50"] == pytest.approx(200)
    assert summary.by_kind["rag"].time_to_first_token["p50"] == pytest.approx(1500)
    assert set(summary.by_kind) == {"chat", "rag"}


def test_gevent_patches_nothing_but_locust_itself():
    modules = "loadtest.run, loadtest.compare, loadtest.soak, vllm_antkv, vllm_antkv.config"
    code = f"import sys, {modules}; assert not {{'gevent', 'locust'}} & sys.modules.keys()"
    run_python("-c", code)
