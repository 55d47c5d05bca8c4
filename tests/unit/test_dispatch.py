"""Which kernels run: the fastest that can, the one insisted on, or a loud warning."""

import logging

import pytest
import torch
from pydantic import ValidationError

from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import SettingsError
from vllm_antkv.ops import cpu
from vllm_antkv.ops.dispatch import KERNELS, choose

CPU = torch.device("cpu")


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    """As after an installation without a C++ compiler."""
    monkeypatch.setattr(cpu, "library_path", lambda: tmp_path / "absent.so")


def test_the_settings_name_every_set_of_kernels():
    for kernels in KERNELS:
        assert AntKVConfig(kernels=kernels.name).kernels == kernels.name
    with pytest.raises(ValidationError):
        AntKVConfig(kernels="fastest")


@pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
def test_a_cpu_runs_the_kernels_for_cpus(caplog):
    with caplog.at_level(logging.WARNING, "vllm.antkv"):
        assert choose("auto", CPU).name == "cpu"
    assert not caplog.records
    assert choose("reference", CPU).name == "reference"


def test_without_a_library_the_reference_runs_and_says_that_it_is_slow(no_library, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, "vllm.antkv"):
        assert choose("auto", CPU).name == "reference"
    assert "SLOW" in caplog.text
    assert "no C++ compiler was found" in caplog.text


def test_insisting_on_kernels_that_cannot_run_is_an_error(no_library):
    with pytest.raises(SettingsError, match=r"'kernels' is 'cpu', but the C\+\+ kernels were not built"):
        choose("cpu", CPU)


def test_kernels_for_cpus_do_not_run_on_a_gpu_nor_those_for_gpus_on_a_cpu():
    with pytest.raises(SettingsError, match="run on CPUs only"):
        choose("cpu", torch.device("cuda"))
    with pytest.raises(SettingsError, match="run on GPUs only"):
        choose("triton", CPU)
    with pytest.raises(SettingsError, match="run on NVIDIA GPUs only"):
        choose("cuda", CPU)


def test_a_gpu_runs_the_triton_kernels():
    assert choose("auto", torch.device("cuda")).name == "triton"


def test_a_damaged_library_is_named(monkeypatch, tmp_path):
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"not a library")
    monkeypatch.setattr(cpu, "library_path", lambda: damaged)
    cpu._library.cache_clear()
    if cpu.instruction_set() == "none":
        pytest.skip("no kernels for this processor")
    assert "cannot be loaded" in (cpu.missing() or "")
