"""The same prompt asked of two running servers: where their answers part, and how far their predictions are apart.

Both answer greedily. Then both are given the prompt and the other server's answer, token for token, and say how likely
they find each token: so the two are compared on one text, also behind the first token that differs. A server with an
antkv cache reads that text through its cache as it does when it generates (`prefill_reads_cache`).

Servers give the log-probabilities of their TOP_TOKENS most likely tokens. The divergence is over those that both list
and a rest, as in `evaluate.fidelity`: a lower bound of that over the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, Field

from vllm_antkv.errors import AntKVError
from vllm_antkv.evaluate.fidelity import TOP_TOKENS, TopTokens, divergence

#: What a server says of one position: token id -> vLLM's entry, of the most likely tokens and of the one that is there.
Step = dict[int, dict[str, Any]]
#: Seconds that a server may take for an answer.
_TIMEOUT = 600.0


class ServerError(AntKVError):
    """A server that cannot be asked, or does not answer as vLLM does."""


class TokenDifference(BaseModel, frozen=True):
    """A token of the text that both were given."""

    token: str
    kl: float = Field(description="From the other server's prediction to this server's, in nats.")
    logprobs: tuple[float, float] = Field(description="Of the token, by this server and by the other.")
    best: tuple[str, str] = Field(description="What this server and the other find most likely in its place.")


class Comparison(BaseModel, frozen=True):
    """The JSON of `antkv diff`."""

    servers: tuple[str, str]
    models: tuple[str, str]
    prompt: str
    answers: tuple[list[str], list[str]] = Field(description="Tokens of both answers.")
    first_difference: int | None = Field(description="Index of the first token that differs; null when none does.")
    prompt_kl: float | None = Field(description="Mean over the prompt, nats; null for a prompt of one token.")
    answer_kl: float = Field(description="Mean over the other server's answer, nats.")
    tokens: list[TokenDifference] = Field(description="Of the other server's answer.")
    top_tokens: int = TOP_TOKENS


@dataclass(frozen=True)
class Answer:
    """What a server generated: ids of the prompt and of the answer, and the text of the answer's tokens."""

    prompt_ids: list[int]
    token_ids: list[int]
    tokens: list[str]


class Server:
    """A running vLLM server, asked through its OpenAI API."""

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.url = url.rstrip("/")
        self._http = httpx.Client(headers=headers, timeout=_TIMEOUT)
        self.model = str(self._ask("GET", "/v1/models")["data"][0]["id"])

    def answer(self, prompt: str, max_tokens: int) -> Answer:
        """The greedy continuation of a text."""
        found = self._complete({"prompt": prompt, "max_tokens": max_tokens, "logprobs": 0, "return_token_ids": True})
        return Answer(found["prompt_token_ids"], found["token_ids"], found["logprobs"]["tokens"])

    def predictions(self, ids: list[int]) -> list[Step]:
        """For every token of a text but the first."""
        body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": TOP_TOKENS}
        steps = self._complete(body)["prompt_logprobs"][1:]
        return [{int(token): entry for token, entry in step.items()} for step in steps]

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        given = {"model": self.model, "temperature": 0, "seed": 0, **body}
        choice: dict[str, Any] = self._ask("POST", "/v1/completions", given)["choices"][0]
        return choice

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, self.url + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"{self.url} does not answer ({error}).") from None
        if response.status_code != httpx.codes.OK:
            raise ServerError(f"{self.url}{path} answers {response.status_code}: {response.text[:300]}")
        try:
            answer: dict[str, Any] = response.json()
        except ValueError:
            raise ServerError(f"{self.url}{path} does not answer with JSON: is it a vLLM server?") from None
        return answer


def compare_servers(this: Server, other: Server, prompt: str, max_tokens: int) -> Comparison:
    """Ask both.

    Raises ServerError: one does not answer, refuses the request, or has another tokenizer.
    """
    mine, theirs = (server.answer(prompt, max_tokens) for server in (this, other))
    if mine.prompt_ids != theirs.prompt_ids:
        raise ServerError(f"{this.url} and {other.url} cut the prompt into other tokens: they serve different models.")
    if not theirs.token_ids:
        raise ServerError(f"{other.url} answers this prompt with nothing.")
    text = theirs.prompt_ids + theirs.token_ids
    steps = tuple(server.predictions(text) for server in (this, other))
    kl = divergence(_top(steps[1]), _top(steps[0])).tolist()
    split = len(theirs.prompt_ids) - 1
    return Comparison(
        servers=(this.url, other.url),
        models=(this.model, other.model),
        prompt=prompt,
        answers=(mine.tokens, theirs.tokens),
        first_difference=first_difference(mine.token_ids, theirs.token_ids),
        prompt_kl=sum(kl[:split]) / split if split else None,
        answer_kl=sum(kl[split:]) / len(theirs.token_ids),
        tokens=[_difference(text[at + 1], (steps[0][at], steps[1][at]), kl[at]) for at in range(split, len(kl))],
    )


def first_difference(mine: Sequence[object], theirs: Sequence[object]) -> int | None:
    """Index of the first token that is not in both, maybe the length of the shorter one; None: they are equal."""
    if mine == theirs:
        return None
    pairs = zip(mine, theirs, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(theirs)))


def _top(steps: list[Step]) -> TopTokens:
    return TopTokens.of([{token: entry["logprob"] for token, entry in step.items()} for step in steps])


def _difference(token: int, steps: tuple[Step, Step], kl: float) -> TokenDifference:
    mine, theirs = steps
    best = (max(step.values(), key=lambda entry: entry["logprob"])["decoded_token"] for step in steps)
    return TokenDifference(
        token=theirs[token]["decoded_token"],
        kl=kl,
        logprobs=(mine[token]["logprob"], theirs[token]["logprob"]),
        best=tuple(best),
    )
