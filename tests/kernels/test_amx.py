"""The machine code for AMX on any processor with AVX512-BF16: an emulator executes its tile instructions.

What is written in tile registers gives what it gives in plain C++, and whoever uses them beside us does not notice. The
kernels' own tests take the emulator too, wherever they run `amx`.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.amx.emulated import Instruction, Mistake, amx, emulator, is_real, mistaken, runs
from tests.kernels.amx.machines import FITTING, configuration, configured, machines
from tests.kernels.engine import Engine, Shape, draw_sequence
from tests.kernels.test_tiles import pointer
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops import cpu
from vllm_antkv.ops.cpu import CpuOperations

AMX = cpu.VARIANTS[0]

pytestmark = pytest.mark.skipif(
    is_real() or not runs(),
    reason="where a processor has AMX nothing comes to the emulator, which needs g++ and AVX512-BF16",
)


@pytest.fixture(scope="module", autouse=True)
def kernels_run() -> None:
    """Whether they are built, and pass the check at start-up."""
    with amx():
        if not AMX.path.is_file():
            pytest.skip(str(AMX.missing()))
        assert AMX.missing() is None


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return machines()


KINDS = st.sampled_from(["usual", "tiny", "any"])


def draw_bits(generator: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of bfloat16: usual ones, those whose products are about the smallest, or any bits at all."""
    bits = generator.integers(0, 2**16, shape, dtype=np.uint16)
    if kind == "any":
        return bits
    exponents = generator.integers(*{"usual": (117, 137), "tiny": (56, 76)}[kind], shape)
    exponents[generator.random(shape) < 0.05] = 0
    return (bits & 0x807F | exponents.astype(np.uint16) << 7).astype(np.uint16)


def draw_floats(generator: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    high = draw_bits(generator, kind, shape).astype(np.uint32)
    if kind == "tiny":
        high = high & 0x807F | generator.integers(0, 3, shape, dtype=np.uint32) << 7
    return (high << 16 | generator.integers(0, 2**16, shape, dtype=np.uint32)).view(np.float32)


def assert_same_bits(ours: np.ndarray, expected: np.ndarray) -> None:
    """Which of the many NaN comes out, no manual says."""
    both = [np.where(np.isnan(numbers), np.uint32(0x7FC00000), numbers.view(np.uint32)) for numbers in (ours, expected)]
    np.testing.assert_array_equal(*both)


def products(library: ctypes.CDLL, kind: str, sizes: tuple[int, int, int], seed: int) -> list[np.ndarray]:
    """Sums of (rows, columns, pairs) that numbers of a kind are added to, of AMX and in plain C++."""
    generator = np.random.default_rng(seed)
    a, b = (draw_bits(generator, kind, (16, 32)) for _ in range(2))
    start = draw_floats(generator, kind, (16, 16))
    rows, columns, pairs = sizes
    shapes = np.zeros(24, np.uint8)  # `TileShapes` of registers.h
    for tile, (tile_rows, width) in {0: (rows, columns), 4: (rows, pairs), 6: (pairs, columns)}.items():
        shapes[tile], shapes[8 + 2 * tile] = tile_rows, 4 * width
    results = []
    for plain in (False, True):
        sums = start.copy()
        library.multiply(plain, pointer(shapes), pointer(a), pointer(b), pointer(sums))
        results.append(sums)
    return results


UP_TO_16 = st.integers(1, 16)
SEEDS = st.integers(0, 2**32 - 1)


@given(kind=KINDS, sizes=st.tuples(UP_TO_16, UP_TO_16, UP_TO_16), seed=SEEDS)
def test_products_of_any_shape_are_those_of_plain_tiles(library, kind, sizes, seed):
    assert_same_bits(*products(library, kind, sizes, seed))


def test_threads_multiply_at_the_same_time(library):
    """In tiles of different shapes."""
    sizes = [(16, 16, 16), (3, 5, 7), (16, 1, 2), (1, 16, 16)]
    with ThreadPoolExecutor(len(sizes)) as pool:
        pairs = list(pool.map(lambda seed: products(library, "usual", sizes[seed % len(sizes)], seed), range(200)))
    for ours, expected in pairs:
        assert_same_bits(ours, expected)


@given(kind=KINDS, heads=st.sampled_from([1, 2, 4, 8, 16]), depth=st.integers(1, 5), seed=SEEDS)
def test_everything_in_tile_registers_is_what_it_is_in_plain_ones(library, kind, heads, depth, seed):
    generator = np.random.default_rng(seed)
    bits, floats = (partial(drawn, generator, kind) for drawn in (draw_bits, draw_floats))
    a, b, start = bits((2, depth, 16, 32)), bits((2, depth, 16, 32)), floats((32, 32))
    keys, queries, weights, added = bits((32, 64)), bits((heads, 64)), floats((min(heads, 8), 32)), floats((16, 64))
    results = []
    for plain in (False, True):
        sums, few, logits, values = (
            start.copy(),
            np.zeros((16, 32), np.float32),
            np.zeros((16, 32), np.float32),
            added.copy(),
        )
        library.product(plain, pointer(a), pointer(b), depth, pointer(sums), pointer(few))
        library.logits(plain, heads, pointer(keys), pointer(queries), pointer(logits))
        library.values(plain, min(heads, 8), pointer(keys), pointer(weights), pointer(values))
        listed, weighted = np.zeros((16, 32), np.float32), added.copy()
        library.rows_anywhere(plain, heads, *map(pointer, (keys, queries, weights, listed, weighted)))
        results.append((sums, few, logits, values, listed, weighted))
    for ours, expected in zip(*results, strict=True):
        assert_same_bits(ours, expected)


def start_up_check() -> bool:
    return bool(cpu._library(AMX).antkv_tiles_multiply_right(AMX.tiles))


@pytest.mark.parametrize("mistake", [Mistake.SWAPS_PAIRS, Mistake.FORGETS_SUMS, Mistake.IGNORES_STRIDES])
def test_the_check_at_start_up_finds_a_processor_that_multiplies_wrong(mistake):
    assert start_up_check()
    with mistaken(mistake), amx():
        assert "products of the C++ kernels (amx) are wrong" in (AMX.missing() or "")
    assert start_up_check()


def test_denormal_numbers_would_be_noticed(library):
    whole = ("tiny", (16, 16, 16), 0)
    assert_same_bits(*products(library, *whole))
    with mistaken(Mistake.KEEPS_DENORMALS):
        assert start_up_check(), "it has none"
        with pytest.raises(AssertionError):
            assert_same_bits(*products(library, *whole))


def test_another_library_finds_tile_registers_as_it_configured_them(library):
    """On the same thread, between steps that use all the instructions: a prompt, votes, and single tokens."""
    theirs = configuration(FITTING)
    library.configure(pointer(theirs))
    used = (Instruction.TILELOADD, Instruction.TILESTORED, Instruction.TILEZERO, Instruction.TDPBF16PS)
    shape = Shape("antkv-1bit", 64, 4, 2, torch.bfloat16)
    engine, sequence = Engine(AntKVConfig(), shape, partial(CpuOperations, variant=AMX)), draw_sequence(0, 300, shape)
    for count in (200, 98, 1, 1):
        before = [emulator().emulator_count(instruction) for instruction in used]
        engine.step([(sequence, count)])
        assert all(emulator().emulator_count(instruction) > n for instruction, n in zip(used, before, strict=True))
        np.testing.assert_array_equal(configured(), theirs)
    with mistaken(Mistake.FORGETS_CONFIGURATION):
        products(library, "usual", (16, 16, 16), 0)
    assert not configured().any()


def decode_counts(num_heads: int, context: int, config: AntKVConfig) -> dict[Instruction, int]:
    """Tile instructions of a step for a token behind a context, of one KV head."""
    shape = Shape("antkv-1bit", 128, num_heads, 1, torch.bfloat16, max_len=1100)
    others, sequence = partial(CpuOperations, variant=cpu.VARIANTS[1]), draw_sequence(0, context + 1, shape)
    engine = Engine(config, shape, others)
    engine.step([(sequence, context)])
    engine.operations = CpuOperations(engine.state, AMX)
    before = {instruction: emulator().emulator_count(instruction) for instruction in Instruction}
    engine.step([(sequence, 1)])
    return {instruction: emulator().emulator_count(instruction) - count for instruction, count in before.items()}


@pytest.mark.parametrize(("num_heads", "of_keys"), [(8, 0), (16, 1)])
def test_decode_multiplies_each_tile_once(num_heads, of_keys):
    """Of V four tiles of 32 channels for 16 tokens and eight heads; of K as many for sixteen, and none for eight."""
    short, long = (decode_counts(num_heads, context, AntKVConfig()) for context in (512, 1024))
    for_32_tokens = {instruction: (long[instruction] - short[instruction]) / 16 for instruction in Instruction}
    of_values = num_heads // 8
    assert for_32_tokens[Instruction.TDPBF16PS] == 2 * (4 * of_keys + 4 * of_values)
    queries_and_weights = 2 * 2 * of_keys + 2 * 2 * of_values
    assert for_32_tokens[Instruction.TILELOADD] == 2 * (4 * of_keys + 4 * of_values) + queries_and_weights
    assert for_32_tokens[Instruction.TILESTORED] == 2 * 2 * of_keys, (
        "logits, 64 channels at a time; values stay in tiles"
    )


@pytest.mark.parametrize(("num_heads", "of_coded_keys"), [(8, 0), (16, 1)])
def test_decode_multiplies_rows_in_full_precision_in_tiles(num_heads, of_coded_keys):
    """Of V the tiles of coded rows; of K four for 16 rows and up to sixteen heads, whose logits are stored once."""
    short, long = (decode_counts(num_heads, 512, AntKVConfig(prefix=prefix)) for prefix in (32, 128))
    more_than_of_codes = {instruction: (long[instruction] - short[instruction]) / 3 for instruction in Instruction}
    assert more_than_of_codes[Instruction.TDPBF16PS] == 2 * 4 * (1 - of_coded_keys)
    assert more_than_of_codes[Instruction.TILELOADD] == (2 * 4 + 4) * (1 - of_coded_keys), "rows, and queries"
    assert more_than_of_codes[Instruction.TILESTORED] == 2 * (1 - 2 * of_coded_keys)
