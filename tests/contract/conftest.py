"""Sources of the supported releases of vLLM: those that are not installed come from the package index, once."""

import pytest

from scripts.vllm_contract.releases import Release, UnavailableError, sources_of
from vllm_antkv.releases import SUPPORTED


@pytest.fixture(scope="session", params=SUPPORTED.values())
def release(request) -> Release:
    """Each supported release; skipped, with the reason, where it can neither be found nor fetched."""
    try:
        return sources_of(request.param)
    except UnavailableError as error:
        pytest.skip(str(error))
