"""Command lines of `vllm serve` that must not start a server, one a row.

vLLM's own parser and configuration, in this process: everything that a server checks before its engine starts. That
`vllm serve` then ends with the sentence and an exit code that is not 0: `test_status.py`. Models and options that an
antkv cache does not work with: `test_refusals.py`.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from scripts.moved import serve_arguments
from tests.serving.conftest import EMBEDDED, PRESET
from tests.unit import spoilt
from vllm_antkv.codebook import codebook_path
from vllm_antkv.errors import AntKVError, SettingsError
from vllm_antkv.plugin import register

CONFIG = "--additional-config"


def settings(**values: Any) -> list[str]:
    return [CONFIG, json.dumps({"antkv": values})]


#: Options after `--kv-cache-dtype antkv-1bit`, words of what vLLM's parser says. It ends with exit code 2.
USAGE: list[tuple[list[str], str]] = [
    (["--kv-cache-dtype"], "expected one argument"),
    ([CONFIG], "expected one argument"),
    ([CONFIG, '{"antkv": {"prefix": 5}'], "cannot be converted"),
    ([CONFIG, "{antkv: {}}"], "cannot be converted"),
    ([CONFIG, '{"antkv": {"prefix": ' + "1" * 5000 + "}}"], "cannot be converted"),
]

#: What somebody who wants a preset may write.
TYPOS = ("antkv", "ANTKV-1BIT", "antkv-1bit,antkv-2bit")

#: Options, words of the sentence. It is ours, in the process that the user started.
OURS: list[tuple[list[str], str]] = [
    (settings(prefix="8"), "setting 'prefix' is not usable"),
    ([CONFIG, '{"antkv": {"prefix": 8, "prefix": -1}}'], "setting 'prefix' is not usable"),
    ([CONFIG + ".antkv.prefix", "many"], "setting 'prefix' is not usable"),
    ([CONFIG + ".antkv", "8"], "setting 'antkv' is not usable"),
    (settings(codebooks="/none"), "make one with `antkv calibrate"),
    (settings(codebooks="/etc/passwd"), "make one with `antkv calibrate"),
    (settings(codebooks="x" * 4000), "make one with `antkv calibrate"),
    (settings(calibration_text="a\x1bb"), "setting 'calibration_text' is not usable"),
    (["--block-size", "64"], "--block-size 64 cannot be used"),
    (["--block-size", "256"], "--block-size 256 cannot be used"),
]

#: What lies where the codebook should, words of the sentence.
CODEBOOKS: dict[str, tuple[spoilt.Spoil, str]] = {
    "another model's": (lambda path: spoilt.good_codebook().save(path), "learned from another model"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "cannot be read"),
}


@pytest.fixture(scope="module")
def configure(engine_environment) -> Callable[[list[str]], VllmConfig]:
    """Everything that `vllm serve` does before it starts an engine."""
    register()
    parser = serve_arguments().make_arg_parser(FlexibleArgumentParser())

    def configure(options: list[str]) -> VllmConfig:
        arguments = parser.parse_args(["--model", str(EMBEDDED), "--kv-cache-dtype", PRESET, *options])
        return AsyncEngineArgs.from_cli_args(arguments).create_engine_config()

    return configure


def shorter(value: object) -> str:
    return " ".join(value)[:60] if isinstance(value, list) else ""


@pytest.mark.parametrize(("options", "words"), USAGE, ids=shorter)
def test_the_parser_refuses(configure, capsys, options, words):
    with pytest.raises(SystemExit) as ended:
        configure(options)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("typo", TYPOS)
def test_what_is_no_preset_is_refused(refused, typo):
    """With one sentence, by whatever way it comes: vLLM 0.33's parser takes any word."""
    register()
    with refused(SettingsError, f"Unknown preset '{typo}': choose one of antkv-4bit"):
        AsyncEngineArgs(model=str(EMBEDDED), kv_cache_dtype=typo).create_engine_config()


@pytest.mark.parametrize(("options", "words"), OURS, ids=shorter)
def test_we_refuse(configure, reads_well, options, words):
    with pytest.raises(AntKVError) as caught:
        configure(options)
    # The name of a folder is shown whole, however long.
    assert words in reads_well(AntKVError(str(caught.value).replace("x" * 4000, "x")))


@pytest.mark.parametrize("name", CODEBOOKS)
def test_a_codebook_that_cannot_be_served(configure, refused, tmp_path, name):
    spoil, words = CODEBOOKS[name]
    path = codebook_path(tmp_path, PRESET)
    spoil(path)
    with refused(AntKVError, words, str(path)):
        configure(settings(codebooks=str(tmp_path)))


def test_nothing_else_is_refused(configure):
    configure([])
    config = configure([CONFIG, '{"somebody else": [1]}', "--block-size", "128"])
    assert config.additional_config["somebody else"] == [1]
