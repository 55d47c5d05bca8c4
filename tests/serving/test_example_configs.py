"""The example configurations are what vLLM's own parser and the antkv settings accept."""

from pathlib import Path

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from scripts.moved import serve_arguments
from vllm_antkv.config import AntKVConfig

CONFIGS = sorted((Path(__file__).parents[2] / "vllm_antkv" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_example_is_accepted(path):
    parser = serve_arguments().make_arg_parser(FlexibleArgumentParser())
    arguments = parser.parse_args(["--config", str(path)])
    assert arguments.kv_cache_dtype == "antkv-1bit"
    settings = AntKVConfig.from_additional_config(arguments.additional_config)
    assert settings != AntKVConfig()
    assert path.name in path.read_text(), "the command in the first line names the file"
