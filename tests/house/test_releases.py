"""Which releases of vLLM are supported."""

import pytest

from vllm_antkv.releases import minor_release, not_supported


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
