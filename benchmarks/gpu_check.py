"""`make gpu-check`: everything that has to be seen on a GPU, in one command.

Correctness of the kernels, exactness through real vLLM, and the benchmarks, each step in a process of its own. After
every step its outcome is in results.json, and all that steps print is in log.txt as they print it: a run that was cut
off goes on where it was, and one that runs out of its minutes says so and is simply started again. A step that fails is
recorded, and the next one runs. Changed sources make earlier results count no more.

    python -m benchmarks.gpu_check                       # at most ten minutes; run it until nothing is left
    python -m benchmarks.gpu_check --list
    python -m benchmarks.gpu_check --only decode prefill --again
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.device import ROOT, commit, require_gpu
from benchmarks.gpu.records import Record, Records, source_digest
from benchmarks.gpu.report import markdown
from benchmarks.gpu.steps import RESULT, Step, chosen

#: Some steps are still to be run.
UNFINISHED = 3


def main() -> int:
    """Run what is left; 0 when every step passed, 1 when one did not, 3 when some are left."""
    arguments = _arguments()
    try:
        steps, records = chosen(arguments.only), Records(arguments.out / "results.json")
    except ValueError as error:
        sys.exit(str(error))
    if arguments.list:
        print("\n".join(f"{step.name:32} about {step.expected_s} s" for step in steps))
        return 0
    require_gpu()
    deadline = time.monotonic() + 60 * arguments.minutes
    source = source_digest()
    left = [step for step in steps if arguments.again or not records.is_done(step.name, source)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    while (step := first_that_fits(left, deadline - time.monotonic())) is not None:
        print(f"== {step.name}", flush=True)
        record = run(step, source, min(step.limit_s, deadline - time.monotonic()), arguments.out / "log.txt")
        if record.status == "timeout" and record.seconds < step.limit_s:
            # Our time was up, not the step's: nothing is known about it.
            break
        left.remove(step)
        records.add(record)
        (arguments.out / "results.md").write_text(markdown(records))
        print(f"== {step.name}: {record.status} after {record.seconds:.0f} s", flush=True)
    print(f"Results: {arguments.out / 'results.md'}")
    if left:
        print(f"Still to be run: {', '.join(step.name for step in left)}. Start this again.")
        return UNFINISHED
    names = {step.name for step in steps}
    return int(any(record.status != "passed" for record in records if record.step in names))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-results", help="folder of the results")
    parser.add_argument("--minutes", type=float, default=9.5, help="start nothing that would end later (default: 9.5)")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps, by name or first word")
    parser.add_argument("--again", action="store_true", help="run steps again that have a result")
    parser.add_argument("--list", action="store_true", help="name the steps and end")
    return parser.parse_args()


def first_that_fits(steps: list[Step], seconds_left: float) -> Step | None:
    """The first step for which there is the time that it is expected to take."""
    return next((step for step in steps if step.expected_s <= seconds_left), None)


def run(step: Step, source: str, limit_s: float, log: Path) -> Record:
    """Run a step in a process group of its own, which is ended after `limit_s`.

    Its output is added to the log while it runs, and its end is shown and recorded.
    """
    started, begin = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, *(word.replace(RESULT, str(result)) for word in step.command)]
        with log.open("a") as output:
            print(f"== {step.name}, {started}", file=output, flush=True)
            length = output.tell()
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **step.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            try:
                status = "passed" if process.wait(limit_s) == 0 else "failed"
            except subprocess.TimeoutExpired:
                status = "timeout"
            finally:
                # Its engines, too: they hold the memory that the next step needs.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = log.read_bytes()[length:].decode(errors="replace")
        print(text[-4000:], flush=True)
        return Record.of(
            text,
            step=step.name,
            status=status,
            seconds=round(time.monotonic() - begin, 1),
            started=started,
            commit=commit(),
            source=source,
            result=json.loads(result.read_text()) if result.exists() else None,
        )


if __name__ == "__main__":
    # Whoever cuts this off must not leave a step behind that holds the GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
