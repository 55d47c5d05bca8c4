import pytest

from tests.processes import run_python
from vllm_antkv.errors import SettingsError
from vllm_antkv.presets import LAYER_PRESETS, PRESETS, get_preset, parts_of_mix

HEAD_SIZES = (32, 64, 80, 96, 128, 256)


def test_presets_are_listed_from_most_to_fewest_bits():
    bits = [preset.nominal_bits for preset in PRESETS.values()]
    assert bits == [4, 2, 1, 0.75, 0.5, 0.375]


@pytest.mark.parametrize("preset", LAYER_PRESETS.values(), ids=str)
def test_the_name_says_the_nominal_bits(preset):
    assert preset.name == f"antkv-{preset.nominal_bits:g}bit"


@pytest.mark.parametrize("preset", LAYER_PRESETS.values(), ids=str)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_sub_vectors_fill_the_head_or_it_is_refused(preset, head_size, refused):
    if head_size % preset.sub_vector_size == 0:
        assert preset.num_sub_vectors(head_size) * preset.sub_vector_size == head_size
        assert preset.code_bytes(head_size) * 8 >= preset.nominal_bits * head_size
        assert preset.code_bytes(head_size) * 8 < preset.nominal_bits * head_size + 8
    else:
        with refused(SettingsError, f"head size {head_size}"):
            preset.num_sub_vectors(head_size)


@pytest.mark.parametrize("name", ["antkv-1", "antkv-1bits", "ANTKV-1BIT", "", "auto", "antkv-0.25bit"])
def test_an_unknown_preset_is_answered_with_the_known_ones(name, refused):
    with refused(SettingsError, *PRESETS):
        get_preset(name)


@pytest.mark.parametrize(
    ("preset", "head_size", "parts"),
    [
        ("antkv-4bit", 128, []),
        ("antkv-2bit", 128, ["4", "2", "1", "0.5", "0.25"]),
        ("antkv-1bit", 128, ["2", "1", "0.5", "0.25"]),
        ("antkv-0.75bit", 80, ["2", "1", "0.5"]),
        ("antkv-1bit", 72, []),
        ("antkv-0.5bit", 128, ["1", "0.5", "0.25"]),
        ("antkv-0.5bit", 80, []),
        ("antkv-0.375bit", 128, ["1", "0.5", "0.25"]),
    ],
)
def test_a_mix_needs_cheaper_and_dearer_presets(preset, head_size, parts):
    found = parts_of_mix(get_preset(preset), head_size)
    assert [part.name for part in found] == [f"antkv-{bits}bit" for bits in parts]


def test_presets_and_errors_load_without_torch_and_vllm():
    code = "import sys, vllm_antkv.presets; assert not {'torch', 'vllm', 'numpy'} & set(sys.modules)"
    run_python("-c", code)
