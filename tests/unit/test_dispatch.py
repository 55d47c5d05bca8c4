"""Which kernels run: the fastest that can, the one insisted on, or a loud warning."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from tests.kernels.cuda_emulation.backend import EmulatedBackend
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import SettingsError
from vllm_antkv.ops import cpu, cuda, dispatch
from vllm_antkv.ops.cpu_sources import digest
from vllm_antkv.ops.dispatch import KERNELS, choose
from vllm_antkv.ops.layer import LayerKind
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.presets import PRESETS

CPU = torch.device("cpu")


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    """As after an installation without a C++ compiler."""
    monkeypatch.setattr(cpu.Variant, "path", tmp_path / "absent.so")


def test_the_settings_name_every_set_of_kernels():
    for kernels in KERNELS:
        assert AntKVConfig(kernels=kernels.name).kernels == kernels.name
    with pytest.raises(ValidationError):
        AntKVConfig(kernels="fastest")


@pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
def test_a_cpu_runs_the_kernels_for_cpus(said):
    assert choose("auto", CPU).name == choose("cpu", CPU).name == cpu.best().name
    assert not said
    assert choose("reference", CPU).name == "reference"


def test_without_a_library_the_reference_runs_and_says_that_it_is_slow(no_library, said):
    assert choose("auto", CPU).name == "reference"
    (warning,) = said
    assert "SLOW" in warning
    assert "no C++ compiler was found" in warning


def test_insisting_on_kernels_that_cannot_run_is_an_error(no_library):
    with pytest.raises(SettingsError, match=r"'kernels' is 'cpu', but the C\+\+ kernels \(avx2\) were not built"):
        choose("cpu", CPU)


def test_kernels_for_cpus_do_not_run_on_a_gpu_nor_those_for_gpus_on_a_cpu():
    with pytest.raises(SettingsError, match="run on CPUs only"):
        choose("cpu", torch.device("cuda"))
    with pytest.raises(SettingsError, match="run on GPUs only"):
        choose("triton", CPU)
    with pytest.raises(SettingsError, match="run on NVIDIA GPUs only"):
        choose("cuda", CPU)


def test_a_gpu_without_cupy_runs_the_triton_kernels(monkeypatch):
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None if name == "cupy" else name)
    assert choose("auto", torch.device("cuda")).name == "triton"


def test_a_gpu_runs_the_cuda_kernels_where_they_have_code_for_every_layer(monkeypatch):
    """As on an H100: 227 KiB of shared memory. It is only the GPU that is left out here."""

    def missing(device, layers):
        return next(filter(None, (cuda.unsupported(layer, EmulatedBackend()) for layer in layers)), None)

    on_h100 = [replace(kernels, missing=missing) if kernels.name == "cuda" else kernels for kernels in KERNELS]
    monkeypatch.setattr(dispatch, "KERNELS", on_h100)
    llama = LayerKind(PRESETS["antkv-1bit"], 128, 4, torch.bfloat16, None)
    gpu = torch.device("cuda")
    assert choose("auto", gpu, [llama, llama]).name == "cuda"
    assert choose("auto", gpu, [llama, replace(llama, head_size=96)]).name == "triton"
    assert choose("triton", gpu, [llama]).name == "triton"
    with pytest.raises(SettingsError, match=r"'kernels' is 'cuda', but the CUDA kernels have head sizes 64 and 128"):
        choose("cuda", gpu, [replace(llama, head_size=96)])


def test_layers_that_are_not_plain_are_tritons(monkeypatch):
    built = []
    monkeypatch.setattr(cuda, "missing", lambda device, layers: None)
    monkeypatch.setattr(cuda, "CudaOperations", lambda layer: built.append("cuda"))
    monkeypatch.setattr(dispatch, "_triton", lambda layer: built.append("triton"))
    plain = LayerKind(PRESETS["antkv-1bit"], 128, 4, torch.bfloat16, None)
    sliding, gpu = replace(plain, plain_logits=False), torch.device("cuda")
    kernels = choose("auto", gpu, [plain, sliding])
    assert kernels.name == "cuda"
    table = RotaryTable(torch.ones(1, 64), torch.zeros(1, 64))
    three_part = replace(plain, rotary=replace(table, sections=torch.zeros(64, dtype=torch.int64)))
    for kind in (plain, replace(plain, rotary=table), sliding, three_part):
        kernels.build(SimpleNamespace(kind=kind))
    assert built == ["cuda", "cuda", "triton", "triton"]
    assert choose("auto", gpu, [sliding, three_part]).name == "triton"
    with pytest.raises(SettingsError, match="no code for sliding windows, soft caps, learned sinks and M-RoPE"):
        choose("cuda", gpu, [three_part])


def test_a_damaged_library_is_named(monkeypatch, tmp_path):
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"not a library")
    if cpu.missing() is not None:
        pytest.skip("no kernels for this processor")
    monkeypatch.setattr(cpu.Variant, "path", damaged)
    cpu.loaded.cache_clear()
    assert "cannot be loaded" in (cpu.missing() or "")


def test_the_libraries_here_are_of_the_sources_here():
    """Else every test of the kernels would be skipped, or would test others."""
    for variant in cpu.VARIANTS:
        assert "other sources" not in (variant.missing() or "")


@pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
def test_a_library_of_other_sources_does_not_run(monkeypatch, tmp_path):
    shutil.copytree(cpu._CSRC / "cpu", tmp_path / "cpu")
    monkeypatch.setattr(cpu, "_CSRC", tmp_path)
    assert cpu.missing() is None
    with (tmp_path / "cpu" / "decode.cpp").open("a") as source:
        source.write("\n")
    assert "built from other sources" in (cpu.missing() or "")


@pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
def test_the_fastest_variant_that_the_processor_has_is_taken(monkeypatch):
    has = {feature: True for variant in cpu.VARIANTS for feature in variant.features}
    permitted, wrong = [True], []
    library = SimpleNamespace(
        antkv_sources=lambda: digest(cpu._CSRC).encode(), antkv_tiles_multiply_right=lambda tiles: tiles not in wrong
    )
    monkeypatch.setattr(cpu, "loaded", lambda variant: library)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: permitted[0])
    assert choose("auto", CPU).name == "amx"
    permitted[0] = False
    assert choose("auto", CPU).name == "avx512_bf16"
    with pytest.raises(
        SettingsError, match="'kernels' is 'amx', but the kernel of this system permits no tile registers"
    ):
        choose("amx", CPU)
    permitted[0] = True
    wrong.append(cpu.VARIANTS[0].tiles)
    assert choose("auto", CPU).name == "avx512_bf16"
    with pytest.raises(SettingsError, match=r"products of the C\+\+ kernels \(amx\) are wrong on this processor"):
        choose("amx", CPU)
    for lacking, then in (("amx_tile", "avx512_bf16"), ("avx512_vbmi", "avx512"), ("avx512_f", "avx2")):
        has[lacking] = False
        assert choose("auto", CPU).name == choose("cpu", CPU).name == then
    with pytest.raises(SettingsError, match=r"need a processor with avx512_f, .*amx_tile"):
        choose("amx", CPU)
