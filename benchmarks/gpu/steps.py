"""What the GPU check does, in its order: first what everything else needs, last what takes longest."""

from dataclasses import dataclass

from benchmarks.gpu_capacity import SIDES as CAPACITY_SIDES
from benchmarks.gpu_end_to_end import SIDES as END_TO_END_SIDES

#: Where a step's command names its JSON.
RESULT = "{result}"
_PYTEST = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Step:
    """One command.

    name: of the record; for `--only`.
    command: arguments of the Python interpreter; RESULT stands for a file that it writes.
    expected_s: what it is expected to take; none is started with less time left.
    limit_s: after that it is ended.
    """

    name: str
    command: tuple[str, ...]
    expected_s: int
    limit_s: int


def _benchmark(module: str, *options: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{module}", *options, "--json", RESULT)


STEPS = (
    Step("environment", _benchmark("gpu.environment"), 45, 180),
    Step("doctor", ("-c", "from vllm_antkv.cli import main; main()", "doctor"), 45, 120),
    # Triton compiles every shape of the tests anew, in all configurations: processes side by side.
    Step("kernels-triton", (*_PYTEST, "tests/gpu/test_triton_gpu.py", "-n", "8"), 120, 420),
    Step("kernels-cuda", (*_PYTEST, "tests/gpu/test_cuda_gpu.py"), 45, 240),
    Step("graphs", (*_PYTEST, "tests/gpu/test_graphs_gpu.py"), 30, 240),
    Step("exactness", (*_PYTEST, "tests/gpu/test_exactness_gpu.py"), 180, 480),
    Step("serve", ("scripts/demo.py", "--once"), 60, 240),
    Step("decode", _benchmark("gpu_decode"), 120, 420),
    Step("prefill", _benchmark("gpu_prefill"), 30, 240),
    Step("encode-store", _benchmark("gpu_encode_store"), 20, 180),
    *(Step(f"end-to-end {side}", _benchmark("gpu_end_to_end", "--sides", side), 100, 420) for side in END_TO_END_SIDES),
    *(Step(f"capacity {side}", _benchmark("gpu_capacity", "--sides", side), 45, 240) for side in CAPACITY_SIDES),
)


def chosen(only: list[str] | None) -> tuple[Step, ...]:
    """The steps whose name is, or begins with a word that is, in `only`; all where it is None.

    Raises:
        ValueError: there is no such step.
    """
    if only is None:
        return STEPS
    known = {step.name for step in STEPS} | {step.name.split()[0] for step in STEPS}
    for name in only:
        if name not in known:
            raise ValueError(f"There is no step '{name}': choose among {', '.join(sorted(known))}.")
    return tuple(step for step in STEPS if step.name in only or step.name.split()[0] in only)
