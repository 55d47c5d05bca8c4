"""The codebook of one (model, preset): its file, its header, whose it is, and where it is found."""

from vllm_antkv.codebook.file import Codebook as Codebook
from vllm_antkv.codebook.header import FORMAT_VERSION as FORMAT_VERSION
from vllm_antkv.codebook.header import CodebookHeader as CodebookHeader
from vllm_antkv.codebook.header import RopeLayout as RopeLayout
from vllm_antkv.codebook.header import SinkRule as SinkRule
from vllm_antkv.codebook.identity import ModelIdentity as ModelIdentity
from vllm_antkv.codebook.search import NoCodebookError as NoCodebookError
from vllm_antkv.codebook.search import codebook_path as codebook_path
from vllm_antkv.codebook.search import default_folders as default_folders
from vllm_antkv.codebook.search import find_codebook as find_codebook
from vllm_antkv.codebook.search import own_folder as own_folder
from vllm_antkv.codebook.search import shipped_folder as shipped_folder
from vllm_antkv.codebook.search import user_folder as user_folder
