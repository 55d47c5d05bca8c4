"""The codebook of one (model, preset): its file, its header, whose it is, and where it is found."""

from vllm_antkv.codebook.file import Codebook
from vllm_antkv.codebook.header import FORMAT_VERSION, CodebookHeader, RopeLayout, SinkRule
from vllm_antkv.codebook.identity import ModelIdentity
from vllm_antkv.codebook.search import (
    NoCodebookError,
    codebook_path,
    default_folders,
    find_codebook,
    own_folder,
    shipped_folder,
    user_folder,
)

__all__ = [
    "FORMAT_VERSION",
    "Codebook",
    "CodebookHeader",
    "ModelIdentity",
    "NoCodebookError",
    "RopeLayout",
    "SinkRule",
    "codebook_path",
    "default_folders",
    "find_codebook",
    "own_folder",
    "shipped_folder",
    "user_folder",
]
