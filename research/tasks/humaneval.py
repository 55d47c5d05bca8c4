"""What the tasks of this folder compute: prompts of HumanEval, and whether a program passes its tests.

Programs are those that a model wrote, and run in a process of their own with a limit on time and memory. That is no
sandbox: use a container.
"""

import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

#: Characters before a problem, at least: some 2,000 tokens.
_BEFORE = 6800
#: Seconds of a processor, and until one that only waits is ended: a busy machine is not to fail a right program.
_SECONDS, _WAITED = 10, 300
_BYTES = 4 << 30


def alone(docs: Dataset) -> Dataset:
    """Problems with nothing before them."""
    return docs.map(lambda doc: {"before": ""})


def behind_code(docs: Dataset) -> Dataset:
    """Problems behind those that follow in the list, the first behind the last, each with its solution."""
    texts = [doc["prompt"] + doc["canonical_solution"] + "\n\n" for doc in docs]

    def before(doc: dict[str, Any], index: int) -> dict[str, str]:
        text = ""
        for other in texts[index + 1 :] + texts[:index]:
            if len(text) < _BEFORE:
                text += other
        return {"before": text}

    return docs.map(before, with_indices=True)


def programs(answers: list[list[str]], docs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """What a model was asked to go on with, and what it wrote."""
    return [[doc["prompt"] + answer for answer in each] for each, doc in zip(answers, docs, strict=True)]


def passes(references: list[str], predictions: list[list[str]], **_: Any) -> dict[str, float]:
    """1 for a program that passes its tests, else 0: pass@1 of one answer."""
    ((program,),), (tests,) = predictions, references
    command = [sys.executable, "-I", "-c", f"{program}\n{tests}"]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=_WAITED, preexec_fn=_limit, check=False)
    except subprocess.TimeoutExpired:
        return {"passes": 0.0}
    return {"passes": float(ended.returncode == 0)}


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
