"""Reads one streamed answer of an OpenAI-compatible server, times its tokens, and rejects incorrect or empty ones.

Independent of the client: `feed` takes the chunks of the answer as they arrive.
"""

from dataclasses import dataclass
from typing import Any


class StreamError(Exception):
    """The stream is not a correct answer; the message is one sentence."""


@dataclass(frozen=True)
class Answer:
    """A complete answer. Times are in seconds from the sending of the request.

    first: when the first text arrived.
    gaps: between two arrivals of text. The server may send several tokens at once.
    """

    text: str
    first: float
    gaps: tuple[float, ...]
    seconds: float
    prompt_tokens: int
    output_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time of the request."""
        return self.output_tokens / self.seconds


class StreamReader:
    """Takes in the chunks of one answer."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._pieces: list[str] = []
        self._arrivals: list[float] = []
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] | None = None

    def feed(self, chunk: Any, now: float) -> None:
        """One chunk, decoded."""
        try:
            self._take(chunk, now)
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            raise StreamError(f"Not a chunk of an answer ({error!r}): {str(chunk)[:200]}.") from error

    def finish(self, now: float, expected_tokens: int | None = None) -> Answer:
        """The answer, once the stream has ended."""
        if self._finish_reason not in ("stop", "length"):
            raise StreamError(f"The finish reason is {self._finish_reason!r}.")
        if self._usage is None:
            raise StreamError("The stream has no usage.")
        output_tokens = int(self._usage["completion_tokens"])
        if expected_tokens is not None and output_tokens != expected_tokens:
            raise StreamError(f"The answer has {output_tokens} tokens instead of {expected_tokens}.")
        if not self._pieces:
            raise StreamError(f"The answer of {output_tokens} tokens has no text.")
        return Answer(
            text="".join(self._pieces),
            first=self._arrivals[0] - self._begin,
            gaps=tuple(b - a for a, b in zip(self._arrivals, self._arrivals[1:], strict=False)),
            seconds=now - self._begin,
            prompt_tokens=int(self._usage["prompt_tokens"]),
            output_tokens=output_tokens,
        )

    def _take(self, chunk: dict[str, Any], now: float) -> None:
        self._usage = chunk.get("usage") or self._usage
        if not chunk["choices"]:
            return
        choice = chunk["choices"][0]
        self._finish_reason = choice["finish_reason"] or self._finish_reason
        piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
        if piece:
            self._pieces.append(piece)
            self._arrivals.append(now)
