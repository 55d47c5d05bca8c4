"""How often a served model calls the right function, by the Berkeley Function Calling Leaderboard's own checker.

Questions, functions and answers are those that `bfcl-eval` brings; functions are offered through the chat API. A call
is required, so that vLLM holds answers to the functions' schemas: small models know which function to call, but not how
any of vLLM's parsers wants it written. In an environment of its own, as `bfcl-eval` wants other versions than vLLM:

    vllm serve MODEL --enable-auto-tool-choice --tool-call-parser hermes --kv-cache-dtype antkv-1bit
    pip install bfcl-eval soundfile
    python research/tool_calls.py --server antkv-1bit=http://localhost:8000 --json OUT
"""

import argparse
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bfcl_eval
import requests
from bfcl_eval.constants.enums import Language, ModelStyle
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
from bfcl_eval.model_handler.utils import convert_to_tool
from tqdm import tqdm

CATEGORIES = ("simple_python", "multiple", "parallel")
#: A model of the leaderboard whose functions' names have underscores for dots, as the chat API wants them.
_LIKE = "gpt-4o-2024-11-20-FC"
_IN_FLIGHT, _MAX_TOKENS, _SECONDS = 8, 512, 600


def main() -> None:
    """Ask all servers, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL", help="repeatable")
    parser.add_argument("--categories", nargs="+", default=list(CATEGORIES))
    parser.add_argument("--limit", type=int, help="questions of each category; without it, all")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    report: dict[str, dict[str, Any]] = {}
    for name, _, url in (server.partition("=") for server in given.server):
        report[name] = {category: share(url, category, given.limit) for category in given.categories}
        for category, scored in report[name].items():
            print(f"{name} {category}: {scored['right']:.1%} ± {scored['error']:.1%} of {scored['questions']}")
        given.json.write_text(json.dumps(report, indent=2))


def share(url: str, category: str, limit: int | None) -> dict[str, float]:
    """Of right answers, its standard error, and how many questions there were."""
    model = requests.get(f"{url}/v1/models", timeout=_SECONDS).json()["data"][0]["id"]
    data = Path(bfcl_eval.__file__).parent / "data"
    questions, answers = (_lines(folder / f"BFCL_v4_{category}.json") for folder in (data, data / "possible_answer"))
    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        pairs = list(zip(questions, answers, strict=True))[:limit]
        asked = pool.map(lambda pair: is_right(url, model, category, *pair), pairs)
        right = list(tqdm(asked, total=len(pairs), desc=category))
    mean = sum(right) / len(right)
    return {"right": mean, "error": math.sqrt(mean * (1 - mean) / len(right)), "questions": len(right)}


def is_right(url: str, model: str, category: str, question: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Whether a question's functions are called as they should be."""
    body = {
        "model": model,
        "messages": question["question"][0],
        "tools": convert_to_tool(question["function"], GORILLA_TO_OPENAPI, ModelStyle.OPENAI_COMPLETIONS),
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": _MAX_TOKENS,
    }
    response = requests.post(f"{url}/v1/chat/completions", json=body, timeout=_SECONDS)
    response.raise_for_status()
    called = response.json()["choices"][0]["message"].get("tool_calls") or []
    try:
        calls = [{call["function"]["name"]: json.loads(call["function"]["arguments"])} for call in called]
    except json.JSONDecodeError:
        return False
    checked = ast_checker(question["function"], calls, answer["ground_truth"], Language.PYTHON, category, _LIKE)
    return bool(checked["valid"])


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
