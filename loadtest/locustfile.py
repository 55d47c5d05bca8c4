"""Locust users: streaming chat, completion, long-context RAG and multi-turn conversations, as a scenario says.

    python -m locust -f loadtest/locustfile.py --scenario loadtest/scenarios/embedded.yaml

Besides requests, locust counts by kind the time to the first token and between tokens (milliseconds), and output tokens
per second (in the same columns: locust has no others). The size of a request is its number of output tokens.
"""

import itertools
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from locust import User, events, task
from locust.env import Environment
from openai import OpenAI, OpenAIError, Stream

from loadtest.api import LOOPBACK, client_options, prose_for, served_model
from loadtest.api import Request as ApiRequest
from loadtest.conversation import Speaker
from loadtest.prose import Prose
from loadtest.scenario import KINDS, Kind, Scenario
from loadtest.stream import Answer, StreamError, StreamReader
from loadtest.summary import Record

_MILLISECONDS = 1000
#: More than any process has.
_USERS_PER_PROCESS = 1_000_000


class Load:
    """State shared by all users of this process."""

    def __init__(self, environment: Environment, scenario: Scenario, record: Path | None) -> None:
        self.environment = environment
        self.scenario = scenario
        self.url = environment.host or LOOPBACK
        self.model = served_model(self.url)
        self.prose: Prose = prose_for(self.url, self.model)
        self.client = OpenAI(**client_options(self.url))
        # Unbuffered: each record is one write, so that several locust processes can share the file.
        self._record = record.open("ab", buffering=0) if record else None
        self._numbers: dict[Kind, Iterator[int]] = {kind: itertools.count() for kind in KINDS}

    def new_speaker(self, kind: Kind) -> Speaker:
        """A user whose prompts differ from those of all other users, in all processes."""
        process = getattr(self.environment.runner, "worker_index", 0)
        number = next(self._numbers[kind]) + _USERS_PER_PROCESS * process
        return Speaker(self.scenario, kind, number, self.model, self.prose)

    def succeeded(self, kind: Kind, answer: Answer) -> None:
        """Count an answer."""
        self._fire("POST", kind, answer.seconds * _MILLISECONDS, answer.output_tokens)
        self._fire("TTFT", f"{kind}: time to first token", answer.first * _MILLISECONDS)
        for gap in answer.gaps:
            self._fire("ITL", f"{kind}: between tokens", gap * _MILLISECONDS)
        self._fire("tokens/s", f"{kind}: output tokens/s", answer.tokens_per_second)
        self._write(Record.of(kind, time.time(), answer))

    def failed(self, kind: Kind, seconds: float, error: Exception) -> None:
        """Count a request without a correct answer."""
        self._fire("POST", kind, seconds * _MILLISECONDS, error=error)
        self._write(Record(kind=kind, ended=time.time(), seconds=seconds, error=str(error)))

    def _write(self, record: Record) -> None:
        if self._record:
            self._record.write(record.model_dump_json().encode() + b"\n")

    def _fire(self, method: str, name: str, value: float, tokens: int = 0, error: Exception | None = None) -> None:
        self.environment.events.request.fire(
            request_type=method, name=name, response_time=value, response_length=tokens, exception=error, context={}
        )


class StreamingUser(User):
    """Sends a request, reads the stream to its end, waits, and repeats."""

    abstract = True
    kind: ClassVar[Kind]
    load: ClassVar[Load]

    def on_start(self) -> None:
        """Give each user its own prompts."""
        self._speaker = self.load.new_speaker(self.kind)

    def wait_time(self) -> float:
        """Seconds between two requests."""
        return self.load.scenario.think.draw(self._speaker.rng)

    @task
    def ask(self) -> None:
        """One request."""
        begin = time.perf_counter()
        try:
            answer = self._stream(self._speaker.request(), begin)
        except (StreamError, OpenAIError, ValueError) as error:
            self._speaker.forget()
            self.load.failed(self.kind, time.perf_counter() - begin, error)
        else:
            self._speaker.heard(answer.text, answer.prompt_tokens + answer.output_tokens)
            self.load.succeeded(self.kind, answer)

    def _stream(self, request: ApiRequest, begin: float) -> Answer:
        reader = StreamReader(begin)
        with self.load.client.post(
            request.path, cast_to=object, body=request.body, stream=True, stream_cls=Stream[object]
        ) as chunks:
            for chunk in chunks:
                reader.feed(chunk, time.perf_counter())
        return reader.finish(time.perf_counter(), request.max_tokens)


class ChatUser(StreamingUser):
    """Single questions with a common system prompt."""

    kind = "chat"


class CompletionUser(StreamingUser):
    """Texts to continue."""

    kind = "completion"


class RagUser(StreamingUser):
    """Questions about long documents."""

    kind = "rag"


class MultiTurnUser(StreamingUser):
    """Conversations: each prompt starts with the whole previous one."""

    kind = "multi_turn"


@events.init_command_line_parser.add_listener
def _add_options(parser: ArgumentParser, **_: Any) -> None:
    parser.add_argument("--scenario", required=True, help="YAML file with the traffic")
    parser.add_argument("--record", default="", help="file to which every request is appended as a line of JSON")


@events.init.add_listener
def _prepare(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    if options is None:
        return
    scenario = Scenario.load(Path(options.scenario))
    StreamingUser.load = Load(environment, scenario, Path(options.record) if options.record else None)
    for user in environment.user_classes:
        traffic = scenario.traffic.get(user.kind)
        user.fixed_count = traffic.users if traffic else 0
