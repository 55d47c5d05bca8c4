"""What a release of vLLM decides anew about our classes: `python -m scripts.vllm_contract [VERSION]`.

Without VERSION: the newest on the package index. It is compared with the newest supported release before it. Ends with
1 where something differs, with 2 where the sources cannot be had.
"""

import argparse
import sys
from collections.abc import Iterator

from scripts.vllm_contract.names import Package, inherited, questions
from scripts.vllm_contract.releases import UnavailableError, newest, sources_of
from scripts.vllm_contract.sources import Sources
from vllm_antkv.releases import SUPPORTED


def main() -> int:
    """Print the differences."""
    parser = argparse.ArgumentParser(prog="python -m scripts.vllm_contract", description=__doc__)
    parser.add_argument("version", nargs="?", help="such as 0.34.0 (default: the newest)")
    arguments = parser.parse_args()
    try:
        version = arguments.version or newest()
        old, new = sources_of(base_of(version)), sources_of(version)
    except UnavailableError as error:
        print(error, file=sys.stderr)
        return 2
    lines = list(differences(Package(), Sources(old.root), Sources(new.root)))
    print(f"vLLM {new.version} against {old.version}: {len(lines)} differences", *lines, sep="\n")
    return 1 if lines else 0


def base_of(version: str) -> str:
    """The newest supported release before a version, or the oldest."""
    before = [each for each in SUPPORTED.values() if _numbers(each) < _numbers(version)]
    return before[-1] if before else next(iter(SUPPORTED.values()))


def differences(package: Package, old: Sources, new: Sources) -> Iterator[str]:
    """A line for each import that is gone, member that is new to a base of ours, and question that is new."""
    for each in package.imports:
        if new.find(each.module, each.name) is None and old.find(each.module, each.name) is not None:
            yield f"gone     {each.module}:{each.name}, which {each.where} imports"
    for place in sorted(inherited(package, new) - inherited(package, old)):
        yield f"new      {place}, which ours inherit"
    for line in questions(package, new) - questions(package, old):
        yield f"asks     {line}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


if __name__ == "__main__":
    sys.exit(main())
