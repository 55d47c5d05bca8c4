"""What we say about releases, ours and vLLM's, is the same everywhere."""

import re
from pathlib import Path

import pytest

from vllm_antkv import __version__
from vllm_antkv.releases import LOCKED, SUPPORTED, minor_release, not_supported, supported_releases
from vllm_antkv.vllm_adapter.hooks import HOOKS

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_window_is_two_minor_releases():
    assert len(SUPPORTED) == 2
    assert all(patch.startswith(f"{minor}.") for minor, patch in SUPPORTED.items())
    assert [tuple(map(int, minor.split("."))) for minor in SUPPORTED] == sorted(
        tuple(map(int, minor.split("."))) for minor in SUPPORTED
    )
    assert minor_release(LOCKED) is not None


@pytest.mark.parametrize(
    ("version", "minor"),
    [
        ("0.32.0", "0.32"),
        ("0.33.1+cpu", "0.33"),
        ("0.33.0rc1", "0.33"),
        ("0.34.0", None),
        ("0.3.2", None),
        ("0.320.1", None),
    ],
)
def test_the_minor_release_of_a_version(version: str, minor: str | None):
    assert minor_release(version) == minor
    assert (not_supported(version) is None) == (minor is not None)


def test_the_newest_release_in_the_changelog_is_this_one_and_names_its_vllm():
    versions = re.findall(r"^## \[(\d[\d.]*)\].*\n\nFor vLLM (.*)\.$", page("CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == (__version__, supported_releases())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("docs/compatibility.md", f"| {__version__} | {supported_releases()} |"),
        ("docs/deployment.md", f"vllm-antkv:{__version__} MODEL"),
        ("docs/troubleshooting.md", supported_releases("or")),
        ("README.md", f"vLLM {' or '.join(SUPPORTED)}"),
    ],
)
def test_a_page_names_the_window(name: str, words: str):
    assert words in page(name)


def test_every_hook_has_a_proposal_and_every_proposal_a_hook():
    rows = re.findall(r"^\| `(\w+)` \| <(\S+)> \|", page("docs/upstreaming.md"), re.MULTILINE)
    assert rows == [(hook.name, hook.upstream) for hook in HOOKS]
