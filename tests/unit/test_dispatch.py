"""Which kernels run: the fastest that can, the one insisted on, or a loud warning."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import SettingsError
from vllm_antkv.ops import cpu, cuda
from vllm_antkv.ops.cpu_sources import digest
from vllm_antkv.ops.dispatch import KERNELS, cautions, choose, summary
from vllm_antkv.ops.layer import LayerKind
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.presets import PRESETS, Preset

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LLAMA = LayerKind(PRESETS["antkv-1bit"], 128, 4, torch.bfloat16, None)


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    """As after an installation without a C++ compiler."""
    monkeypatch.setattr(cpu.Variant, "path", tmp_path / "absent.so")


def test_the_settings_name_every_set_of_kernels():
    for kernels in KERNELS:
        assert AntKVConfig(kernels=kernels.name).kernels == kernels.name
        # The page of settings has this.
        assert kernels.name in (AntKVConfig.model_fields["kernels"].description or "")


def names(setting, device, *layers):
    """Of the kernels of each layer."""
    return [chosen.kernels.name for chosen in choose(setting, device, layers or [LLAMA])]


def test_insisting_on_kernels_that_cannot_run_is_an_error(no_library):
    with pytest.raises(SettingsError, match=r"'kernels' is 'cpu', but the C\+\+ kernels \(avx2\) were not built"):
        choose("cpu", CPU, [LLAMA])


def test_kernels_for_cpus_do_not_run_on_a_gpu_nor_those_for_gpus_on_a_cpu():
    with pytest.raises(SettingsError, match="run on CPUs only"):
        choose("cpu", GPU, [LLAMA])
    with pytest.raises(SettingsError, match="run on GPUs only"):
        choose("triton", CPU, [LLAMA])
    with pytest.raises(SettingsError, match="run on NVIDIA GPUs only"):
        choose("cuda", CPU, [LLAMA])


#: Layers for which the CUDA kernels have no code, and a word of why.
TABLE = RotaryTable(torch.ones(1, 64), torch.zeros(1, 64))
WITHOUT_CODE = {
    "no code for antkv-6bit": replace(LLAMA, preset=Preset("antkv-6bit", 2, 4096)),
    "head sizes 64 and 128, not 96": replace(LLAMA, head_size=96),
    "no code for sliding windows": replace(LLAMA, plain_logits=False),
    "and M-RoPE": replace(LLAMA, rotary=replace(TABLE, sections=torch.zeros(64, dtype=torch.int64))),
}


@pytest.mark.parametrize("why", WITHOUT_CODE)
@pytest.mark.parametrize("setting", ["auto", "cuda"])
def test_a_layer_that_cuda_has_no_code_for_is_tritons_alone(on_h100, setting, why):
    other = WITHOUT_CODE[why]
    turning = replace(LLAMA, rotary=TABLE)
    assert names(setting, GPU, LLAMA, other, turning) == ["cuda", "triton", "cuda"]
    passed_over = choose(setting, GPU, [LLAMA, other])[1].passed_over
    assert [kernels.name for kernels, _ in passed_over] == ["cuda"]
    assert why in passed_over[0][1]


def test_a_model_without_a_layer_for_cuda_is_tritons_unless_cuda_is_insisted_on(on_h100):
    for why, other in WITHOUT_CODE.items():
        assert names("auto", GPU, other, other) == names("triton", GPU, other, LLAMA) == ["triton"] * 2
        with pytest.raises(SettingsError, match=rf"'kernels' is 'cuda', but the CUDA kernels have .*{why}"):
            choose("cuda", GPU, [other, other])


def test_what_runs_is_said_by_layers_and_what_is_slower_than_it_could_be_with_the_reason(on_h100):
    layers = [LLAMA, *WITHOUT_CODE.values(), LLAMA]
    chosen = dict(enumerate(choose("auto", GPU, layers)))
    assert summary(chosen) == "CUDA in layers 0, 5, Triton in layers 1-4"
    said = list(cautions(chosen))
    # Windows and M-RoPE are one reason.
    assert len(said) == 3
    assert said[0].startswith("In layer 1 the antkv cache runs on the Triton kernels, which take several times")
    assert said[0].endswith(": the CUDA kernels have no code for antkv-6bit.")
    assert said[2].startswith("In layers 3-4 ")
    # Whoever asks for Triton's gets no lecture.
    assert not list(cautions(dict(enumerate(choose("triton", GPU, layers)))))
    alone = dict(enumerate(choose("auto", GPU, [LLAMA] * 3)))
    assert (summary(alone), list(cautions(alone))) == ("CUDA", [])


def test_a_gpu_without_cupy_runs_the_triton_kernels_and_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None if name == "cupy" else name)
    assert names("auto", GPU) == ["triton"]
    (said,) = cautions(dict(enumerate(choose("auto", GPU, [LLAMA, LLAMA]))))
    assert said.startswith("The antkv cache runs on the Triton kernels, ")
    assert "(pip install 'vllm-antkv[cuda]')" in said


def test_the_reference_is_never_taken_quietly(no_library):
    (said,) = cautions({7: choose("auto", CPU, [LLAMA])[0]})
    assert said.startswith("The antkv cache runs on PyTorch reference code, which is SLOW: ")
    assert "no C++ compiler was found" in said
    assert not list(cautions({7: choose("reference", CPU, [LLAMA])[0]}))


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
    assert names("auto", CPU) == ["amx"]
    permitted[0] = False
    assert names("auto", CPU) == ["avx512_bf16"]
    with pytest.raises(
        SettingsError, match="'kernels' is 'amx', but the kernel of this system permits no tile registers"
    ):
        choose("amx", CPU, [LLAMA])
    permitted[0] = True
    wrong.append(cpu.VARIANTS[0].tiles)
    assert names("auto", CPU) == ["avx512_bf16"]
    with pytest.raises(SettingsError, match=r"products of the C\+\+ kernels \(amx\) are wrong on this processor"):
        choose("amx", CPU, [LLAMA])
    for lacking, then in (("amx_tile", "avx512_bf16"), ("avx512_vbmi", "avx512"), ("avx512_f", "avx2")):
        has[lacking] = False
        assert names("auto", CPU) == names("cpu", CPU) == [then]
    with pytest.raises(SettingsError, match=r"need a processor with avx512_f, .*amx_tile"):
        choose("amx", CPU, [LLAMA])
