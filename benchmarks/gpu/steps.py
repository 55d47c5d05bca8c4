"""What the GPU check does, in its order: first what everything else needs, last what takes longest."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.gpu_decode import CONTEXTS
from benchmarks.gpu_end_to_end import SIDES as END_TO_END_SIDES

#: Where a step's command names its JSON.
RESULT = "{result}"


@dataclass(frozen=True)
class Step:
    """One command.

    name: of the record; for `--only`.
    command: arguments of the Python interpreter; RESULT stands for a file that it writes.
    expected_s: what it is expected to take; none is started with less time left.
    limit_s: after that it is ended.
    environment: variables that it has beside ours.
    """

    name: str
    command: tuple[str, ...]
    expected_s: int
    limit_s: int
    environment: Mapping[str, str] = field(default_factory=dict)


def _benchmark(module: str, *options: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{module}", *options, "--json", RESULT)


def _tests(file: str, timeout_s: int, *options: str) -> tuple[str, ...]:
    # Only a thread can end a test that waits for a kernel that never ends.
    timeout = ("--timeout", str(timeout_s), "--timeout-method", "thread")
    return ("-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", *timeout, *options, f"tests/gpu/{file}.py")


#: The setting that decides about the kernels' design.
_FIRST = ("--contexts", "32768", "--batches", "8")

STEPS = (
    # What decides about designs, for a machine that may be gone in ten minutes: do the kernels run, are they right, how
    # fast is decoding with and without anchors.
    Step("environment", _benchmark("gpu.environment"), 45, 180),
    Step("kernels-cuda", _tests("test_cuda_gpu", 120, "-n", "4"), 45, 240),
    Step("first-decode default", _benchmark("gpu_decode", *_FIRST), 30, 180),
    Step("first-decode no-anchors", _benchmark("gpu_decode", *_FIRST, "--anchor-share", "0"), 30, 180),
    # The same tests where an access outside of what a kernel was given names its line.
    Step("checked-kernels-cuda", _tests("test_cuda_gpu", 120, "-n", "4"), 45, 240, {"ANTKV_CHECK": "1"}),
    Step("doctor", ("-c", "from vllm_antkv.cli import main; main()", "doctor"), 45, 120),
    # Kernels are compiled anew for every shape, in all configurations: processes side by side. A kernel that accesses
    # what it must not makes the other tests of its process fail too, and no others.
    Step("kernels-triton", _tests("test_triton_gpu", 240, "-n", "8"), 120, 420),
    Step("prompts", _tests("test_varlen_gpu", 120, "-n", "4"), 60, 240),
    Step("graphs", _tests("test_graphs_gpu", 120), 30, 240),
    Step("exactness", _tests("test_exactness_gpu", 240), 90, 360),
    Step("compiled", _tests("test_compiled_gpu", 240), 120, 420),
    Step("llama", _tests("test_llama_gpu", 240), 90, 360),
    Step("serve", ("-m", "scripts.demo", "--once"), 60, 240),
    # A context in each: where a kernel breaks one process, the other contexts are still measured.
    *(Step(f"decode {context}", _benchmark("gpu_decode", "--contexts", str(context)), 40, 240) for context in CONTEXTS),
    Step("prefill", _benchmark("gpu_prefill"), 30, 240),
    Step("encode-store", _benchmark("gpu_encode_store"), 20, 180),
    *(Step(f"end-to-end {side}", _benchmark("gpu_end_to_end", "--sides", side), 100, 420) for side in END_TO_END_SIDES),
    # Everything above runs on what vLLM takes by itself, which is model runner V2.
    Step("compiled-v1", _tests("test_compiled_gpu", 240), 120, 420, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
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
