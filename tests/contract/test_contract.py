"""What the package uses of vLLM is in every supported release, and what a release changes of it is found."""

import pytest

from scripts.vllm_contract.__main__ import base_of, differences, main
from scripts.vllm_contract.names import Package
from scripts.vllm_contract.releases import UnavailableError, fetch, installed
from scripts.vllm_contract.sources import Function, Sources, parameters
from vllm_antkv.releases import SUPPORTED


@pytest.fixture(scope="module")
def package() -> Package:
    return Package()


def test_every_import_is_there(release, package):
    """What a release does not have is looked up behind a question for it."""
    sources = Sources(release.root)
    missing = [each for each in package.imports if sources.find(each.module, each.name) is None]
    assert not missing
    assert len(package.imports) > 50


def test_our_methods_take_what_vllm_passes(release, package):
    """By name, as vLLM may pass it so; more than that only with a default."""
    sources = Sources(release.root)
    checked = 0
    for each in package.overrides:
        definition = sources.find(each.base.module, each.base.name)
        assert definition is not None
        node = sources.members(definition).get(each.method)
        if isinstance(node, Function) and each.method != "__init__":
            ours, theirs = each.parameters.split(", "), parameters(node).split(", ")
            given = [name.removesuffix("=") for name in theirs]
            if "*" not in each.parameters:
                assert [name.removesuffix("=") for name in ours][: len(given)] == given, each
            assert all(name.endswith("=") or "*" in name for name in ours[len(given) :]), each
            checked += 1
    assert checked > 15


def test_the_installed_vllm_is_a_supported_one():
    """A patch release fails here until somebody looked at it."""
    assert installed().version in SUPPORTED.values(), "run `make vllm-contract`, and change vllm_antkv/releases.py"


def test_a_release_is_compared_with_the_one_before():
    oldest, newest = SUPPORTED.values()
    assert [base_of(each) for each in (oldest, newest, "99.0.0")] == [oldest, oldest, newest]


@pytest.mark.long
def test_what_a_release_changes_is_found(release, package):
    found = list(differences(package, Sources(installed().root), Sources(release.root)))
    assert bool(found) == (release.version != installed().version)


def test_without_an_index_there_is_one_sentence(monkeypatch, capsys, refused):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with refused(UnavailableError):
        fetch("0.0.1")
    monkeypatch.setattr("sys.argv", ["vllm_contract"])
    assert main() == 2
    assert capsys.readouterr().err.count("\n") == 1
