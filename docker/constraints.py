"""Print constraints for pip: installed distributions stay, others come in the locked version.

    python constraints.py gpu.in gpu.lock > constraints.txt

Used while docker/Dockerfile is built. Stops where the vLLM that is installed is not the one that gpu.in pins.
"""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name


def main() -> None:
    """The command."""
    wanted, lock = (pins(Path(name).read_text()) for name in sys.argv[1:])
    installed: dict[str, str] = {canonicalize_name(each.name): each.version for each in distributions()}
    if installed.get("vllm", "none").split("+")[0] != wanted["vllm"]:
        sys.exit(f"This image has vLLM {installed.get('vllm', 'none')}, but gpu.in pins {wanted['vllm']}.")
    for name, version in sorted((lock | installed).items()):
        print(f"{name}=={version}")


def pins(text: str) -> dict[str, str]:
    """Normal name -> version, of the lines `name==version`."""
    return {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)}


if __name__ == "__main__":
    main()
