"""`antkv calibrate`: from a model and text to codebook files (AnTKV sections 4.1 and 4.2, KVSink appendix G)."""

import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_antkv import __version__
from vllm_antkv.calibrate.capture import Capture, CaptureFiles, CaptureShape
from vllm_antkv.calibrate.job import Job, check_enough, prepare
from vllm_antkv.calibrate.learn import Captured, learn_preset
from vllm_antkv.calibrate.resources import check_disk
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.calibrate.source import Source, open_source
from vllm_antkv.calibrate.workspace import Workspace, open_workspace
from vllm_antkv.calibrate.write_codebook import with_centroids_trained, with_layers_mixed, write_codebook
from vllm_antkv.codebook.revision import revision_of
from vllm_antkv.errors import AntKVError, CalibrationError
from vllm_antkv.offline.float32_products import faster_products
from vllm_antkv.offline.sinks import PROBE_TOKENS, PROBE_WINDOWS, SinkChannels, find_channels, find_rule, sink_mask
from vllm_antkv.progress import progress_bar

#: Windows between two points from which a killed run goes on.
_WINDOWS_PER_SAVE = 8


@faster_products()
def calibrate(settings: CalibrationSettings) -> list[Path]:
    """Learn the centroids of one or more presets from calibration text and write one codebook file for each.

    The model runs once over the text, however many presets are asked for. A killed run
    continues where it stopped when the same command is given again. Runs for other presets may work into the same
    folder at the same time. The same command on the same machine writes the same bytes.

    Returns:
        The files written, in the order of the presets.

    Raises:
        SettingsError: a preset that does not fit the model's head size.
        UnsupportedModelError: the model's architecture is not among the supported ones.
        CalibrationError: anything else that cannot be used, in one sentence.
    """
    job = prepare(settings)
    try:
        return _run(job)
    except (torch.OutOfMemoryError, MemoryError):
        raise CalibrationError(
            f"Memory of {job.device} ran out during calibration: use a larger device or a smaller --seq-len."
        ) from None


def _run(job: Job) -> list[Path]:
    with open_workspace(job.settings.out, _identity_of_work(job)) as work:
        captured = _take(job, work)
        check_enough(job.learned, int(captured.kept.sum()), captured.files.shape.seq_len)
        learned = {preset.name: learn_preset(job, preset, captured, work) for preset in job.learned}
        mixed = with_layers_mixed(job, learned, work)
        paths = [write_codebook(job, codebook, work) for codebook in with_centroids_trained(job, mixed, work)]
        work.remove()
    return paths


def _take(job: Job, work: Workspace) -> Captured:
    """Everything that the model is needed for: its sinks, its K and V."""
    with ExitStack() as loaded:
        try:
            source = loaded.enter_context(open_source(job, work.folder / "weights"))
        except AntKVError:
            # A folder without work in it goes.
            if not work.windows_done():
                work.remove()
            raise
        found = _find_sink_channels(source, job)
        files = _capture(job, source, work, found)
        # Clustered are neither the first token of a window nor sinks.
        kept = np.ones((files.shape.num_windows, files.shape.seq_len), bool)
        kept[:, 0] = False
        rule = find_rule(found, files.sink_values()) if found else None
        if found and rule:
            kept &= ~sink_mask(rule, found, files.sink_values())
        return Captured(files, kept, rule, source.rotary_tables(1))


def _identity_of_work(job: Job) -> dict[str, Any]:
    """What another calibration would have to share to go on where this one stopped."""
    named = (job.settings.model, job.settings.lora)
    return {
        **job.record,
        "presets": sorted(preset.name for preset in job.presets),
        "weights_of": " ".join(revision_of(str(each)) for each in named if each is not None),
        "windows": hashlib.sha256(job.windows.numpy().tobytes()).hexdigest(),
        "device": job.device.type,
        "version": __version__,
    }


def _find_sink_channels(source: Source, job: Job) -> SinkChannels | None:
    probed = job.windows[:PROBE_WINDOWS, :PROBE_TOKENS]
    ratios = []
    with progress_bar("Looking for sinks", len(probed)) as progress:
        for window in probed:
            ratios.append(source.peak_ratios(window))
            progress.update()
    # Behind the last layer that attends, nobody minds them.
    return find_channels(np.stack(ratios)[:, : job.identity.decoder_indices[-1] + 1])


def _capture(job: Job, source: Source, work: Workspace, found: SinkChannels | None) -> CaptureFiles:
    """Run the model over all windows to learn from that are not captured yet."""
    num_windows, seq_len = job.learning.shape
    identity = job.identity
    shape = CaptureShape(
        identity.num_layers,
        num_windows,
        seq_len,
        identity.num_kv_heads,
        identity.head_size,
        len(found.channels) if found else 0,
    )
    files = CaptureFiles(work.folder, shape)
    check_disk(work.folder, shape.num_bytes - files.num_bytes_taken())
    capture = Capture(source.rotary_tables(seq_len), files, job.weighted, found)
    done = work.windows_done()
    # Codes err by far more than rounded products do.
    with (
        faster_products(rounded=True),
        source.capturing(capture) as capture_window,
        progress_bar("Capturing K and V", num_windows, done) as progress,
    ):
        for index in range(done, num_windows):
            capture_window(job.learning[index], index)
            if (index + 1) % _WINDOWS_PER_SAVE == 0 or index + 1 == num_windows:
                files.flush()
                work.set_windows_done(index + 1)
            progress.update()
    return files
