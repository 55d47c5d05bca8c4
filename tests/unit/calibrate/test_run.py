"""The whole of `calibrate`: what it writes, that it is reproducible, and how it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from scripts.capacity_figure import LLAMA_3_8B
from tests.adapters import make_adapter, merged
from tests.unit.damaged import config_with
from vllm_antkv.calibrate import learn, resources, source
from vllm_antkv.calibrate.capture import CaptureFiles, CaptureShape
from vllm_antkv.calibrate.layers import Clustering
from vllm_antkv.calibrate.models import load_model
from vllm_antkv.calibrate.run import calibrate
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.calibrate.texts import read_text, token_windows
from vllm_antkv.codebook import Codebook, ModelIdentity, RopeLayout, codebook_path
from vllm_antkv.errors import CalibrationError, SettingsError, UnsupportedModelError
from vllm_antkv.offline.pretrained import read_config, read_tokenizer
from vllm_antkv.ops.reference import decode, encode
from vllm_antkv.presets import PRESETS

#: Enough tokens for 256 centroids, and no more time than needed.
SMALL: dict[str, Any] = {"samples": 8, "seq_len": 64, "device": "cpu"}


def calibrate_small(model: Path, text: Path, out: Path, *presets: str, **changes: Any) -> list[Codebook]:
    paths = calibrate(
        CalibrationSettings(str(model), presets or ["antkv-1bit"], [str(text)], out, **{**SMALL, **changes})
    )
    return [Codebook.load(path) for path in paths]


@pytest.fixture(scope="module")
def learned(tiny_llama, text_file, tmp_path_factory) -> Path:
    """A folder with the 4-bit and 1-bit codebooks of the tiny Llama."""
    out = tmp_path_factory.mktemp("learned") / "new" / "folder"
    calibrate_small(tiny_llama, text_file, out, "antkv-4bit", "antkv-1bit")
    return out


def test_writes_codebooks_that_fit_the_model(learned, tiny_llama):
    identity = ModelIdentity.from_hf_config(read_config(str(tiny_llama), CalibrationError))
    for name in ("antkv-4bit", "antkv-1bit"):
        book = Codebook.load(codebook_path(learned, name), preset=name, model=identity)
        assert book.header.sinks is None
        assert book.header.turns == (RopeLayout(rotary_dim=16),) * 2
    assert sorted(path.name for path in learned.iterdir()) == ["antkv-1bit.safetensors", "antkv-4bit.safetensors"]


def test_the_header_records_the_calibration_and_no_folder(learned, text_file):
    record = Codebook.load(codebook_path(learned, "antkv-1bit")).header.calibration
    expected = {"texts": ["words.txt"], "samples": 8, "seq_len": 64, "weights": "grad", "seed": 0, "tokens": 8 * 63}
    assert {name: record[name] for name in expected} == expected
    assert str(text_file.parent) not in json.dumps(record)


def test_each_place_has_the_centroids_of_its_own_rows(learned, tiny_llama, text_file):
    """Layers, K and V, heads, sub-vectors, channels: any other place's centroids would fit far worse."""
    book = Codebook.load(codebook_path(learned, "antkv-4bit"))
    folder = str(tiny_llama)
    config = read_config(folder, CalibrationError)
    model = load_model(folder, config, torch.device("cpu"))
    text = [read_text(str(text_file))]
    window = token_windows(text, read_tokenizer(folder, CalibrationError), 8, 64, 0)[0]
    rows: dict[tuple[int, int], torch.Tensor] = {}
    for layer, block in enumerate(model.get_decoder().layers):
        for kind, projection in enumerate((block.self_attn.k_proj, block.self_attn.v_proj)):
            projection.register_forward_hook(
                lambda module, args, output, place=(layer, kind): rows.update(
                    {place: output[0].detach().unflatten(-1, (2, 16))}
                )
            )
    model(window[None])

    def error(rows: torch.Tensor, centroids: torch.Tensor) -> float:
        return float((decode(encode(rows, centroids), centroids) - rows).square().mean())

    for layer in range(2):
        for kind, centroids in ((0, book.k[layer].float()), (1, book.v[layer].float())):
            own = rows[layer, kind][1:]
            if kind == 0:
                own = own[..., list(book.header.k_order(layer))]
            right = error(own, centroids)
            assert right < 0.05 * float(own.square().mean())
            assert right < error(own, centroids.flip(0))
            assert right < error(own, centroids.flip(1))


def test_an_adapter_that_is_always_on(tiny_llama, text_file, learned, tmp_path):
    """The centroids are those of the merged model, and the codebook is the base model's."""
    adapter, folder = make_adapter(tiny_llama, tmp_path / "mine"), tmp_path / "merged"
    shutil.copytree(tiny_llama, folder)
    merged(tiny_llama, adapter).save_pretrained(folder)
    (found,) = calibrate_small(tiny_llama, text_file, tmp_path / "found", lora=adapter)
    (expected,) = calibrate_small(folder, text_file, tmp_path / "expected")
    of_base = Codebook.load(codebook_path(learned, "antkv-1bit"))
    assert all(map(torch.equal, (*found.k, *found.v), (*expected.k, *expected.v)))
    assert not any(map(torch.equal, found.k, of_base.k))
    assert found.header.model == of_base.header.model
    assert found.header.calibration["lora"] == "mine"


def test_no_adapter_is_one_sentence(tiny_llama, text_file, tmp_path, refused):
    def refuse(adapter: Path, words: str) -> None:
        with refused(CalibrationError, words):
            calibrate_small(tiny_llama, text_file, tmp_path / "out", lora=adapter)

    adapter = make_adapter(tiny_llama, tmp_path / "mine")
    refuse(tmp_path, "No LoRA adapter can be read")
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 5'))
    refuse(adapter, "does not fit the model")
    config.write_text(config.read_text().replace("_proj", "_projection"))
    refuse(adapter, "does not fit the model")
    (adapter / "adapter_model.safetensors").unlink()
    refuse(adapter, "does not fit the model")


def test_weights_change_the_centroids_and_lower_the_weighted_error(tiny_llama, text_file, learned, tmp_path):
    (plain,) = calibrate_small(tiny_llama, text_file, tmp_path, weights="none")
    weighted = Codebook.load(codebook_path(learned, "antkv-1bit"))
    assert plain.header.calibration["weights"] == "none"
    assert not any(map(torch.equal, plain.k, weighted.k))


def test_same_command_same_bytes_and_other_seed_other_bytes(tiny_llama, text_file, learned, tmp_path):
    """Also: presets learned together are those learned alone, and one that is named twice is learned once."""
    first = codebook_path(learned, "antkv-1bit").read_bytes()
    assert len(calibrate_small(tiny_llama, text_file, tmp_path / "again", "antkv-1bit", "antkv-1bit")) == 1
    calibrate_small(tiny_llama, text_file, tmp_path / "other", seed=1)
    assert codebook_path(tmp_path / "again", "antkv-1bit").read_bytes() == first
    assert codebook_path(tmp_path / "other", "antkv-1bit").read_bytes() != first


def test_the_work_folder_of_another_model_is_not_taken_up(make_model, text_file, tmp_path, monkeypatch):
    """A model retrained in place has the same name and shape, but its activations are others."""
    folder = tmp_path / "model"
    shutil.copytree(make_model("llama"), folder)

    with monkeypatch.context() as patch:
        patch.setattr(learn, "learn_layer", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            calibrate_small(folder, text_file, tmp_path / "out")

    def scale(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)

    other = make_model("llama", edit=scale)
    shutil.rmtree(folder)
    shutil.copytree(other, folder)
    (resumed,) = calibrate_small(folder, text_file, tmp_path / "out")
    (fresh,) = calibrate_small(other, text_file, tmp_path / "fresh")
    assert all(map(torch.equal, resumed.k, fresh.k))


def test_sinks_are_found_and_left_out(make_model, text_file, tmp_path):
    def plant(model: nn.Module) -> None:
        """BOS and one rare token carry 500 in channel 11."""
        with torch.no_grad():
            model.get_input_embeddings().weight[[0, 20], 11] = 500.0

    (book,) = calibrate_small(make_model("llama", edit=plant), text_file, tmp_path)
    assert book.header.sinks.layer == 0
    assert book.header.sinks.channels == (11,)
    assert 50 < book.header.sinks.threshold < 500


def test_a_long_window_is_clipped_with_a_note(tiny_llama, text_file, tmp_path, caplog):
    (book,) = calibrate_small(tiny_llama, text_file, tmp_path, samples=3, seq_len=4096)
    assert book.header.calibration["seq_len"] == 128
    assert "128" in caplog.text


def test_all_means_every_preset(make_model, text_file, tmp_path, monkeypatch):
    def learn_nothing(files: CaptureFiles, layer: int, kept: np.ndarray, how: Clustering, *rest: Any) -> np.ndarray:
        preset = how.preset
        return np.zeros((2, 1, preset.num_sub_vectors(32), preset.num_centroids, preset.sub_vector_size), np.float16)

    monkeypatch.setattr(learn, "learn_layer", learn_nothing)
    model = make_model("llama", num_hidden_layers=1, num_key_value_heads=1, head_dim=32)
    books = calibrate_small(model, text_file, tmp_path, "all", samples=100)
    assert [book.preset for book in books] == list(PRESETS.values())


#: What commands hand over otherwise, or check too: tests/unit/test_bad_arguments.py.
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no samples": ({"samples": 0}, CalibrationError, "--samples 0"),
    "unknown weights": ({"weights": "hessian"}, CalibrationError, "grad"),
    "unknown bits": ({"bits": "some"}, CalibrationError, "none of uniform, mixed"),
    "no preset": ({"presets": []}, CalibrationError, "--preset"),
    "preset too wide": ({"presets": ["antkv-0.375bit"]}, SettingsError, "head size 16"),
    "too few tokens": ({"samples": 4}, CalibrationError, "at least 256"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_sentence(case, tiny_llama, text_file, tmp_path, refused):
    changes, kind, says = BAD[case]
    good = {"model": str(tiny_llama), "presets": ["antkv-1bit"], "texts": [str(text_file)], "out": tmp_path, **SMALL}
    with refused(kind, says):
        calibrate(CalibrationSettings(**{**good, **changes}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["bits", "lora"])
def test_nothing_flows_through_quantised_weights(tiny_llama, text_file, tmp_path, option, refused):
    (tmp_path / "adapter_config.json").write_text("{}")
    changes = {option: {"bits": "mixed", "lora": tmp_path}[option]}
    folder = tmp_path / "quantised"
    shutil.copytree(tiny_llama, folder)
    config_with(quantization_config={"quant_method": "awq", "bits": 4})(folder)
    with refused(UnsupportedModelError, "calibrate the unquantised model"):
        calibrate_small(folder, text_file, tmp_path / "out", **changes)


def test_models_that_hide_their_keys_and_that_nobody_serves_are_refused(make_model, text_file, tmp_path, refused):
    """Others of their kind are in `tests/serving/test_hidden_rows.py`."""
    with refused(UnsupportedModelError, "ALiBi"):
        calibrate_small(make_model("bloom"), text_file, tmp_path / "out")


def test_too_little_memory_or_disk_is_refused(tiny_llama, text_file, tmp_path, monkeypatch, refused):
    usage = shutil.disk_usage(tmp_path)
    for where, name, instead, words in (
        (resources, "_available_ram", lambda: 1000, "memory"),
        (resources.shutil, "disk_usage", lambda folder: usage._replace(free=1000), "disk"),
        (source, "capture_window", Mock(side_effect=MemoryError), "ran out"),
    ):
        with monkeypatch.context() as patch, refused(CalibrationError, words):
            patch.setattr(where, name, instead)
            calibrate_small(tiny_llama, text_file, tmp_path)


def test_two_runs_do_not_work_in_one_folder(tiny_llama, text_file, tmp_path, monkeypatch, refused):
    refusals = []

    def second_run(*args: Any) -> np.ndarray:
        monkeypatch.undo()
        with refused(CalibrationError, "already running") as refusal:
            calibrate_small(tiny_llama, text_file, tmp_path)
        refusals.append(refusal)
        return learn.learn_layer(*args)

    monkeypatch.setattr(learn, "learn_layer", second_run)
    calibrate_small(tiny_llama, text_file, tmp_path)
    assert len(refusals) == 1


def test_runs_for_other_presets_work_side_by_side_and_each_goes_on_after_a_kill(
    tiny_llama, text_file, tmp_path, learned, monkeypatch
):
    def other_run_then_kill(*args: Any) -> np.ndarray:
        """While the 1-bit run clusters, a 4-bit run begins and ends in the same folder; then the first is killed."""
        monkeypatch.undo()
        calibrate_small(tiny_llama, text_file, tmp_path, "antkv-4bit")
        raise KeyboardInterrupt

    monkeypatch.setattr(learn, "learn_layer", other_run_then_kill)
    with pytest.raises(KeyboardInterrupt):
        calibrate_small(tiny_llama, text_file, tmp_path, "antkv-1bit")
    # Everything was captured before the kill.
    monkeypatch.setattr(source, "capture_window", Mock(side_effect=AssertionError))
    calibrate_small(tiny_llama, text_file, tmp_path, "antkv-1bit")
    for preset in ("antkv-1bit", "antkv-4bit"):
        assert codebook_path(tmp_path, preset).read_bytes() == codebook_path(learned, preset).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["antkv-1bit.safetensors", "antkv-4bit.safetensors"]


def test_the_order_of_presets_is_no_other_command(tiny_llama, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(learn, "learn_layer", Mock(side_effect=KeyboardInterrupt))
    for presets in (("antkv-1bit", "antkv-4bit"), ("antkv-4bit", "antkv-1bit", "antkv-4bit")):
        with pytest.raises(KeyboardInterrupt):
            calibrate_small(tiny_llama, text_file, tmp_path, *presets)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_memory_estimate_is_what_a_llama_8b_needs():
    """The estimate of docs/calibration.md: it fits a GPU of 80 GB with room, at the default window."""
    from transformers import LlamaConfig

    config = LlamaConfig(**LLAMA_3_8B)
    gib = resources.memory_need(config, 2048, torch.device("cuda")).total / 2**30
    assert 15 < gib < 30
    assert resources.needs_checkpointing(config, 2048, torch.bfloat16)
    shape = CaptureShape(32, 128, 2048, 8, 128, 4)
    assert 30 < shape.num_bytes / 2**30 < 35
