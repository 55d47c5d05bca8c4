"""What a calibration takes of memory, and models that it does not hold: layers are read one after the other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.calibrate.test_run import calibrate_small
from vllm_antkv.calibrate import resources
from vllm_antkv.calibrate.capture import Capture, CaptureFiles, CaptureShape
from vllm_antkv.calibrate.job import Job, prepare
from vllm_antkv.calibrate.models import load_model
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.calibrate.source import Source, TransformersModel
from vllm_antkv.errors import CalibrationError
from vllm_antkv.offline.hidden import loss_of
from vllm_antkv.offline.models import decoder_layers
from vllm_antkv.offline.pretrained import num_parameters, read_config
from vllm_antkv.offline.sinks import SinkChannels

CPU = torch.device("cpu")
SEQ_LEN = 64
#: More layers than may be there at a time; wide enough for weights to be most of what is needed.
SIZES: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 512, "head_dim": 16}
#: Experts, whose weights transformers does not run as the checkpoint has them, and large beside what a token keeps.
EXPERTS = {"num_local_experts": 8, "num_experts": 8, "intermediate_size": 128, "moe_intermediate_size": 128}
CONVOLUTIONS = {"layer_types": 3 * ["conv", "full_attention"], "conv_dim": 128, "block_auto_adjust_ff_dim": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", SIZES),
    "tied embeddings": ("llama", {**SIZES, "tie_word_embeddings": True}),
    "Mixtral": ("mixtral", {**SIZES, **EXPERTS}),
    "Qwen3-MoE": ("qwen3_moe", {**SIZES, **EXPERTS}),
    "convolutions": ("lfm2", {**SIZES, **CONVOLUTIONS}),
}


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def model(request, make_model) -> Path:
    family, changes = request.param
    return make_model(family, **changes)


@pytest.fixture
def room_for_two_layers(model, monkeypatch) -> None:
    """Of the six: one that is run, and one that stays."""
    config = read_config(str(model), CalibrationError)
    need = resources.memory_need(config, SEQ_LEN, CPU)
    layer = num_parameters(decoder_layers(resources.described(config, CalibrationError))[0]) * 4
    free = need.streamed + need.streamed_window + layer
    assert free < need.total
    monkeypatch.setattr(resources, "_available_ram", lambda: free)


def kept_for_backward(model: torch.nn.Module) -> int:
    """Bytes that autograd keeps of a window, without the weights themselves and the logits."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, torch.arange(2, 2 + SEQ_LEN))
    assert loss.requires_grad
    logits = 4 * SEQ_LEN * model.config.vocab_size
    return sum(size for size in storages.values() if size > 4 * SEQ_LEN) - logits


def test_the_estimate_is_what_the_model_takes(model):
    """All experts' weights; of activations no less than autograd keeps, and not much more."""
    config = read_config(str(model), CalibrationError)
    loaded = load_model(str(model), config, CPU)
    need = resources.memory_need(config, SEQ_LEN, CPU)
    assert need.weights == sum(4 * parameter.numel() for parameter in loaded.parameters())
    kept = kept_for_backward(loaded)
    assert kept <= resources.layer_activation_bytes(config, SEQ_LEN, torch.float32) <= 3 * kept


@pytest.mark.usefixtures("room_for_two_layers")
def test_layers_that_do_not_fit_are_read_when_they_are_run(model, text_file, tmp_path) -> None:
    job = a_job(model, text_file, tmp_path)
    loaded = job.load_model(tmp_path / "weights")

    def not_there() -> set[int]:
        return {i for i, layer in enumerate(decoder_layers(loaded)) if any(p.is_meta for p in layer.parameters())}

    streamed = not_there()
    assert 3 <= len(streamed) < 6
    with torch.no_grad():
        loss_of(loaded, torch.arange(2, 2 + SEQ_LEN))
    assert not_there() == streamed


@pytest.mark.usefixtures("room_for_two_layers")
def test_rows_and_gradients_are_those_of_the_whole_model(model, text_file, tmp_path, monkeypatch) -> None:
    streamed = a_job(model, text_file, tmp_path)
    monkeypatch.undo()
    whole = a_job(model, text_file, tmp_path)
    assert streamed.places
    assert whole.places is None
    found, expected = (
        captured(TransformersModel(job, tmp_path / "weights"), job, tmp_path / str(job.recomputes))
        for job in (streamed, whole)
    )
    for layer in range(found.shape.num_layers):
        for ours, theirs in ((found.rows, expected.rows), (found.norms, expected.norms)):
            assert float(theirs(layer)[:].max()) > 0
            np.testing.assert_allclose(ours(layer), theirs(layer), rtol=1e-3, atol=1e-4)


def captured(source: Source, job: Job, folder: Path, sinks: SinkChannels | None = None) -> CaptureFiles:
    """Of all windows."""
    folder.mkdir(exist_ok=True)
    identity, num_channels = job.identity, len(sinks.channels) if sinks else 0
    sizes = identity.num_layers, *job.windows.shape, identity.num_kv_heads, identity.head_size
    files = CaptureFiles(folder, CaptureShape(*sizes, num_channels))
    tables = source.rotary_tables(job.windows.shape[1])
    with source.capturing(Capture(tables, files, True, sinks)) as capture_window:
        for index, window in enumerate(job.windows):
            capture_window(window, index)
    return files


@pytest.mark.usefixtures("room_for_two_layers")
@pytest.mark.parametrize("model", [MODELS["Mixtral"]], indirect=True)
def test_nothing_is_left_but_the_codebook(model, text_file, tmp_path, capsys) -> None:
    calibrate_small(model, text_file, tmp_path)
    assert "cpu cannot hold all weights" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["antkv-1bit.safetensors"]


def a_job(model: Path, text: Path, out: Path, **changes: Any) -> Job:
    settings = CalibrationSettings(
        str(model), ["antkv-1bit"], [str(text)], out, samples=8, seq_len=SEQ_LEN, device="cpu", **changes
    )
    return prepare(settings)


@pytest.mark.usefixtures("room_for_two_layers")
@pytest.mark.parametrize("model", [MODELS["dense"]], indirect=True)
def test_an_adapter_is_refused(model, text_file, tmp_path, refused) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with refused(CalibrationError, "leave --lora out"):
        a_job(model, text_file, tmp_path, lora=tmp_path)
