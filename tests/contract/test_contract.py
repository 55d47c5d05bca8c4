"""The contract says everything that is used of vLLM, and every supported release keeps it as it was reviewed."""

from functools import cache
from pathlib import Path

from scripts.vllm_contract.check import Record, compare, observe, reviewed_versions
from scripts.vllm_contract.entries import ENTRIES
from scripts.vllm_contract.ours import Use, unknown_imports, uses
from scripts.vllm_contract.releases import Release, installed
from scripts.vllm_contract.reliance import How, Reliance
from scripts.vllm_contract.sources import Sources, sources_below


@cache
def used(root: Path) -> list[Use]:
    return uses(sources_below(root))


observed = cache(observe)


def stated(sources: Sources) -> set[tuple[str, str]]:
    """Every definition and member that an entry is about, where these sources have it."""
    found: set[tuple[str, str]] = set()
    for entry in ENTRIES:
        module, _, symbol = entry.where.partition(":")
        # What only another release has is looked up in a module of this one.
        found.update((str(sources.find(each, "")), symbol) for each in module.split("|"))
        place = entry.find(sources)
        if place is not None:
            definition = str(place[0])
            members = entry.expects.split() if entry.how is How.FIELDS else []
            found.update((definition, member) for member in ("", place[1], *members))
    return found


def test_every_name_of_vllm_in_our_code_is_in_the_contract(release: Release) -> None:
    known = stated(sources_below(release.root))
    missing = {f"{use.definition} {use.member} ({use.where})" for use in used(release.root) if use.key not in known}
    assert not missing, "say in scripts/vllm_contract/entries/ what is relied on"


def test_every_import_is_there(release: Release) -> None:
    """What a release does not have is looked up in `scripts.moved`, or behind a question for it."""
    missing = unknown_imports(sources_below(release.root))
    assert not missing


def overrides(release: Release) -> list[tuple[Reliance, list[Use]]]:
    sources = sources_below(release.root)
    found = []
    for entry in ENTRIES:
        place = entry.find(sources) if entry.how is How.OVERRIDE and entry.is_for(release.minor) else None
        if place is not None:
            key = str(place[0]), place[1]
            found.append((entry, [use for use in used(release.root) if use.overrides and use.key == key]))
    return found


def test_what_the_contract_says_is_overridden_is(release: Release) -> None:
    missing = [entry.where for entry, ours in overrides(release) if not ours]
    assert not missing, "vLLM's own answer would be given for our pages"


def test_our_methods_take_what_vllm_passes(release: Release) -> None:
    """By name, as vLLM may pass it so; more than that only with a default."""
    for entry, ours in overrides(release):
        theirs = [each.removesuffix("=") for each in entry.expects.split(", ")]
        for use in ours:
            own = use.parameters.split(", ")
            assert [each.removesuffix("=") for each in own][: len(theirs)] == theirs, use.where
            assert all(each.endswith("=") for each in own[len(theirs) :]), use.where


def test_nothing_is_stated_twice() -> None:
    statements = [(entry.where, entry.how, entry.expects) for entry in ENTRIES]
    assert len(set(statements)) == len(statements)


def test_a_release_fits_and_every_difference_was_looked_at(release: Release) -> None:
    assert release.version in reviewed_versions(), f"run `make vllm-contract VERSION={release.version}`"
    open_ones = [
        f"{each.item}: {each.broken or each.state.value}"
        for each in compare(release, observed(release))
        if each.is_open
    ]
    assert not open_ones


def test_a_release_is_the_one_that_was_reviewed(release: Release) -> None:
    assert_as_reviewed(release)


def test_the_installed_vllm_is_one_that_was_reviewed() -> None:
    """A patch release, or a build with changes, fails here until somebody looked at it."""
    here = installed()
    assert here.version in reviewed_versions(), f"run `make vllm-contract VERSION={here.version}`"
    assert_as_reviewed(here)


def assert_as_reviewed(release: Release) -> None:
    found, reviewed = observed(release), Record.load(release.version)
    assert found.items == reviewed.items
    assert found.questions == reviewed.questions
