"""One scenario against `--kv-cache-dtype auto` and a preset: `python -m loadtest.compare SCENARIO --model MODEL`.

Both servers are started here, one after the other; arguments that are not ours go to both as those of `vllm serve`.
Each server's files go to a folder of its own below `--out`, the comparison to compare.json. The exit code is 0 if every
request was answered correctly by both, else 1.
"""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from yaml import YAMLError

from loadtest.run import run
from loadtest.scenario import Scenario
from loadtest.server import EMBEDDED, ServerError, running_server
from loadtest.summary import table


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("scenario", type=Path, help="YAML file")
    parser.add_argument("--model", default=str(EMBEDDED), help="model to serve (default: the embedded one)")
    parser.add_argument("--preset", default="antkv-1bit", help="compared with auto (default: antkv-1bit)")
    parser.add_argument("--out", type=Path, default=Path("loadtest-results"), help="folder for the results")
    arguments, vllm = parser.parse_known_args()
    try:
        title = Scenario.load(arguments.scenario).name
    except (OSError, ValueError, YAMLError) as error:
        sys.exit(f"{arguments.scenario} cannot be used: {error}")
    summaries = {}
    for dtype in ("auto", arguments.preset):
        out = arguments.out / dtype
        out.mkdir(parents=True, exist_ok=True)
        try:
            with running_server(arguments.model, dtype, out / "server.log", vllm) as server:
                summaries[dtype] = run(arguments.scenario, server.url, out)
        except ServerError as error:
            sys.exit(str(error))
    content = {dtype: summary.model_dump() for dtype, summary in summaries.items()}
    (arguments.out / "compare.json").write_text(json.dumps(content, indent=2) + "\n")
    Console().print(table(title, {dtype: summary.total for dtype, summary in summaries.items()}))
    return 1 if any(summary.total.failures for summary in summaries.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
