"""`antkv doctor MODEL --verify`: whether a model answers with an antkv cache as it does without.

The cache is told to keep every row as it is. What is left to differ is everything but quantisation: which layers there
are, what turns their keys, scales, pages, chunks, batches, prefix hits. The test suite compares every family with this.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_antkv.codebook import NoCodebookError, find_codebook
from vllm_antkv.config import AntKVConfig
from vllm_antkv.doctor.finding import Finding
from vllm_antkv.errors import AntKVError, UnsupportedModelError, reason
from vllm_antkv.layer_windows import has_gated_delta_nets
from vllm_antkv.presets import PRESETS

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm.lora.request import LoRARequest

    from vllm_antkv.offline.models import ModelCard

#: Tokens of the longest request, and of a step: longer prompts are cut into chunks, not at the edges of blocks.
MAX_MODEL_LEN = 512
STEP_TOKENS = 200
#: Tokens of the prompts: around the edges of VQ blocks, and more than a step.
LENGTHS = (5, 127, 128, 200, 300)
#: Generated for each.
NEW_TOKENS = 8
#: Settings with which every row is exact.
EXACT: dict[str, Any] = {"recency": f"sliding:{MAX_MODEL_LEN}", "windows": "exact"}
#: How much log-probabilities may differ, by dtype: vLLM's attention and ours add in another order.
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
_CANDIDATES = 5


@dataclass(frozen=True)
class Completion:
    """What a request got: tokens, the log-probabilities of its best candidates at each step, and its prefix hit."""

    tokens: tuple[int, ...]
    top_logprobs: tuple[Mapping[int, float], ...]
    num_cached_tokens: int

    def difference(self, other: "Completion") -> float:
        """The largest difference of a candidate's log-probability, up to the first token that differs.

        There it is how much one of them prefers its own token: little where both are as likely.
        """
        largest = 0.0
        for step, (own, others) in enumerate(zip(self.top_logprobs, other.top_logprobs, strict=True)):
            common = own.keys() & others.keys()
            chosen = {self.tokens[step], other.tokens[step]}
            # The last candidate may change places with the next one.
            if len(common) < len(own) - 1 or not chosen <= common:
                return float("inf")
            largest = max(largest, *(abs(own[token] - others[token]) for token in common))
            if len(chosen) == 2:
                a, b = chosen
                return max(largest, abs(own[a] - own[b]), abs(others[a] - others[b]))
        return largest


def complete(
    llm: "LLM",
    prompts: Sequence[list[int]],
    max_tokens: int,
    together: bool = True,
    loras: Sequence["LoRARequest | None"] | None = None,
) -> list[Completion]:
    """Greedy completions of prompts of token ids, each with its adapter, in one batch or one after the other."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=_CANDIDATES, ignore_eos=True)
    requests = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    adapters = list(loras or [None] * len(requests))
    size = len(requests) if together else 1
    return [
        completion_of(output)
        for at in range(0, len(requests), size)
        for output in llm.generate(
            requests[at : at + size], params, use_tqdm=False, lora_request=adapters[at : at + size]
        )
    ]


def completion_of(output: "RequestOutput") -> Completion:
    """What vLLM gave a request."""
    best = output.outputs[0]
    logprobs = tuple({token: entry.logprob for token, entry in step.items()} for step in best.logprobs)
    return Completion(tuple(best.token_ids), logprobs, output.num_cached_tokens)


def largest_difference(answers: Sequence[Completion], reference: Sequence[Completion]) -> float:
    """Over requests."""
    return max(a.difference(b) for a, b in zip(answers, reference, strict=True))


def check_answers(model: str, codebooks: str | None, dtype: str | None = None) -> Iterator[Finding]:
    """Start vLLM with `auto` and with an antkv cache, and compare what they answer.

    Args:
        model: folder or Hugging Face name.
        codebooks: folder with codebooks, or None for the places that are always searched.
        dtype: of the model and its rows; None: float32 on a CPU, or bfloat16 where vLLM's layers take nothing else
            there; otherwise that of the checkpoint.
    """
    import torch

    from vllm_antkv.offline.models import ModelCard

    remedy = "Give a model that vLLM serves without an antkv cache."
    if not torch.cuda.is_available():
        # An engine that fails in this process says why. On a GPU one would leave its memory behind.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        card = ModelCard.read(model, dtype or _exactest(model))
        preset = _preset(card, codebooks)
        prompts = _prompts(card)
        with _engine(card, "auto", AntKVConfig()) as (llm, tolerance):
            auto = complete(llm, prompts, NEW_TOKENS)
        remedy = "Serve this model with --kv-cache-dtype auto."
        with _engine(card, preset, AntKVConfig(codebooks=codebooks, **EXACT)) as (llm, tolerance):
            batched = complete(llm, prompts, NEW_TOKENS)
            cached = complete(llm, prompts, NEW_TOKENS, together=False)
    except AntKVError as error:
        yield Finding("answers", "problem", str(error), remedy)
        return
    for name, answers in (("in a batch, chunked", batched), ("alone, prefix hits", cached)):
        yield _verdict(name, preset, largest_difference(answers, auto), tolerance)


def _exactest(model: str) -> str | None:
    """Differences that are not rounding show best in float32; on GPUs not every attention of vLLM has it."""
    import torch

    from vllm_antkv.offline.pretrained import read_config

    if torch.cuda.is_available():
        return None
    config = read_config(model, UnsupportedModelError).get_text_config()
    return "bfloat16" if has_gated_delta_nets(config) else "float32"


def _verdict(name: str, preset: str, difference: float, tolerance: float) -> Finding:
    detail = f"log-probabilities differ by {difference:.2g} at most (allowed: {tolerance:g}), {preset} against auto"
    if difference <= tolerance:
        return Finding(name, "ok", f"the same answers: {detail}")
    return Finding(name, "problem", f"other answers: {detail}", "Serve this model with auto, and report it.")


def _preset(card: "ModelCard", codebooks: str | None) -> str:
    """One that has a codebook; without any, one whose codebook is learned at the start."""
    fitting = [name for name, preset in PRESETS.items() if card.identity.head_size % preset.sub_vector_size == 0]
    for name in fitting:
        try:
            find_codebook(card.name, card.identity, name, codebooks)
        except NoCodebookError:
            continue
        return name
    return "antkv-1bit" if "antkv-1bit" in fitting else fitting[0]


def _prompts(card: "ModelCard") -> list[list[int]]:
    """Token ids of text that is always there: this file's."""
    ids: list[int] = card.tokenizer(Path(__file__).read_text())["input_ids"]
    room = min(MAX_MODEL_LEN, card.max_context) - NEW_TOKENS
    return [ids[10 * i : 10 * i + min(length, room)] for i, length in enumerate(LENGTHS)]


@contextmanager
def _engine(card: "ModelCard", kv_cache_dtype: str, config: AntKVConfig) -> "Iterator[tuple[LLM, float]]":
    """An engine, and how much its log-probabilities may differ from those of another.

    Raises UnsupportedModelError where vLLM does not start, or fails while this is open.
    """
    from vllm_antkv.evaluate.engine import running_engine

    context, steps = min(MAX_MODEL_LEN, card.max_context), {"max_num_batched_tokens": STEP_TOKENS}
    with running_engine(card, kv_cache_dtype, config, context, **steps, enforce_eager=True) as llm:
        try:
            yield llm, TOLERANCE[str(card.dtype).removeprefix("torch.")]
        except Exception as error:  # anything can fail in the code of a model that nobody has run here
            raise UnsupportedModelError(
                f"vLLM cannot answer with this model and --kv-cache-dtype {kv_cache_dtype} ({reason(error)})."
            ) from error
