"""From what was captured to the codebook of one preset."""

from dataclasses import dataclass

import numpy as np
import torch

from vllm_antkv.calibrate.capture import CaptureFiles
from vllm_antkv.calibrate.job import Job
from vllm_antkv.calibrate.key_scales import key_scales
from vllm_antkv.calibrate.layers import Clustering, key_errors, learn_layer
from vllm_antkv.calibrate.workspace import Workspace
from vllm_antkv.codebook import FORMAT_VERSION, Codebook, CodebookHeader, RopeLayout, SinkRule
from vllm_antkv.ops.rope import RotaryTable, interleaved, reordered
from vllm_antkv.presets import Preset
from vllm_antkv.progress import progress_bar


@dataclass(frozen=True)
class Captured:
    """What the model did on the calibration text, and what follows from it.

    kept: (num_windows, seq_len) bool, the tokens that are clustered.
    sinks: None where no rule parts them from other tokens.
    rotaries: what turns the channels of each layer.
    """

    files: CaptureFiles
    kept: np.ndarray
    sinks: SinkRule | None
    rotaries: list[RotaryTable]


def learn_preset(job: Job, preset: Preset, captured: Captured, work: Workspace) -> Codebook:
    """Learn what is not learned yet of one preset."""
    shape, settings = captured.files.shape, job.settings
    interleaves = settings.channels == "interleaved"
    k_order = _interleaved(captured.rotaries, shape.head_size, preset.sub_vector_size) if interleaves else None
    k_scale = key_scales(torch.from_numpy(captured.files.queries().mean(0))) if job.weighted else None
    how = Clustering(preset, k_order, k_scale, job.weighted, settings.seed, job.device)
    per_layer = 2 * shape.num_kv_heads * preset.num_sub_vectors(shape.head_size)
    layers = []
    with progress_bar(f"Clustering for {preset.name}", per_layer * shape.num_layers) as progress:
        for layer in range(shape.num_layers):
            centroids = work.load_layer(preset.name, layer)
            if centroids is None:
                centroids = learn_layer(captured.files, layer, captured.kept, how, progress.update)
                work.save_layer(preset.name, layer, centroids)
            else:
                progress.update(per_layer)
            layers.append(centroids)
    k, v = torch.from_numpy(np.stack(layers, axis=1))
    header = CodebookHeader(
        format_version=FORMAT_VERSION,
        preset=preset.name,
        model=job.identity,
        sinks=captured.sinks,
        k_orders={} if k_order is None else {preset.name: tuple(k_order)},
        turns=tuple(
            RopeLayout(rotary_dim=table.rotary_dim, neighbours=bool(table.rotary_dim) and not table.is_neox_style)
            for table in captured.rotaries
        ),
        calibration={**job.record, "tokens": int(captured.kept.sum())},
    )
    errors = [
        key_errors(captured.files, layer, captured.kept, layers[layer], how, captured.rotaries[layer])
        for layer in range(shape.num_layers)
    ]
    return Codebook(header, tuple(k), tuple(v), k_errors=torch.stack(errors), k_scale=k_scale)


def _interleaved(rotaries: list[RotaryTable], head_size: int, sub_vector_size: int) -> list[int]:
    """The order of channels by the layers that turn; as they come where some would have a pair parted by it."""
    turning = [rotary for rotary in rotaries if rotary.rotary_dim]
    order = interleaved((turning or rotaries)[0], head_size, sub_vector_size)
    try:
        for rotary in turning:
            reordered(rotary, order)
    except ValueError:
        return list(range(head_size))
    return order
