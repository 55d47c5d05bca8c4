"""Run a scenario against a server and write the results: `python -m loadtest.run SCENARIO --out FOLDER`.

FOLDER gets locust's own report.html and CSV and JSON files, requests.jsonl (every request) and summary.json. The exit
code is 0 if every request was answered correctly, else 1.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from openai import OpenAIError
from rich.console import Console
from yaml import YAMLError

from loadtest.api import LOOPBACK, served_model
from loadtest.scenario import Scenario
from loadtest.summary import Summary, read_records, table

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
#: Seconds that requests get to finish when the time is up.
_STOP_SECONDS = 120


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("scenario", type=Path, help="YAML file")
    parser.add_argument("--url", default=LOOPBACK, help=f"the server (default: {LOOPBACK})")
    parser.add_argument("--out", type=Path, default=Path("loadtest-results"), help="folder for the results")
    arguments = parser.parse_args()
    try:
        summary = run(arguments.scenario, arguments.url, arguments.out)
    except OpenAIError as error:
        sys.exit(f"The server at {arguments.url} does not answer as vLLM does: {str(error).rstrip('.')}.")
    except (OSError, ValueError, YAMLError) as error:
        sys.exit(f"{arguments.scenario} cannot be used: {error}")
    console = Console()
    columns = {str(kind): figures for kind, figures in summary.by_kind.items()}
    console.print(table(summary.scenario, columns | {"total": summary.total}))
    for text in summary.errors:
        console.print(text, markup=False)
    return 1 if summary.total.failures else 0


def run(scenario_path: Path, url: str, out: Path) -> Summary:
    """Run a scenario against the server at `url`; the files go to the folder `out`."""
    scenario, model = Scenario.load(scenario_path), served_model(url)
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "requests.jsonl"
    path.unlink(missing_ok=True)
    options = {
        "--host": url,
        "--scenario": str(scenario_path.resolve()),
        "--record": str(path),
        "--users": str(scenario.users),
        "--spawn-rate": str(scenario.users),
        "--run-time": f"{scenario.seconds}s",
        "--stop-timeout": str(_STOP_SECONDS),
        "--html": str(out / "report.html"),
        "--csv": str(out / "locust"),
        "--json-file": str(out / "locust"),
        "--loglevel": "WARNING",
        # Failures are counted from the records.
        "--exit-code-on-error": "0",
    }
    command = [sys.executable, "-m", "locust", "--locustfile", str(LOCUSTFILE), "--headless", "--only-summary"]
    command += [part for pair in options.items() for part in pair]
    subprocess.run(command, check=True, cwd=LOCUSTFILE.parents[1])
    records = read_records(path)
    if not records:
        sys.exit("No request was made: see what locust printed.")
    summary = Summary.of(scenario.name, model, records)
    (out / "summary.json").write_text(summary.model_dump_json(indent=2) + "\n")
    return summary


if __name__ == "__main__":
    sys.exit(main())
