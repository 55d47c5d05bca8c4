"""A small engine over pages: allocates as the block managers do, from memory full of NaN, and runs any kernels.

Whatever kernels are handed ends at memory that nobody may touch (guarded.py).
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from tests.codebooks import random_codebook
from tests.kernels.guarded import guarded, guarded_pool
from tests.kernels.three_positions import draw_positions
from vllm_antkv.cache.pages import PageLayout, RecencyPages, VQPages, pool_block_bytes
from vllm_antkv.cache.positions import NUM_POSITIONS, POSITION_PAGE_BYTES, store_positions, view_positions
from vllm_antkv.codebook import Codebook, ModelIdentity, SinkRule
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.offline.attention import attend_window
from vllm_antkv.offline.method import LayerWindow, Method
from vllm_antkv.offline.vector_quantiser import VectorQuantiser
from vllm_antkv.ops.counters import Counters
from vllm_antkv.ops.fp8_tables import served
from vllm_antkv.ops.layer import LayerOperations, LayerState
from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.reference import jensen_weights
from vllm_antkv.ops.rope import RotaryTable, pair_sums, reordered
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.presets import LAYER_PRESETS
from vllm_antkv.select.recency import last_query_table
from vllm_antkv.select.retention import page_retention

NUM_BLOCKS = 1200
MAX_NUM_REQS = 64
#: What `Engine.offline` has computed, by settings, layer, and contents of sequence and codebook.
_OFFLINE: dict[tuple[AntKVConfig, "Shape", bytes], torch.Tensor] = {}


@dataclass(frozen=True)
class Shape:
    """Of a layer.

    three_parts: how pairs of channels are divided among three positions (M-RoPE): in "blocks", in "turns"; "": there is
        one.
    error: mean squared error of K's channels, of which the codebook says that codes have it.
    """

    preset: str = "antkv-1bit"
    head_size: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    dtype: torch.dtype = torch.float32
    rotary_dim: int | None = None
    neox: bool = True
    magnitude: float = 1.0
    reorders: bool = False
    max_len: int = 400
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    three_parts: str = ""
    error: float = 0.0

    @property
    def scale(self) -> float:
        return 2 * self.head_size**-0.5

    @property
    def rules(self) -> LogitRules:
        sinks = torch.linspace(-2, 4, self.num_heads) if self.has_sinks else None
        return LogitRules(self.scale, self.window, self.soft_cap, sinks if sinks is None else guarded(sinks))


def rotary(shape: Shape) -> RotaryTable | None:
    rotary_dim = shape.head_size if shape.rotary_dim is None else shape.rotary_dim
    if rotary_dim == 0:
        return None
    angles = torch.arange(shape.max_len)[:, None] * torch.logspace(0, -3, rotary_dim // 2)
    pairs = torch.arange(rotary_dim // 2)
    sections = {"": None, "blocks": pairs * NUM_POSITIONS // len(pairs), "turns": pairs % NUM_POSITIONS}
    cos, sin = guarded(shape.magnitude * angles.cos()), guarded(shape.magnitude * angles.sin())
    return RotaryTable(cos, sin, shape.neox, sections[shape.three_parts])


def k_order(shape: Shape) -> list[int] | None:
    """Any order that keeps the pairs of RoPE."""
    if not shape.reorders:
        return None
    generator = torch.Generator().manual_seed(2)
    rotary_dim = shape.head_size if shape.rotary_dim is None else shape.rotary_dim
    pairs = torch.randperm(rotary_dim // 2, generator=generator)
    turning = (
        torch.cat((pairs, pairs + rotary_dim // 2)) if shape.neox else (2 * pairs[:, None] + torch.arange(2)).flatten()
    )
    passing = rotary_dim + torch.randperm(shape.head_size - rotary_dim, generator=generator)
    return torch.cat((turning, passing)).tolist()


def codebook(shape: Shape) -> Codebook:
    identity = ModelIdentity(
        architecture="X",
        num_layers=1,
        num_attention_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        hidden_size=8,
        vocab_size=8,
    )
    k_orders = {} if (order := k_order(shape)) is None else {shape.preset: tuple(order)}
    book = random_codebook(identity, shape.preset, seed=1, k_orders=k_orders)
    return replace(book, k=(served(*book.k),), v=(served(*book.v),), k_errors=key_errors(shape))


def key_errors(shape: Shape) -> torch.Tensor:
    """Of one layer: as large as makes a difference to logits, the same for the channels of a pair."""
    random = torch.rand(shape.num_kv_heads, shape.head_size, generator=torch.Generator().manual_seed(5))
    table = rotary(shape)
    return shape.error * (random if table is None else pair_sums(random, table))[None]


@dataclass(eq=False)
class Sequence:
    """Rows of one request, and how far it has been computed.

    positions: (length, 3), what K turns by where tokens have three positions.
    pages: what the block manager holds, 0 for a page that was freed; table: what the worker sees, who is never told.
    freed_blocks: of `vq_blocks`, how many lie before the layer's window and are somebody else's by now.
    num_prompt_tokens: those before are of a prompt; with 0, single tokens are computed as an answer's.
    num_rejected: the last tokens of the next step are drafts that turn out wrong: their rows are others.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    is_sink: torch.Tensor
    positions: torch.Tensor
    output: torch.Tensor
    computed: int = 0
    num_prompt_tokens: int = 0
    num_rejected: int = 0
    vq_blocks: list[int] = field(default_factory=list)
    freed_blocks: int = 0
    pages: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)

    @property
    def lacks_pages(self) -> bool:
        """A page that the manager holds is null to the worker."""
        return any(held and not seen for held, seen in zip(self.pages, self.table, strict=True))

    def rows(self, name: str, part: slice) -> torch.Tensor:
        """Of the tokens of a step, in the tensor of this name."""
        rows = getattr(self, name)[part].clone()
        wrong = rows[len(rows) - self.num_rejected :]
        wrong.copy_(~wrong if wrong.dtype == torch.bool else -3 * wrong)
        return rows


def draw_sequence(seed: int, length: int, shape: Shape) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(length, shape.num_heads, shape.head_size, generator=generator).to(shape.dtype)
    key, value = torch.randn(2, length, shape.num_kv_heads, shape.head_size, generator=generator).to(shape.dtype)
    is_sink = torch.rand(length, generator=generator) < 0.02
    positions = draw_positions(generator, length, shape.max_len)
    return Sequence(query, key, value, is_sink, positions, torch.full_like(query, torch.nan))


class Workspace:
    """Scratch memory with vLLM's rules: once it is locked, nobody gets more than somebody took before."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.locked = False

    def __call__(self, *shapes_and_dtypes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        num_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes_and_dtypes)
        assert num_bytes <= self.num_bytes or not self.locked
        self.num_bytes = max(self.num_bytes, num_bytes)
        garbage = {True: torch.nan, False: -1}
        return [
            guarded(torch.full(shape, garbage[dtype.is_floating_point], dtype=dtype))
            for shape, dtype in shapes_and_dtypes
        ]


class Engine:
    """Allocates pages and runs steps over several sequences.

    operations: builds the kernels under test. compute_dtype: of the centroids, which the reference computes in.
    num_drafts: of a step at most.
    """

    def __init__(
        self,
        config: AntKVConfig,
        shape: Shape,
        operations: Callable[[LayerState], LayerOperations],
        compute_dtype: torch.dtype = torch.float32,
        num_drafts: int = 0,
    ) -> None:
        if "prefill_reads_cache" not in config.model_fields_set:
            # Then what comes out does not depend on steps, of which the offline evaluator knows nothing.
            config = config.model_copy(update={"prefill_reads_cache": True})
        self.layout = PageLayout.of(config, LAYER_PRESETS[shape.preset], shape.head_size, shape.dtype, 1 + num_drafts)
        self.codebook = codebook(shape)
        self.config, self.shape = config, shape
        size = self.layout.recency_block_size
        self.retention = replace(page_retention(config, shape.max_len, size, 0, shape.window), unsettled=num_drafts)
        self.free = list(range(1, NUM_BLOCKS))
        workspace = Workspace()
        table, order = rotary(shape), k_order(shape)
        self.raw = raw = guarded_pool((NUM_BLOCKS, shape.num_kv_heads, 1, pool_block_bytes([self.layout])))
        self.state = LayerState(
            vq=VQPages.view(raw[..., : self.layout.vq_page_bytes], self.layout),
            recency=RecencyPages.view(raw[..., : self.layout.recency_page_bytes], self.layout, shape.dtype),
            k_centroids=guarded(self.codebook.k[0].to(compute_dtype)),
            v_centroids=guarded(self.codebook.v[0].to(compute_dtype)),
            preset=LAYER_PRESETS[shape.preset],
            k_order=None if order is None else guarded(torch.tensor(order, dtype=torch.int32)),
            rotary=table if table is None or order is None else reordered(table, order),
            jensen_weights=guarded(self._jensen_weights(table)),
            last_query=guarded(last_query_table(config, shape.max_len, shape.window)),
            config=config,
            num_heads=shape.num_heads,
            rules=shape.rules,
            counters=Counters(torch.device("cpu"), "test", MAX_NUM_REQS),
            counts_rows=True,
            max_num_reqs=MAX_NUM_REQS,
            scratch=workspace,
            positions=self._position_pages(),
        )
        self.operations = operations(self.state)
        workspace.locked = True

    def _jensen_weights(self, table: RotaryTable | None) -> torch.Tensor:
        assert self.codebook.k_errors is not None
        return jensen_weights(self.codebook.k_errors[0], self.shape.num_heads, self.shape.scale, table)

    def _position_pages(self) -> torch.Tensor | None:
        """Farther apart than they are long, as in a pool."""
        if not self.shape.three_parts:
            return None
        raw = guarded_pool((NUM_BLOCKS, 1, 1, POSITION_PAGE_BYTES + 64))
        return view_positions(raw[..., :POSITION_PAGE_BYTES])

    def step(self, work: list[tuple[Sequence, int]]) -> None:
        """Compute the next `n` tokens of each sequence."""
        for sequence, count in work:
            self._allocate(sequence, sequence.computed + count)
        parts = [(s, slice(s.computed, s.computed + n)) for s, n in work]
        starts = torch.tensor(np.cumsum([0, *(n for _, n in work)]), dtype=torch.int32)
        seq_lens = torch.tensor([part.stop for _, part in parts], dtype=torch.int32)
        step = StepPlan(
            query_start_loc=guarded(starts),
            seq_lens=guarded(seq_lens),
            vq_block_table=self._table([s.vq_blocks for s, _ in work]),
            recency_block_table=self._table([s.table for s, _ in work]),
            max_query_len=max(n for _, n in work),
            max_seq_len=max(part.stop for _, part in parts),
            is_prefilling=torch.tensor([s.computed < s.num_prompt_tokens for s, _ in work]),
            query_start_loc_cpu=starts,
        )
        query, key, value, is_sink = (
            guarded(torch.cat([s.rows(name, part) for s, part in parts]))
            for name in ("query", "key", "value", "is_sink")
        )
        if self.state.positions is not None:
            slots = torch.cat([self._slots(s, part) for s, part in parts])
            store_positions(self.state.positions, slots, torch.cat([s.positions[part] for s, part in parts]).T)
        output = guarded(torch.full_like(query, torch.nan))
        rows = StepRows(query, key, value, is_sink if self.config.sinks else None)
        missing = self.state.counters.missing_rows.zero_()
        self.operations.run(rows, output, step)
        assert missing[: len(work)].bool().tolist() == [s.lacks_pages for s, _ in work]
        for (sequence, part), computed in zip(parts, output.split([n for _, n in work]), strict=True):
            sequence.computed, sequence.num_rejected = part.stop - sequence.num_rejected, 0
            sequence.output[part.start : sequence.computed] = computed[: sequence.computed - part.start]
            self._release(sequence)

    def run(self, sequences: list[Sequence], chunks: Callable[[int], int]) -> None:
        """Compute the sequences to their ends; a step takes what `chunks` says of those of which so much is left."""
        waiting = list(sequences)
        while waiting:
            work = [(s, min(n, left)) for s in waiting if (n := chunks(left := len(s.key) - s.computed))]
            self.step(work or [(waiting[0], 1)])
            for sequence in [s for s in waiting if s.computed == len(s.key)]:
                waiting.remove(sequence)
                self.finish(sequence)

    def _slots(self, sequence: Sequence, part: slice) -> torch.Tensor:
        places = torch.arange(part.start, part.stop)
        return torch.tensor(sequence.vq_blocks)[places // VQ_BLOCK_SIZE] * VQ_BLOCK_SIZE + places % VQ_BLOCK_SIZE

    def finish(self, sequence: Sequence) -> None:
        """Give everything back, dirty."""
        self.free += [*sequence.vq_blocks[sequence.freed_blocks :], *(page for page in sequence.pages if page)]

    def _allocate(self, sequence: Sequence, num_tokens: int) -> None:
        while len(sequence.vq_blocks) * VQ_BLOCK_SIZE < num_tokens:
            sequence.vq_blocks.append(self.free.pop())
        for real in self.retention.pages_of_step(len(sequence.pages), num_tokens):
            sequence.pages.append(self.free.pop() if real else 0)
            sequence.table.append(sequence.pages[-1])

    def _release(self, sequence: Sequence) -> None:
        first_block = self.shape.rules.first_visible(sequence.computed) // VQ_BLOCK_SIZE
        for block in sequence.vq_blocks[sequence.freed_blocks : first_block]:
            self.raw[block] = 0xFF
            if self.state.positions is not None:
                self.state.positions[block] = -1
            self.free.append(block)
        sequence.freed_blocks = first_block
        keep = self.retention.needed_after(np.arange(len(sequence.pages)), sequence.computed)
        for index, page in enumerate(sequence.pages):
            if page and not keep[index]:
                self.raw[page] = 0xFF
                self.free.append(page)
                sequence.pages[index] = 0

    def _table(self, rows: list[list[int]]) -> torch.Tensor:
        table = torch.zeros(len(rows), self.shape.max_len, dtype=torch.int32)
        for index, row in enumerate(rows):
            table[index, : len(row)] = torch.tensor(row, dtype=torch.int32)
        return guarded(table)

    def offline(self, sequence: Sequence) -> torch.Tensor:
        """What the evaluator computes for the whole sequence, in float64: once for all kernels that are tested."""
        content = (sequence.query, sequence.key, sequence.value, sequence.is_sink, sequence.positions)
        tensors = [part.contiguous().view(torch.uint8) for part in (*content, *self.codebook.k, *self.codebook.v)]
        digest = hashlib.blake2b(b"".join(part.numpy().tobytes() for part in tensors)).digest()
        place = (self.config, self.shape, digest)
        if place not in _OFFLINE:
            _OFFLINE[place] = self._offline(sequence)
        return _OFFLINE[place]

    def _offline(self, sequence: Sequence) -> torch.Tensor:
        method = Method(
            "x",
            1.0,
            self.config,
            VectorQuantiser(self.codebook),
            sinks=SinkRule(layer=0, channels=(0,), threshold=1.0),
            key_errors=self.codebook.k_errors,
        )
        query, key, value = (tensor[None].double() for tensor in (sequence.query, sequence.key, sequence.value))
        is_sink = sequence.is_sink[None] if self.config.sinks else None
        table = rotary(self.shape) or RotaryTable(torch.ones(self.shape.max_len, 1), torch.zeros(self.shape.max_len, 1))
        if table.sections is not None:
            # To the evaluator, which goes by the place in the window, this is a table like any other.
            table = RotaryTable(*table.angles(sequence.positions), table.is_neox_style)
        window = LayerWindow(0, query, key, value, self.shape.rules, table)
        return attend_window(window, method, is_sink)[0]
