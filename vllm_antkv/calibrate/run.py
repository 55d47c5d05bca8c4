"""`antkv calibrate`: from a model and text to codebook files (AnTKV sections 4.1 and 4.2, KVSink appendix G)."""

import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from vllm_antkv import __version__
from vllm_antkv.calibrate.capture import CaptureFiles, CaptureShape, capture_window, checkpointed
from vllm_antkv.calibrate.layers import learn_layer
from vllm_antkv.calibrate.mix import can_be_mixed, mix, parts_of_mix
from vllm_antkv.calibrate.models import capture_points, compute_dtype, load_config, load_model
from vllm_antkv.calibrate.prefix import STEPS as PREFIX_STEPS
from vllm_antkv.calibrate.prefix import PrefixTraining
from vllm_antkv.calibrate.prefix import train_prefix as train_prefix_rows
from vllm_antkv.calibrate.refine import Refined
from vllm_antkv.calibrate.refine import refine as refine_centroids
from vllm_antkv.calibrate.resources import check_disk, check_memory, needs_checkpointing, pick_device
from vllm_antkv.calibrate.texts import prefix_ids, read_text, text_hash, token_windows, with_prefix
from vllm_antkv.calibrate.training import Schedule, num_held_out, split
from vllm_antkv.calibrate.workspace import Workspace, check_writable, open_workspace
from vllm_antkv.codebook import FORMAT_VERSION, Codebook, CodebookHeader, ModelIdentity, SinkRule, codebook_path
from vllm_antkv.codebook.header import MAX_PREFIX
from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.errors import CalibrationError
from vllm_antkv.offline.attention import check_family
from vllm_antkv.offline.divergences import layer_divergences
from vllm_antkv.offline.kmeans import Backend, pick_backend
from vllm_antkv.offline.models import fingerprint
from vllm_antkv.offline.pretrained import check_token_ids, read_tokenizer
from vllm_antkv.offline.rotary import rotary_table
from vllm_antkv.offline.sinks import PROBE_WINDOWS, SinkChannels, find_channels, find_rule, peak_ratios, sink_mask
from vllm_antkv.ops.rope import RotaryTable, interleaved
from vllm_antkv.presets import PRESETS, Preset, get_preset

logger = logging.getLogger(__name__)

#: How a token counts in k-means: by the norm of its gradient (AnTKV, equation 2), or every token alike.
Weights = Literal["grad", "none"]
#: How sub-vectors take the channels of K (`ops.rope.interleaved`); V's are taken as they come.
Channels = Literal["interleaved", "consecutive"]
#: Whether layers have presets of their own (`mix`), or all the same.
Bits = Literal["uniform", "mixed"]
#: Windows between two points from which a killed run goes on.
_WINDOWS_PER_SAVE = 8


def calibrate(
    model: str,
    presets: Sequence[str],
    texts: Sequence[str],
    out: Path,
    *,
    samples: int = 128,
    seq_len: int = 2048,
    weights: Weights = "grad",
    channels: Channels = "interleaved",
    bits: Bits = "uniform",
    refine: int = 0,
    train_prefix: bool = False,
    prefix_text: str | None = None,
    device: str = "auto",
    seed: int = 0,
) -> list[Path]:
    """Learn the centroids of one or more presets from calibration text and write one codebook file for each.

    The model runs once, however many presets are asked for. A killed run continues where it stopped when the same
    command is given again. Runs for other presets may work into the same folder at the same time. The same command on
    the same machine writes the same bytes.

    Args:
        model: folder or Hugging Face name of a causal language model.
        presets: preset names; `all` stands for every preset.
        texts: plain text files, or names of Hugging Face data sets where `datasets` is installed.
        out: folder for the codebooks, made if it does not exist; files are `codebook_path(out, preset)`.
        samples: windows of text, at most; fewer when the text is shorter.
        seq_len: tokens per window, BOS included; clipped to the model's context.
        weights: `grad` or `none`.
        channels: `interleaved` or `consecutive`, how sub-vectors take the channels of K.
        bits: `uniform` gives all layers the preset; `mixed` gives each what it needs, all together no more bytes.
        refine: steps of training the centroids end to end after k-means; 0 is none.
        train_prefix: train K and V of the first tokens of prompts: BOS, or BOS and `prefix_text`.
        prefix_text: a plain text file with a system prompt.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        seed: chooses the text windows and seeds k-means.

    Returns:
        The files written, in the order of `presets`.

    Raises:
        SettingsError: an unknown preset, or one that does not fit the model's head size.
        UnsupportedModelError: the model's architecture is not among the supported ones.
        CalibrationError: anything else that cannot be used, in one sentence.
    """
    job = _prepare(
        model,
        presets,
        texts,
        out,
        samples,
        seq_len,
        weights,
        channels,
        bits,
        refine,
        train_prefix,
        prefix_text,
        device,
        seed,
    )
    try:
        return _run(job)
    except (torch.OutOfMemoryError, MemoryError):
        raise CalibrationError(
            f"Memory of {job.device} ran out during calibration: use a larger device or a smaller --seq-len."
        ) from None


@dataclass(frozen=True)
class _Job:
    """A checked request.

    parts: presets whose centroids may go into mixes of layers; empty: none are mixed.
    windows: (num_windows, seq_len) int64.
    prefix: token ids of the prefix that is trained; none: none is.
    record: what the codebook's header says about the calibration.
    """

    model: str
    config: Any
    identity: ModelIdentity
    presets: list[Preset]
    parts: list[Preset]
    windows: torch.Tensor
    out: Path
    weighted: bool
    interleaves: bool
    refine: int
    prefix: tuple[int, ...]
    device: torch.device
    seed: int
    record: dict[str, Any]


def _prepare(
    model: str,
    presets: Sequence[str],
    texts: Sequence[str],
    out: Path,
    samples: int,
    seq_len: int,
    weights: Weights,
    channels: Channels,
    bits: Bits,
    refine: int,
    train_prefix: bool,
    prefix_text: str | None,
    device: str,
    seed: int,
) -> _Job:
    """Check everything that can be checked without running the model."""
    if samples < 1 or seq_len < 2 or seed < 0:
        raise CalibrationError(
            f"--samples {samples}, --seq-len {seq_len}, --seed {seed}: they must be at least 1, 2 and 0."
        )
    if refine < 0:
        raise CalibrationError(f"--refine {refine}: a number of steps cannot be negative.")
    if weights not in get_args(Weights):
        raise CalibrationError(f"--weights '{weights}' is none of {', '.join(get_args(Weights))}.")
    if channels not in get_args(Channels):
        raise CalibrationError(f"--channels '{channels}' is none of {', '.join(get_args(Channels))}.")
    if bits not in get_args(Bits):
        raise CalibrationError(f"--bits '{bits}' is none of {', '.join(get_args(Bits))}.")
    if prefix_text is not None and not train_prefix:
        raise CalibrationError("--prefix-text is the prefix that --train-prefix trains: give both.")
    if not texts or not presets:
        raise CalibrationError("Calibration needs at least one --preset and one --text.")
    chosen = list(PRESETS.values()) if "all" in presets else [get_preset(name) for name in dict.fromkeys(presets)]
    on = pick_device(device)
    config = load_config(model)
    identity = ModelIdentity.from_hf_config(config)
    for preset in chosen:
        preset.num_sub_vectors(identity.head_size)
    read = [read_text(source) for source in texts]
    seq_len = _clip(seq_len, config.get_text_config().max_position_embeddings)
    tokenizer = read_tokenizer(model, CalibrationError)
    windows = token_windows(read, tokenizer, samples, seq_len, seed)
    check_token_ids(windows, model, identity.vocab_size, CalibrationError)
    prefix = prefix_ids(tokenizer, prefix_text) if train_prefix else ()
    if prefix:
        check_token_ids(torch.tensor(prefix), model, identity.vocab_size, CalibrationError)
    num_tokens = windows.numel() - len(windows)
    _check_enough(chosen, num_tokens, seq_len)
    parts = parts_of_mix(chosen, identity.head_size, num_tokens) if bits == "mixed" else []
    if parts:
        _check_trainable("--bits mixed", config, len(windows), seq_len, 0)
    for preset in chosen:
        if bits == "mixed" and not can_be_mixed(preset, parts):
            logger.warning(
                "%s is not mixed: no cheaper, or no dearer, preset fits this model and has tokens enough.", preset.name
            )
    if refine:
        _check_trainable("--refine", config, len(windows), seq_len, 0)
    if prefix:
        _check_trainable("--train-prefix", config, len(windows), seq_len, len(prefix))
    check_memory(config, seq_len, on)
    # Last, since it makes the folder.
    check_writable(out)
    record = {
        "texts": [text.name for text in read],
        "text_sha256": text_hash(read),
        "samples": len(windows),
        "seq_len": seq_len,
        "weights": weights,
        "channels": channels,
        "bits": bits,
        "refine": refine,
        "seed": seed,
    }
    return _Job(
        model,
        config,
        identity,
        chosen,
        parts,
        windows,
        out,
        weights == "grad",
        channels == "interleaved",
        refine,
        prefix,
        on,
        seed,
        record,
    )


def _run(job: _Job) -> list[Path]:
    backend = pick_backend(job.device)
    model = load_model(job.model, job.config, job.device)
    settings = {
        **job.record,
        "presets": sorted(preset.name for preset in job.presets),
        "model": fingerprint(model),
        "windows": hashlib.sha256(job.windows.numpy().tobytes()).hexdigest(),
        "prefix": job.prefix,
        "device": job.device.type,
        "backend": backend.name,
        "version": __version__,
    }
    with open_workspace(job.out, settings) as work:
        found = _find_sink_channels(model, job.windows.to(job.device))
        files = _capture(job, model, work, found)
        rotary = rotary_table(model, 1)
        del model
        if job.device.type == "cuda":
            torch.cuda.empty_cache()  # for cuML
        rule, kept = _sinks_and_kept(found, files)
        if job.parts:
            # What judges the mix must be new to the centroids: large tables know their text better than small ones.
            kept[: num_held_out(len(job.windows))] = False
        _check_enough(job.presets, int(kept.sum()), files.shape.seq_len)
        needed = [preset for preset in dict.fromkeys((*job.presets, *job.parts)) if preset.num_centroids <= kept.sum()]
        learned = {
            preset.name: _learn_preset(job, preset, work, files, rotary, rule, kept, backend) for preset in needed
        }
        paths = [_finish(job, codebook, work) for codebook in _with_layers_mixed(job, learned, work)]
        work.remove()
    return paths


def _find_sink_channels(model: nn.Module, windows: torch.Tensor) -> SinkChannels | None:
    probed = windows[:PROBE_WINDOWS]
    ratios = []
    with _progress("Looking for sinks", len(probed)) as progress:
        for window in probed:
            ratios.append(peak_ratios(model, window))
            progress.update()
    return find_channels(np.stack(ratios))


def _capture(job: _Job, model: nn.Module, work: Workspace, found: SinkChannels | None) -> CaptureFiles:
    """Run the model over all windows that are not captured yet."""
    num_windows, seq_len = job.windows.shape
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
    points = capture_points(model, job.config)
    recompute = job.weighted and needs_checkpointing(job.config, seq_len, compute_dtype(job.config, job.device))
    done = work.windows_done()
    with checkpointed(model, recompute), _progress("Capturing K and V", num_windows, done) as progress:
        for index in range(done, num_windows):
            capture_window(model, job.windows[index].to(job.device), points, files, index, job.weighted, found)
            if (index + 1) % _WINDOWS_PER_SAVE == 0 or index + 1 == num_windows:
                files.flush()
                work.set_windows_done(index + 1)
            progress.update()
    return files


def _sinks_and_kept(found: SinkChannels | None, files: CaptureFiles) -> tuple[SinkRule | None, np.ndarray]:
    """The sink rule, and which tokens are clustered: (num_windows, seq_len) bool, False for position 0 and sinks."""
    kept = np.ones((files.shape.num_windows, files.shape.seq_len), bool)
    kept[:, 0] = False
    rule = find_rule(found, files.sink_values()) if found else None
    if found and rule:
        kept &= ~sink_mask(rule, found, files.sink_values())
    return rule, kept


def _learn_preset(
    job: _Job,
    preset: Preset,
    work: Workspace,
    files: CaptureFiles,
    rotary: RotaryTable,
    rule: SinkRule | None,
    kept: np.ndarray,
    backend: Backend,
) -> Codebook:
    """Learn what is not learned yet of one preset."""
    shape = files.shape
    k_order = interleaved(rotary, shape.head_size, preset.sub_vector_size) if job.interleaves else None
    per_layer = 2 * shape.num_kv_heads * preset.num_sub_vectors(shape.head_size)
    layers = []
    with _progress(f"Clustering for {preset.name}", per_layer * shape.num_layers) as progress:
        for layer in range(shape.num_layers):
            centroids = work.load_layer(preset.name, layer)
            if centroids is None:
                centroids = learn_layer(
                    files, layer, kept, preset, k_order, job.weighted, job.seed, backend, progress.update
                )
                work.save_layer(preset.name, layer, centroids)
            else:
                progress.update(per_layer)
            layers.append(centroids)
    k, v = torch.from_numpy(np.stack(layers, axis=1))
    record = {**job.record, "tokens": int(kept.sum()), "kmeans": backend.name}
    header = CodebookHeader(
        format_version=FORMAT_VERSION,
        preset=preset.name,
        model=job.identity,
        sinks=rule,
        k_orders={} if k_order is None else {preset.name: tuple(k_order)},
        calibration=record,
    )
    return Codebook(header, tuple(k), tuple(v))


def _with_layers_mixed(job: _Job, learned: Mapping[str, Codebook], work: Workspace) -> list[Codebook]:
    """The codebooks asked for: mixes of the layers of all that were learned, where bits are mixed."""
    if not job.parts:
        return [learned[preset.name] for preset in job.presets]
    books = list(learned.values())
    num_places = job.identity.num_layers * len(books)
    held_out, _ = split(job.windows)
    with _reloaded_model(job) as model:
        with _progress("Measuring layers", num_places) as progress:
            known = work.measured()
            divergences = layer_divergences(model, books, held_out, known, work.set_measured, progress.update)
        return [
            _mixed_for(model, preset, learned, divergences, held_out)
            if can_be_mixed(preset, [book.preset for book in books])
            else learned[preset.name]
            for preset in job.presets
        ]


def _mixed_for(
    model: Any, preset: Preset, learned: Mapping[str, Codebook], divergences: np.ndarray, held_out: torch.Tensor
) -> Codebook:
    """The best mix for one preset."""
    mixed = mix(model, preset, learned, divergences, held_out)
    before, after = mixed.divergence
    layers = "not better: all layers keep the preset" if after >= before else mixed.codebook.header.mix
    _say(f"{preset.name}: divergence on held-out text {before:.3g} -> {after:.3g} nats per token ({layers})")
    return _recorded(mixed.codebook, divergence_of_mix=mixed.divergence)


def _recorded(codebook: Codebook, **values: Any) -> Codebook:
    """With more of the calibration in its header."""
    record = {**codebook.header.calibration, **values}
    return replace(codebook, header=codebook.header.model_copy(update={"calibration": record}))


def _finish(job: _Job, codebook: Codebook, work: Workspace) -> Path:
    """Train what is to be trained, and write the file."""
    if job.refine:
        refined = _refine(job, codebook, work)
        codebook = _recorded(refined.codebook, divergence=refined.divergence)
    if job.prefix:
        trained = _train_prefix(job, codebook, work)
        codebook = _recorded(codebook.with_prefix(trained.prefix), prefix_loss=trained.loss)
    path = codebook_path(job.out, codebook.preset.name)
    # Whatever a kill leaves of it is then removed with the work folder.
    written = codebook_path(work.folder, codebook.preset.name)
    codebook.save(written)
    os.replace(written, path)
    return path


def _refine(job: _Job, codebook: Codebook, work: Workspace) -> Refined:
    """Train the centroids of one preset."""
    name = codebook.preset.name
    with _reloaded_model(job) as model, _progress(f"Refining {name}", job.refine) as progress:
        schedule = _schedule(job, job.refine, work, f"{name}-centroids", progress)
        refined = refine_centroids(model, codebook, job.windows, schedule)
    before, after = refined.divergence
    kept = "" if after < before else " (not better: the centroids of k-means are kept)"
    _say(f"{name}: divergence on held-out text {before:.4f} -> {after:.4f} nats per token{kept}")
    return refined


def _train_prefix(job: _Job, codebook: Codebook, work: Workspace) -> PrefixTraining:
    """Train the prefix of one preset."""
    name = codebook.preset.name
    with _reloaded_model(job) as model, _progress(f"Training the prefix for {name}", PREFIX_STEPS) as progress:
        schedule = _schedule(job, PREFIX_STEPS, work, f"{name}-prefix", progress)
        windows = with_prefix(job.windows, job.prefix)
        trained = train_prefix_rows(model, codebook, job.prefix, windows, schedule)
    before, after = trained.loss
    kept = "" if trained.prefix else " (not better: no trained prefix is kept)"
    _say(f"{name}: layer-wise error on held-out text {before:.5g} -> {after:.5g}{kept}")
    return trained


def _schedule(job: _Job, steps: int, work: Workspace, name: str, progress: tqdm) -> Schedule:
    return Schedule(steps, job.seed, work.training(name), partial(work.save_training, name), progress.update)


@contextmanager
def _reloaded_model(job: _Job) -> Iterator[Any]:
    """The model, loaded again; it recomputes its layers where memory is short."""
    model = load_model(job.model, job.config, job.device)
    recompute = needs_checkpointing(job.config, job.windows.shape[1], compute_dtype(job.config, job.device))
    with checkpointed(model, recompute):
        yield model


def _progress(what: str, total: int, done: int = 0) -> tqdm:
    """A progress bar with ETA on standard error; in a log file, a line now and then."""
    return tqdm(total=total, initial=done, desc=what, mininterval=0.1 if sys.stderr.isatty() else 10)


def _say(result: str) -> None:
    """On standard error, as the progress bars."""
    tqdm.write(result, file=sys.stderr)


def _clip(seq_len: int, context: int) -> int:
    if seq_len > context:
        logger.warning("--seq-len %d is longer than the model's context: using %d.", seq_len, context)
    return min(seq_len, context)


def _check_trainable(option: str, config: Any, num_windows: int, seq_len: int, prefix_len: int) -> None:
    """CalibrationError or UnsupportedModelError when nothing can be trained through codes."""
    check_family(config.get_text_config(), seq_len)
    least = prefix_len + 2 * VQ_BLOCK_SIZE
    if prefix_len > MAX_PREFIX:
        raise CalibrationError(f"--prefix-text has {prefix_len} tokens with BOS: at most {MAX_PREFIX} can be trained.")
    if seq_len < least:
        raise CalibrationError(
            f"{option} learns from tokens that are read through their codes, of which windows of {seq_len} tokens have "
            f"few: use --seq-len {least} or more."
        )
    if num_windows < 2:
        raise CalibrationError(f"{option} judges by windows that it does not train on: give more text or --samples.")


def _check_enough(presets: Sequence[Preset], num_tokens: int, seq_len: int) -> None:
    """CalibrationError when there are fewer tokens to cluster than centroids."""
    largest = max(presets, key=lambda preset: preset.num_centroids)
    if num_tokens < largest.num_centroids:
        raise CalibrationError(
            f"{largest.name} needs at least {largest.num_centroids} calibration tokens beside first tokens and sinks, "
            f"but there are {num_tokens}: give more text or more --samples (of {seq_len} tokens each)."
        )
