"""What calibration asks of a model, and the answers of one that transformers runs; `engine` has those of vLLM."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from vllm_antkv.calibrate.capture import Capture, CaptureWindow, capture_window, checkpointed
from vllm_antkv.calibrate.job import Job
from vllm_antkv.offline.sinks import peak_ratios
from vllm_antkv.offline.traits import rotary_tables
from vllm_antkv.ops.rope import RotaryTable


class Source(Protocol):
    """A loaded model that K and V are taken from."""

    def peak_ratios(self, window: torch.Tensor) -> np.ndarray:
        """As `offline.sinks.peak_ratios`, of a window on the CPU."""

    def rotary_tables(self, num_positions: int) -> list[RotaryTable]:
        """What turns K, layer by layer."""

    def capturing(self, capture: Capture) -> AbstractContextManager[CaptureWindow]:
        """While open, what it gives writes a window's rows, and what its tokens weigh, to the files of `capture`."""


@contextmanager
def open_source(job: Job, folder: Path) -> Iterator[Source]:
    """The model, loaded; its memory is free once nothing refers to it any more.

    Args:
        job: what is asked for.
        folder: for weights that are read when they are needed.

    Raises:
        CalibrationError, UnsupportedModelError: it cannot be loaded, or cannot be calibrated.
    """
    if job.why_vllm is not None:
        from vllm_antkv.calibrate.engine import open_engine

        with open_engine(job) as source:
            yield source
    else:
        yield TransformersModel(job, folder)


class TransformersModel:
    """A model that gradients flow through."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        self._model: PreTrainedModel = job.load_model(folder)

    def peak_ratios(self, window: torch.Tensor) -> np.ndarray:
        """As `Source` says."""
        return peak_ratios(self._model, window.to(self._job.device))

    def rotary_tables(self, num_positions: int) -> list[RotaryTable]:
        """As `Source` says."""
        return rotary_tables(self._model, num_positions)

    @contextmanager
    def capturing(self, capture: Capture) -> Iterator[CaptureWindow]:
        """As `Source` says; tokens weigh the norms of their gradients."""

        def capture_one(window: torch.Tensor, index: int) -> None:
            capture_window(self._model, window.to(self._job.device), index, capture)

        with checkpointed(self._model, capture.weighted and self._job.recomputes):
            yield capture_one
