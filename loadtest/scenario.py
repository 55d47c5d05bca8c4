"""Traffic of a load test: users by kind, lengths of prompts and answers. Read from YAML."""

import math
import random
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

import yaml
from pydantic import BaseModel, Field, model_validator

Kind = Literal["chat", "completion", "rag", "multi_turn"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Spread(BaseModel, extra="forbid", frozen=True):
    """A truncated log-normal distribution, as in logs of chat services. `sigma: 0` is a constant."""

    median: Annotated[float, Field(gt=0)]
    sigma: Annotated[float, Field(ge=0)] = 0.0
    low: Annotated[float, Field(ge=0)] = 0.0
    high: float = math.inf

    @model_validator(mode="after")
    def _median_lies_between(self) -> Self:
        if not self.low <= self.median <= self.high:
            raise ValueError(f"median {self.median} must lie between low {self.low} and high {self.high}")
        return self

    def draw(self, rng: random.Random) -> float:
        """One value."""
        return min(max(rng.lognormvariate(math.log(self.median), self.sigma), self.low), self.high)


class Traffic(BaseModel, extra="forbid", frozen=True):
    """One kind of users. Lengths are in tokens.

    shared: tokens at the start of every prompt that all users of the kind have in common (a system prompt).
    turns: questions in one conversation; each prompt repeats the conversation so far.
    """

    users: Annotated[int, Field(ge=1)]
    prompt: Spread
    output: Spread
    shared: Annotated[int, Field(ge=0)] = 0
    turns: Annotated[int, Field(ge=1)] = 1


class Scenario(BaseModel, extra="forbid", frozen=True):
    """A load test.

    seconds: how long requests are sent; running ones are then awaited.
    think: seconds that a user waits between an answer and the next request.
    max_context: tokens that a prompt and its answer have at most; conversations start anew where they would not fit.
    """

    name: str
    seed: int = 0
    seconds: Annotated[int, Field(ge=1)]
    think: Spread
    max_context: Annotated[int, Field(ge=64)]
    traffic: dict[Kind, Traffic] = Field(min_length=1)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a YAML file."""
        return cls.model_validate(yaml.safe_load(path.read_text()))

    @property
    def users(self) -> int:
        """Users of all kinds."""
        return sum(traffic.users for traffic in self.traffic.values())

    @model_validator(mode="after")
    def _single_requests_fit(self) -> Self:
        for kind, traffic in self.traffic.items():
            longest = traffic.shared + traffic.prompt.high + traffic.output.high
            if longest > self.max_context:
                raise ValueError(f"{kind}: shared + prompt.high + output.high is {longest}, over {self.max_context}")
        return self
