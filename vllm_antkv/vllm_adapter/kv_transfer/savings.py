"""What hits in the store were worth, in the eyes of the scheduler."""

import time
from collections import deque
from dataclasses import dataclass, field

from pydantic import BaseModel, Field

from vllm_antkv.config import VQ_BLOCK_SIZE


class Store(BaseModel, frozen=True):
    """Pages in a folder; what a store did since the start."""

    lookups: int = Field(description="Requests that it was asked for.")
    hits: int = Field(description="Of those, that had pages from files.")
    hit_tokens: int = Field(description="Tokens of these pages.")
    seconds_saved: float = Field(description="An estimate: what computing them would have taken, less the loading.")
    num_bytes: int = Field(description="Of the files, of all servers.")
    max_bytes: int | None = Field(description="That they may take; null: as many as there is room for.")
    evictions: int = Field(description="Files that the limit has cost, in the life of the folder.")


@dataclass
class Savings:
    """Counts since the start.

    lookups: requests that were admitted, each time.
    hits, hit_tokens: of those, that were admitted with pages from files, and the tokens of these pages.
    """

    lookups: int = 0
    hits: int = 0
    hit_tokens: int = 0
    #: Loads that are under way: tokens, and when they began.
    _loading: dict[str, tuple[int, float]] = field(default_factory=dict)
    #: Steps that are under way: tokens, and when they were scheduled.
    _steps: deque[tuple[int, float]] = field(default_factory=deque)
    _last_step_ended: float = 0.0
    _seconds_loading: float = 0.0
    #: Of the steps that computed prompts.
    _tokens: int = 0
    _seconds: float = 0.0

    def load_begins(self, request_id: str, num_tokens: int) -> None:
        """A request is admitted."""
        self._loading[request_id] = num_tokens, time.monotonic()

    def load_ends(self, request_id: str, succeeded: bool) -> None:
        """Its pages are there, or will be computed."""
        num_tokens, began = self._loading.pop(request_id, (0, 0.0))
        if succeeded and num_tokens:
            self.hits += 1
            self.hit_tokens += num_tokens
            self._seconds_loading += time.monotonic() - began

    def step_begins(self, num_tokens: int) -> None:
        """A step is scheduled."""
        if num_tokens:
            self._steps.append((num_tokens, time.monotonic()))

    def step_ends(self) -> None:
        """The oldest step under way has ended, unless there is none."""
        if not self._steps:
            return
        num_tokens, began = self._steps.popleft()
        now = time.monotonic()
        # With two steps under way, one waits for the other.
        began, self._last_step_ended = max(began, self._last_step_ended), now
        if num_tokens >= VQ_BLOCK_SIZE:
            self._tokens += num_tokens
            self._seconds += now - began

    @property
    def seconds_saved(self) -> float:
        """An estimate: what tokens of prompts took to compute, for those that were loaded, less what loading took."""
        if not self._tokens:
            return 0.0
        return max(self.hit_tokens * self._seconds / self._tokens - self._seconds_loading, 0.0)
