"""The bytes of blocks, out of a worker's pool and into it.

What a step leaves in the pool is gathered behind the step's own work on the device, before a later one can write there:
blocks may go to other requests at once, and nobody waits. Threads do the rest (`kv_transfer.lanes`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd

import torch

from vllm_antkv.vllm_adapter.kv_transfer.lanes import Lane, Point

#: Bytes that are gathered at once, unless a block has more.
_AT_ONCE = 16 << 20
#: By bytes: PyTorch gathers elements, and the fewer, the sooner.
_ELEMENTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class Block:
    """A block of a group of layers: the name of its file, and where it is in the pool."""

    group: int
    name: str
    block_id: int


@dataclass(frozen=True)
class Gathered:
    """Blocks of a group as a step left them.

    names: of their files.
    layout: what the bytes of each mean.
    pages: (num_blocks, num_elements), on the device.
    is_wrong: () bool, on the device: nothing of the step is to be kept.
    point: where both are computed.
    """

    names: list[str]
    layout: str
    pages: torch.Tensor
    is_wrong: torch.Tensor
    point: Point

    def contents(self, lane: Lane) -> list[bytes]:
        """The bytes of each block, once the step is computed; none if it went wrong."""
        # `bool` would wait for the device, and for no more than this copy.
        if lane.to_host(self.is_wrong.view(1, 1), self.point).any():
            return []
        return [page.tobytes() for page in lane.to_host(self.pages, self.point)]


class PoolPages:
    """Pages of a worker's layers.

    layers: by group and name, (num_blocks, ...), of any dtype; a page's bytes lie in one piece.
    """

    def __init__(self, layers: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        self._layouts = {
            group: " ".join(f"{name}:{pages.dtype}{list(pages.shape[1:])}" for name, pages in of_group.items())
            for group, of_group in layers.items()
        }
        self._pieces = {group: _pieces(list(of_group.values())) for group, of_group in layers.items()}
        self.device = self._pieces[0][0].device

    @property
    def largest_block(self) -> int:
        """Bytes of a block of any group, at most."""
        return max(map(self._num_bytes, self._pieces))

    @property
    def at_once(self) -> int:
        """Bytes that are gathered together, at most."""
        return max(_AT_ONCE, self.largest_block)

    def layout(self, group: int) -> str:
        """What the bytes of a block mean."""
        return self._layouts[group]

    def gather(self, blocks: Sequence[Block], is_wrong: torch.Tensor) -> Iterator[Gathered]:
        """Blocks as they are when all that is queued on the device is computed; is_wrong: see `Gathered`."""
        by_group = sorted(blocks, key=lambda block: block.group)
        for group, of_group in groupby(by_group, key=lambda block: block.group):
            some, at_once = list(of_group), max(_AT_ONCE // self._num_bytes(group), 1)
            for start in range(0, len(some), at_once):
                yield self._gathered(group, some[start : start + at_once], is_wrong)

    def write(self, block: Block, content: bytes, lane: Lane, point: Point) -> None:
        """Put what was read in its place, where it is when this returns: behind `point`."""
        lane.to_device(content, [pages[block.block_id] for pages in self._pieces[block.group]], point)

    def _num_bytes(self, group: int) -> int:
        return sum(pages[0].nbytes for pages in self._pieces[group])

    def _gathered(self, group: int, blocks: list[Block], is_wrong: torch.Tensor) -> Gathered:
        # Copies from other memory than pinned wait for the device.
        on_host = torch.tensor([block.block_id for block in blocks], pin_memory=self.device.type == "cuda")
        block_ids = on_host.to(self.device, non_blocking=True)
        pieces = [pages.index_select(0, block_ids) for pages in self._pieces[group]]
        pages = torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]
        return Gathered([block.name for block in blocks], self._layouts[group], pages, is_wrong, Point(self.device))


def _pieces(layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of layers' pages, (num_blocks, num_elements) each; pages that lie side by side in a block are one."""
    found: list[list[int]] = []
    for pages in layers:
        start, stride = (int(count) * pages.element_size() for count in (pages.storage_offset(), pages.stride(0)))
        size = pages[0].nbytes
        assert _extent(pages[0]) == size, "pages with gaps"
        if found and sum(found[-1][:2]) == start and found[-1][2] == stride:
            found[-1][1] += size
        else:
            found.append([start, size, stride])
    raw = torch.empty(0, dtype=torch.uint8, device=layers[0].device).set_(layers[0].untyped_storage())
    element = _ELEMENTS[gcd(8, *(number for piece in found for number in piece))]
    return [raw.as_strided((len(layers[0]), size), (stride, 1), start).view(element) for start, size, stride in found]


def _extent(page: torch.Tensor) -> int:
    """Bytes from the first to the last."""
    steps = zip(page.shape, page.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * page.element_size()
