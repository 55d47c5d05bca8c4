"""How much work a release of vLLM is: `python -m scripts.vllm_contract [VERSION] [--record] [--all]`.

Without VERSION: the newest on the package index. Ends with 1 where something was not looked at or would break, with 2
where the release cannot be had. `--record` writes what the release has to `reviewed/`; the notes in it are then filled
in by whoever looked. `--all` shows what is the same, too.
"""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from scripts.vllm_contract.check import Finding, State, base_of, compare, observe
from scripts.vllm_contract.releases import UnavailableError, newest, sources_of

_STYLES = {State.SAME: "dim", State.CHANGED: "yellow", State.GONE: "red", State.NEW: "cyan"}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m scripts.vllm_contract", description=__doc__)
    parser.add_argument("version", nargs="?", help="such as 0.34.0 (default: the newest)")
    parser.add_argument("--record", action="store_true", help="write what the release has, for review")
    parser.add_argument("--all", action="store_true", help="show what is the same, too")
    arguments = parser.parse_args()
    console = Console()
    try:
        release = sources_of(arguments.version or newest())
    except UnavailableError as error:
        print(error, file=sys.stderr)
        return 2
    record = observe(release)
    if arguments.record:
        console.print(f"Wrote {record.save()}: now look at each difference, and say in `notes` what it means.")
    findings = compare(release, record)
    shown = [each for each in findings if arguments.all or each.state is not State.SAME or each.broken]
    title = f"vLLM {release.version} against {base_of(release.version) or 'itself'}"
    console.print(_details(f"{title}: what is not the same", shown))
    console.print(_summary(title, findings))
    open_ones = [each for each in findings if each.is_open]
    if open_ones:
        console.print(
            f"{len(open_ones)} to look at, {sum(each.broken is not None for each in open_ones)} of them break."
        )
    else:
        console.print("Everything was looked at, and nothing breaks.")
    return 1 if open_ones else 0


def _details(title: str, findings: list[Finding]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("state")
    table.add_column("in vLLM", overflow="fold", ratio=3)
    table.add_column("what of ours stands on it", ratio=2)
    table.add_column("reviewed", ratio=3)
    for each in sorted(findings, key=lambda finding: not finding.is_open):
        verdict = f"[bold red]breaks: {each.broken}[/]" if each.broken else each.note or "[bold yellow]not yet[/]"
        table.add_row(f"[{_STYLES[each.state]}]{each.state.value}[/]", each.item, each.why, verdict)
    return table


def _summary(title: str, findings: list[Finding]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("room")
    for heading in (*(state.value for state in State), "breaks", "not reviewed"):
        table.add_column(heading, justify="right")
    for room in (*dict.fromkeys(each.room for each in findings), None):
        inside = [each for each in findings if room in (None, each.room)]
        counts = [sum(each.state is state for each in inside) for state in State]
        broken = sum(each.broken is not None for each in inside)
        unseen = sum(each.is_open and each.broken is None for each in inside)
        table.add_row(room or "all", *map(str, (*counts, broken, unseen)), end_section=room is None)
    return table


if __name__ == "__main__":
    sys.exit(main())
