"""The next request of a user, by kind of traffic. Deterministic in seed, kind and user number."""

import random

from loadtest.api import Request, chat, completion
from loadtest.prose import Prose
from loadtest.scenario import Kind, Scenario

_QUESTION = "Question: what do the documents say about this? Answer in a few sentences."


class Speaker:
    """One user. Call `request`, then `heard` with the answer.

    model: name of the served model.
    number: which user of its kind this is.
    """

    def __init__(self, scenario: Scenario, kind: Kind, number: int, model: str, prose: Prose) -> None:
        self.rng = random.Random(f"{scenario.seed}/{kind}/{number}")
        self._kind, self._traffic = kind, scenario.traffic[kind]
        self._max_context = scenario.max_context
        self._model = model
        self._prose = prose
        # All users of a kind start their prompts with the same text, which the prefix cache can then share.
        self._shared = prose.write(self._traffic.shared, random.Random(f"{scenario.seed}/{kind}"))
        self._history: list[dict[str, str]] = []
        self._tokens_so_far = 0
        self._turn = 0

    def request(self) -> Request:
        """The request to send now."""
        text = self._prose.write(self._traffic.prompt.draw(self.rng), self.rng)
        max_tokens = max(1, int(self._traffic.output.draw(self.rng)))
        if self._kind == "completion":
            return completion(self._model, text, max_tokens)
        if self._kind == "multi_turn":
            return self._next_turn(text, max_tokens)
        if self._kind == "rag":
            text = f"Documents:\n{text}\n\n{_QUESTION}"
        return chat(self._model, [*self._system(), {"role": "user", "content": text}], max_tokens)

    def heard(self, answer: str, tokens: int) -> None:
        """Record an answer, and the number of tokens of prompt and answer; only conversations use it."""
        self._history.append({"role": "assistant", "content": answer})
        self._tokens_so_far = tokens

    def forget(self) -> None:
        """The last request failed: start a new conversation."""
        self._turn = 0

    def _next_turn(self, text: str, max_tokens: int) -> Request:
        longest = self._traffic.prompt.high + self._traffic.output.high
        full = self._tokens_so_far + longest > self._max_context
        if self._turn in (0, self._traffic.turns) or full:
            self._history, self._tokens_so_far, self._turn = self._system(), 0, 0
        self._turn += 1
        self._history.append({"role": "user", "content": text})
        return chat(self._model, list(self._history), max_tokens)

    def _system(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._shared}] if self._traffic.shared else []
