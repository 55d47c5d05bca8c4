"""Products of tiles: plain C++ computes what TDPBF16PS computes, bit by bit; the instructions are held against it."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest
from torch import cpu as torch_cpu

from tests.places import ROOT
from vllm_antkv.ops import cpu

FLAGS = {
    "plain": ["-march=x86-64-v3"],
    "avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi"],
    "amx": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"],
}
FEATURES = {variant.name: variant.features for variant in cpu.VARIANTS} | {"plain": cpu.PLAIN_TILES.features}
TINY = 2.0**-126  # the smallest normal number

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the tiles with g++")


def compiled(name: str, folder) -> ctypes.CDLL:
    path = folder / f"{name}.so"
    source = ROOT / "tests/kernels/tile_products.cpp"
    flags = ["-std=c++17", "-O3", "-shared", "-fPIC", "-Wno-psabi", *FLAGS[name]]
    command = ["g++", *flags, f"-I{ROOT / 'vllm_antkv/csrc/cpu'}", str(source), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(path))


@pytest.fixture(scope="module", params=FLAGS)
def tiles(request, tmp_path_factory):
    library = compiled(request.param, tmp_path_factory.mktemp("tiles"))
    has = torch_cpu.get_capabilities()
    if not all(has.get(feature) for feature in FEATURES[request.param]):
        pytest.skip(f"this processor has no {request.param}; the code compiles")
    if request.param == "amx" and not torch_cpu._init_amx():
        pytest.skip("Linux does not permit tile registers")
    library.name = request.param
    return library


def to_bits(x: np.ndarray) -> np.ndarray:
    """bfloat16 bits of float32 numbers that bfloat16 holds."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def draw(generator: np.random.Generator, shape) -> np.ndarray:
    """Random numbers that bfloat16 holds."""
    bits = to_bits(generator.standard_normal(shape).astype(np.float32))
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pack(matrix: np.ndarray) -> np.ndarray:
    """(32, 32 depth) rows to (2, depth) tiles."""
    return to_bits(matrix).reshape(2, 16, -1, 32).transpose(0, 2, 1, 3).copy()


def pack_columns(matrix: np.ndarray) -> np.ndarray:
    """(32 depth, 32) to (2, depth) tiles of pairs of rows."""
    pairs = to_bits(matrix).reshape(-1, 16, 2, 2, 16)  # tile, pair, row of the pair, side, column
    return pairs.transpose(3, 0, 1, 4, 2).copy()


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def multiply(tiles: ctypes.CDLL, a: np.ndarray, b: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """a (32, 32 depth) times b (32 depth, 32), added to `start`."""
    depth, stride = a.shape[1] // 32, 48
    left, right = pack(a), pack_columns(b)
    sums = np.full((32, stride), np.nan, np.float32)
    if start is not None:
        sums[:, :32] = start
    next_, other = ctypes.c_int64(512), ctypes.c_int64(512 * depth)
    factors = (pointer(left), next_, other, pointer(right), next_, other)
    calls = tiles.product(*factors, depth, pointer(sums), stride, int(start is not None))
    assert calls == depth
    assert np.isnan(sums[:, 32:]).all()
    return sums[:, :32]


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x).astype(np.float32)


def rounded(exact: np.ndarray) -> np.ndarray:
    """float64 to float32 without denormal numbers: those that are after rounding, as if exponents had no end."""
    return np.where(np.abs(exact) < TINY * (1 - 2.0**-25), np.copysign(0, exact), exact).astype(np.float32)


def tdpbf16ps(a: np.ndarray, b: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The pseudo-code of Intel's manual. float64 holds a product and its sum with a float32 number of like size."""
    sums = start.copy()
    for first in range(0, a.shape[1], 32):
        halves = []
        for odd in range(2):
            half = np.zeros((32, 32), np.float32)
            for k in range(first + odd, first + 32, 2):
                exact = np.multiply.outer(flushed(a[:, k]).astype(np.float64), flushed(b[k]).astype(np.float64))
                half = rounded(half.astype(np.float64) + exact)
            halves.append(half)
        sums = flushed(flushed(sums) + flushed(halves[0] + halves[1]))
    return sums


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("adds", [False, True])
def test_products_are_those_of_the_manual(tiles, depth, adds):
    generator = np.random.default_rng(depth)
    a, b = draw(generator, (32, 32 * depth)), draw(generator, (32 * depth, 32))
    start = generator.standard_normal((32, 32)).astype(np.float32)
    ours = multiply(tiles, a, b, start if adds else None)
    start = start if adds else np.zeros_like(start)
    if tiles.name == "avx512_bf16":  # adds up in another order
        size = np.abs(start) + np.abs(a).astype(np.float64) @ np.abs(b)
        assert (np.abs(ours - (start + a.astype(np.float64) @ b)) <= size * 2.0**-24 * 32 * depth).all()
    else:
        np.testing.assert_array_equal(ours.view(np.uint32), tdpbf16ps(a, b, start).view(np.uint32))


def test_numbers_that_are_not_usual(tiles):
    """Denormal numbers are 0, in factors, sums and results; infinities and NaN stay what they are."""
    a, b, start = (np.zeros((32, 32), np.float32) for _ in range(3))
    a[0, 0], b[0, 0] = TINY / 2, 2.0**20  # a factor
    a[1, 0], b[0, 1] = 2.0**-70, 2.0**-60  # a product
    a[2, 3], b[3, 2] = 1, 1
    start[2, 2] = TINY / 2  # a sum
    a[3, 5], b[5, 3] = np.inf, 2
    a[4, 5], b[5, 4] = -np.inf, 2
    a[5, 6], b[6, 5] = np.nan, 1
    a[6, 7], b[7, 6] = -(2.0**-120), 2.0**3
    a[7:10, 8], b[8, 7] = 2.0**-63, 2.0**-63
    a[7:10, 10], b[10, 7] = np.float32([-1, -1.5, -2]) * 2.0**-75, 2.0**-76  # a half, 3/4 and one last digit less
    ours = multiply(tiles, a, b, start)
    assert ours[0, 0] == ours[1, 1] == 0
    assert ours[2, 2] == 1
    assert ours[3, 3] == np.inf
    assert ours[4, 4] == -np.inf
    assert np.isnan(ours[5]).all()
    assert ours[6, 6] == -(2.0**-117)
    assert ours[7:10, 7].tolist() == [TINY, 0, 0]


def test_every_kind_of_number_becomes_bfloat16_alike(tiles):
    special = [0.0, -0.0, np.inf, -np.inf, TINY, TINY / 2, -TINY / 2, TINY * (1 - 2.0**-9), 3.4e38, -3.4e38]
    ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 1 + 2.0**-8 + 2.0**-20]
    drawn = np.random.default_rng(0).integers(0, 2**32, 10_000 - 18, dtype=np.uint32).view(np.float32)
    numbers = np.concatenate([np.array(special + ties, np.float32), drawn])[: 32 * 312]
    for row in numbers.reshape(-1, 32).copy():
        ours, pairs = np.empty(32, np.uint16), np.empty(32, np.uint16)
        tiles.convert(pointer(row), pointer(ours), pointer(pairs))
        bits = row.view(np.uint32)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        expected = np.where(np.abs(row) < TINY, (bits >> 31 << 15).astype(np.uint16), rounded)
        expected = np.where(np.isnan(row), (bits >> 16).astype(np.uint16) | 0x40, expected)
        np.testing.assert_array_equal(ours, expected)
        np.testing.assert_array_equal(pairs.reshape(16, 2).T.ravel(), expected)


def test_lanes_are_transposed(tiles):
    rows = np.arange(256, dtype=np.float32).reshape(16, 16)
    transposed = rows.copy()
    tiles.transpose_lanes(pointer(transposed))
    np.testing.assert_array_equal(transposed, rows.T)


def test_tile_registers_are_given_back_as_they_were_found(tiles):
    if tiles.name != "amx":
        pytest.skip("nothing to configure")
    assert tiles.scope_gives_back()


#: What each of `AmxRegisters`' functions is, and the intrinsic that it stands for.
INTRINSICS = {
    "R::load<4>(from, stride)": "_tile_loadd(4, from, stride)",
    "R::zero<3>()": "_tile_zero(3)",
    "R::dot<0, 4, 6>()": "_tile_dpbf16ps(0, 4, 6)",
    "R::dot<3, 5, 7>()": "_tile_dpbf16ps(3, 5, 7)",
    "R::store<2>(to, stride)": "_tile_stored(2, to, stride)",
}


@pytest.mark.skipif(shutil.which("objdump") is None, reason="reads machine code with objdump")
def test_assembly_of_amx_is_that_of_the_intrinsics(tmp_path):
    """On every machine, for few have AMX: an operand in the wrong place would multiply the wrong tiles."""
    codes = []
    for name, calls in (("ours", INTRINSICS), ("intrinsics", INTRINSICS.values())):
        source = tmp_path / f"{name}.cpp"
        lines = ['#include "tiles/tiles.h"', "#include <immintrin.h>", "using R = antkv::AmxRegisters;"]
        lines += ['extern "C" void code(const void* from, void* to, int64_t stride) {', *(f"{call};" for call in calls)]
        source.write_text("\n".join([*lines, "}\n"]))
        flags = ["-std=c++17", "-O2", "-c", "-Wno-psabi", *FLAGS["amx"], f"-I{ROOT / 'vllm_antkv/csrc/cpu'}"]
        subprocess.run(["g++", *flags, str(source), "-o", str(tmp_path / name)], check=True, capture_output=True)
        command = ["objdump", "--disassemble=code", "--no-show-raw-insn", str(tmp_path / name)]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        codes.append([line for line in listing.splitlines() if "tmm" in line])
    assert codes[0] == codes[1]
    assert len(codes[0]) == len(INTRINSICS)
