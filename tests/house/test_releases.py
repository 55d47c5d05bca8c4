"""Which releases of vLLM are supported."""

import pytest

from vllm_antkv.releases import LOCKED, SUPPORTED, minor_release, not_supported


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
def test_the_minor_release_of_a_version(version, minor):
    assert minor_release(version) == minor
    assert (not_supported(version) is None) == (minor is not None)
