"""Codebooks that come with the package are whole, and found for the model that they are for."""

from pathlib import Path

import pytest

from vllm_antkv import centroids
from vllm_antkv.codebook import Codebook, find_codebook

FILES = sorted(Path(centroids.__file__).parent.glob("*/*.safetensors"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_shipped_codebook_is_whole_and_found(path: Path) -> None:
    header = Codebook.load(path).header
    assert find_codebook("a model with a name alone", header.model, header.preset) == path
