"""Copies between a worker's device and the host, beside the steps, which do not wait for them.

On a GPU they go through pinned memory on a stream of their own. On a CPU the pool is in the host's memory already.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np
import torch


class Point:
    """The end of what is queued on a device so far; a CPU has nothing queued."""

    def __init__(self, device: torch.device) -> None:
        self.event = None
        if device.type == "cuda":
            self.event = torch.cuda.current_stream(device).record_event()


class Lane:
    """A way for one thread at a time.

    device: of the pool.
    num_bytes: of the largest copy.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._stream = self._pinned = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def to_host(self, pages: torch.Tensor, point: Point) -> np.ndarray:
        """What is computed at `point`, as bytes: (num_pages, num_bytes) uint8, until the lane is used again.

        pages: (num_pages, num_elements), of any dtype.
        """
        pages = pages.view(torch.uint8)
        if self._pinned is not None:
            with self._copying(point):
                pages = self._pinned[: pages.nbytes].view(pages.shape).copy_(pages, non_blocking=True)
        return pages.numpy()

    def to_device(self, content: bytes, pages: Sequence[torch.Tensor], point: Point) -> None:
        """Fill tensors, behind `point`, with what follows each other in `content`."""
        host, at = np.frombuffer(content, np.uint8), 0
        if self._pinned is not None:
            self._pinned.numpy()[: len(host)] = host
        with self._copying(point):
            for page in pages:
                end = at + page.nbytes
                if self._pinned is None:
                    # NumPy's copies, unlike PyTorch's, start no threads of their own.
                    page.view(torch.uint8).numpy()[:] = host[at:end]
                else:
                    page.view(torch.uint8).copy_(self._pinned[at:end], non_blocking=True)
                at = end

    @contextmanager
    def _copying(self, point: Point) -> Iterator[None]:
        """What is queued meanwhile begins at `point`, and has ended afterwards."""
        if self._stream is None or point.event is None:
            yield
            return
        # Pages are made in inference mode, and nobody else may write to such tensors.
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._stream.wait_event(point.event)
            yield
            # Threads that wait for others leave the processor to them.
            ended = torch.cuda.Event(blocking=True)
            ended.record()
        ended.synchronize()


class Lanes:
    """Several, which threads take in turn."""

    def __init__(self, device: torch.device, num_bytes: int, count: int) -> None:
        self._free: SimpleQueue[Lane] = SimpleQueue()
        for _ in range(count):
            self._free.put(Lane(device, num_bytes))

    @contextmanager
    def one(self) -> Iterator[Lane]:
        """A lane that nobody else has."""
        lane = self._free.get()
        try:
            yield lane
        finally:
            self._free.put(lane)
