"""The real `vllm serve`, as a process of its own that tests talk to over HTTP."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from loadtest.server import Server, running_server
from tests.patience import PATIENCE
from tests.serving.conftest import EMBEDDED, PRESET

MODEL_NAME = "tiny"
_VLLM = Path(sys.executable).with_name("vllm")
_CACHE = "VLLM_CACHE_ROOT"


def make_odd_model(folder: Path, context: int) -> Path:
    """Random weights of a shape that nobody ships codebooks for, with the embedded model's tokenizer."""
    shutil.copytree(EMBEDDED, folder, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(EMBEDDED / "tokenizer_config.json", folder)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=200,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def vllm_environment() -> dict[str, str]:
    """Of a server on a small machine; nothing of the in-process engines' settings but the place of vLLM's cache."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_") or name == _CACHE}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "antkv",
    }


def run_vllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `vllm` with arguments that make it end by itself; its output is in `stdout`."""
    return subprocess.run(
        [str(_VLLM), *arguments],
        env=vllm_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@contextmanager
def serving(model: Path, log: Path, also: Mapping[str, str] = {}, **options: str) -> Iterator[Server]:
    """A server of a model with these options; also: more of its environment."""
    options = {"--served-model-name": MODEL_NAME, "--dtype": "float32", "--max-model-len": "1024", **options}
    arguments = ["--enforce-eager", *(part for pair in options.items() for part in pair)]
    environment = vllm_environment() | also
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - environment.keys():
            patch.delenv(name)
        with running_server(str(model), PRESET, log, arguments, environment) as running:
            yield running


def answer(url: str, prompt: list[int]) -> list[int]:
    """Eight tokens."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=PATIENCE)
    response.raise_for_status()
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens
