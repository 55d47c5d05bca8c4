"""What the instructions that touch no memory compute: for each name a function that makes one of its operands.

A made function takes a warp and returns what goes into the destination: 32-bit words per lane, or several registers'.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from research.sm_model.sass import Instruction
from research.sm_model.state import LANE, LANES, Warp, integer, is_predicate, predicate, real, words

Compute = Callable[[Warp], Any]
_U64 = np.uint64
_LOW = np.uint64(0xFFFFFFFF)


def _wide(values: np.ndarray) -> np.ndarray:
    return values.astype(_U64)


def _pair(text: str) -> Callable[[Warp], np.ndarray]:
    """A 64-bit operand in two registers."""
    if text in ("RZ", "URZ"):
        return lambda warp: np.zeros(LANES, _U64)
    if re.fullmatch(r"R\d+", text):
        first = int(text[1:])
        return lambda warp: _wide(warp.registers[first]) | _wide(warp.registers[first + 1]) << _U64(32)
    if re.fullmatch(r"UR\d+", text):
        first = int(text[2:])
        return lambda warp: np.full(LANES, warp.uniform[first] | warp.uniform[first + 1] << 32, _U64)
    if text.startswith("c["):
        low, offset = words(text), int(re.findall(r"0x[0-9a-f]+", text)[1], 16)
        high = words(re.sub(r"\[0x[0-9a-f]+\]$", f"[{offset + 4:#x}]", text))
        return lambda warp: _wide(low(warp)) | _wide(high(warp)) << _U64(32)
    value = np.full(LANES, int(text, 0), np.int64).view(_U64)
    return lambda warp: value


def _addend(text: str) -> Compute:
    """(what to add, the one that a negation adds): carries come out as in the hardware."""
    read, negated, inverted = integer(text)
    if negated:
        return lambda warp: (_wide(~read(warp)), 1)
    if inverted:
        return lambda warp: (_wide(~read(warp)), 0)
    return lambda warp: (_wide(read(warp)), 0)


def add(i: Instruction) -> Compute:
    """IADD3 and its carries; `.X` adds those that come in."""
    sources = [text for text in i.operands[1:] if not is_predicate(text)]
    predicates = [text for text in i.operands[1:] if is_predicate(text)]
    readers = [_addend(text) for text in sources]
    carries = [predicate(text) for text in predicates[-2:]] if "X" in i.modifiers else []
    num_outputs = len(predicates) - len(carries)

    def compute(warp: Warp) -> Any:
        total = np.zeros(LANES, _U64)
        for reader in readers:
            value, one = reader(warp)
            total = total + value + _U64(one)
        for carry in carries:
            total = total + carry(warp)
        over = total >> _U64(32)
        return (total & _LOW).astype(np.uint32), [over > n for n in range(num_outputs)]

    return compute


def add_two(i: Instruction) -> Compute:
    a, b = _addend(i.operands[1]), _addend(i.operands[2])

    def compute(warp: Warp) -> Any:
        (left, one), (right, other) = a(warp), b(warp)
        return (left + right + _U64(one + other) & _LOW).astype(np.uint32)

    return compute


def absolute(i: Instruction) -> Compute:
    read = words(i.operands[1])
    return lambda warp: np.abs(read(warp).view(np.int32)).view(np.uint32)


def multiply_add(i: Instruction) -> Compute:
    operands = [text for text in i.operands[1:] if not is_predicate(text)]
    carry_in = [predicate(text) for text in i.operands[1:] if is_predicate(text)] if "X" in i.modifiers else []
    (a, minus_a, _), (b, minus_b, _) = integer(operands[0]), integer(operands[1])
    unsigned = "U32" in i.modifiers
    negated = minus_a != minus_b
    if not {"WIDE", "HI"} & i.modifiers:
        c, minus_c, inverted = integer(operands[2])

        def narrow(warp: Warp) -> Any:
            product = a(warp) * b(warp)
            addend = c(warp)
            addend = -addend if minus_c else ~addend if inverted else addend
            total = (-product if negated else product) + addend
            for carry in carry_in:
                total = total + carry(warp).astype(np.uint32)
            return total

        return narrow
    c64 = _pair(operands[2])

    def wide(warp: Warp) -> Any:
        if unsigned:
            product = _wide(a(warp)) * _wide(b(warp))
        else:
            product = (a(warp).view(np.int32).astype(np.int64) * b(warp).view(np.int32)).view(_U64)
        total = (_U64(0) - product if negated else product) + c64(warp)
        if "HI" in i.modifiers:
            return (total >> _U64(32)).astype(np.uint32)
        return np.stack((total & _LOW, total >> _U64(32))).astype(np.uint32)

    return wide


def shift_add(i: Instruction) -> Compute:
    """LEA: (a << shift) + b; `.HI` takes what has been shifted out."""
    predicates = [text for text in i.operands[1:] if is_predicate(text)]
    operands = [text for text in i.operands[1:] if not is_predicate(text)]
    high, extended, signed = "HI" in i.modifiers, "X" in i.modifiers, "SX32" in i.modifiers
    (a, minus, _), b = integer(operands[0]), _addend(operands[1])
    c = words(operands[2]) if high and not signed else None
    shift = int(operands[-1], 0)
    carry = predicate(predicates[-1]) if extended else None
    num_outputs = len(predicates) - extended

    def compute(warp: Warp) -> Any:
        low = _wide(-a(warp) if minus else a(warp))
        if not high:
            shifted = low << _U64(shift) & _LOW
        elif signed:
            shifted = (a(warp).view(np.int32).astype(np.int64) >> (32 - shift)).view(_U64) & _LOW
        else:
            assert c is not None
            shifted = ((_wide(c(warp)) << _U64(32) | low) >> _U64(32 - shift)) & _LOW
        addend, one = b(warp)
        total = shifted + addend + _U64(one)
        if carry is not None:
            total = total + carry(warp)
        return (total & _LOW).astype(np.uint32), [total > _LOW] * num_outputs

    return compute


def shift(i: Instruction) -> Compute:
    low, by, high = (words(text) for text in i.operands[1:4])
    left, takes_high, wraps = "L" in i.modifiers, "HI" in i.modifiers, "W" in i.modifiers
    signed, wide = "S32" in i.modifiers, {"U64", "S64"} & i.modifiers

    def compute(warp: Warp) -> Any:
        distance = by(warp)
        distance = distance & 31 if wraps else np.minimum(distance, 63 if wide else 32)
        value = _wide(high(warp)) << _U64(32) | _wide(low(warp))
        if left:
            shifted = value << _wide(distance)
            return (shifted >> _U64(32) if takes_high else shifted & _LOW).astype(np.uint32)
        if takes_high and signed:
            return (high(warp).view(np.int32) >> np.minimum(distance, 31).astype(np.int32)).view(np.uint32)
        shifted = value >> _wide(distance)
        return (shifted >> _U64(32) if takes_high else shifted & _LOW).astype(np.uint32)

    return compute


def logic(table: int, a: Any, b: Any, c: Any) -> Any:
    """Any function of three bits, bit by bit."""
    result = a & ~a
    for case in range(8):
        if table >> case & 1:
            result = result | (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return result


def logic_words(i: Instruction) -> Compute:
    operands = [text for text in i.operands if not is_predicate(text)]
    predicates = [text for text in i.operands if is_predicate(text)]
    a, b, c = (words(text) for text in operands[-4:-1])
    table, outputs = int(operands[-1], 0), len(predicates) - 1

    def compute(warp: Warp) -> Any:
        result = logic(table, a(warp), b(warp), c(warp))
        return result, [result != 0] * outputs

    return compute


def logic_predicates(i: Instruction) -> Compute:
    a, b, c = (predicate(text) for text in i.operands[2:5])
    tables = [int(text, 0) for text in i.operands[5:7]]
    return lambda warp: (None, [logic(table, a(warp), b(warp), c(warp)) for table in tables])


_COMPARES: dict[str, Callable[[Any, Any], Any]] = {
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
}


def compare_integers(i: Instruction) -> Compute:
    kind = i.operation.split(".")[1]
    dtype = np.uint32 if "U32" in i.modifiers else np.int32
    (a, minus_a, _), (b, minus_b, _) = integer(i.operands[2]), integer(i.operands[3])
    inputs = [predicate(text) for text in i.operands[4:]]

    def compute(warp: Warp) -> Any:
        left, right = (-a(warp) if minus_a else a(warp)), (-b(warp) if minus_b else b(warp))
        left, right = left.view(dtype), right.view(dtype)
        result = _COMPARES[kind](left, right)
        if "EX" in i.modifiers:  # of the upper words, behind that of the lower ones
            lower, same = inputs[1](warp), left == right
            result = (result & ~same) | (same & lower)
        return None, _combined(i, result, inputs[0](warp))

    return compute


def compare_reals(i: Instruction) -> Compute:
    kind = i.operation.split(".")[1]
    a, b, other = real(i.operands[2]), real(i.operands[3]), predicate(i.operands[4])

    def compute(warp: Warp) -> Any:
        left, right = a(warp), b(warp)
        unordered = np.isnan(left) | np.isnan(right)
        if kind in ("NUM", "NAN"):
            result = unordered == (kind == "NAN")
        else:
            result = _COMPARES[kind[:2]](left, right)
            result = result | unordered if kind.endswith("U") else result & ~unordered
        return None, _combined(i, result, other(warp))

    return compute


def check_division(i: Instruction) -> Compute:
    """FCHK: whether a quotient needs more care than a reciprocal and its corrections."""
    operands = real(i.operands[1]), real(i.operands[2])

    def compute(warp: Warp) -> Any:
        above, below = (np.abs(operand(warp)) for operand in operands)
        ordinary = (above == 0) | ((above > 2.0**-100) & (above < 2.0**100))
        return None, [~(ordinary & (below > 2.0**-100) & (below < 2.0**100))]

    return compute


def _combined(i: Instruction, result: np.ndarray, other: np.ndarray) -> list[np.ndarray]:
    if "OR" in i.modifiers:
        return [result | other, ~result | other]
    if "XOR" in i.modifiers:
        return [result ^ other, ~result ^ other]
    return [result & other, ~result & other]


def select(i: Instruction) -> Compute:
    if i.name == "FSEL":
        a, b = (_float32(np.asarray, text) for text in i.operands[1:3])
    else:
        a, b = (words(text) for text in i.operands[1:3])
    chooses = predicate(i.operands[3])
    return lambda warp: np.where(chooses(warp), a(warp), b(warp))


def smaller_or_larger(i: Instruction) -> Compute:
    takes_smaller = predicate(i.operands[-1])
    if i.name == "FMNMX":
        x, y = real(i.operands[1]), real(i.operands[2])
        return lambda warp: np.where(takes_smaller(warp), np.fmin(x(warp), y(warp)), np.fmax(x(warp), y(warp))).view(
            np.uint32
        )
    dtype = np.uint32 if "U32" in i.modifiers else np.int32
    readers = [words(text) for text in i.operands[1:-1]]

    def compute(warp: Warp) -> Any:
        *first, last = (reader(warp) for reader in readers)
        left = (first[0] + first[1] if len(first) == 2 else first[0]).view(dtype)
        right = last.view(dtype)
        return np.where(takes_smaller(warp), np.minimum(left, right), np.maximum(left, right)).view(np.uint32)

    return compute


def permute(i: Instruction) -> Compute:
    a, selector, b = (words(text) for text in i.operands[1:4])

    def compute(warp: Warp) -> Any:
        source = _wide(b(warp)) << _U64(32) | _wide(a(warp))
        chosen, result = selector(warp), np.zeros(LANES, np.uint32)
        for at in range(4):
            nibble = chosen >> np.uint32(4 * at) & 15
            byte = (source >> _wide((nibble & 7) * 8) & _U64(0xFF)).astype(np.uint32)
            byte = np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte).astype(np.uint32)
            result |= byte << np.uint32(8 * at)
        return result

    return compute


def _count_bits(i: Instruction) -> Compute:
    read = words(i.operands[1].lstrip("~"))
    inverted = i.operands[1].startswith("~")

    def bits(warp: Warp) -> np.ndarray:
        value = read(warp)
        return ~value if inverted else value

    if i.name == "POPC":
        return lambda warp: np.array([int(v).bit_count() for v in bits(warp)], np.uint32)
    if i.name == "BREV":
        return lambda warp: np.array([int(f"{v:032b}"[::-1], 2) for v in bits(warp)], np.uint32)
    from_top = "SH" in i.modifiers

    def first_one(warp: Warp) -> np.ndarray:
        places = [int(v).bit_length() - 1 for v in bits(warp)]
        return np.array([0xFFFFFFFF if p < 0 else (31 - p if from_top else p) for p in places], np.uint32)

    return first_one


# --- Numbers with a point.


def _float32(function: Callable[..., np.ndarray], *texts: str) -> Compute:
    readers = [real(text) for text in texts]
    return lambda warp: function(*(reader(warp) for reader in readers)).astype(np.float32).view(np.uint32)


def multiply_reals(i: Instruction) -> Compute:
    """FMUL; `.M8` takes eight times the product, `.D2` half of it."""
    scale = next((float(m[1:]) ** (1 if m[0] == "M" else -1) for m in i.modifiers if re.fullmatch("[MD][248]", m)), 1)
    return _float32(lambda a, b: a * b * np.float32(scale), *i.operands[1:3])


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) * b + c


def to_bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> np.uint32(16) & 1)) >> np.uint32(16)


def _e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return float("nan")
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -size if byte & 128 else size


_E4M3 = np.array([_e4m3(byte) for byte in range(256)], np.float16).view(np.uint16).astype(np.uint32)


def unpack_e4m3(i: Instruction) -> Compute:
    """Two float16 from two bytes of a word, the lower ones or the upper."""
    name, _, half = i.operands[1].partition(".")
    read, distance = words(name), np.uint32(16 if half == "H1" else 0)

    def compute(warp: Warp) -> Any:
        pair = read(warp) >> distance
        return _E4M3[pair & 0xFF] | _E4M3[pair >> np.uint32(8) & 0xFF] << np.uint32(16)

    return compute


def pack(i: Instruction) -> Compute:
    if "UNPACK_B" in i.modifiers:
        assert "E4M3" in i.modifiers, i.text
        return unpack_e4m3(i)
    high, low = real(i.operands[1]), real(i.operands[2])
    if "BF16" in i.modifiers:
        convert: Callable[[np.ndarray], np.ndarray] = to_bf16
    else:
        convert = lambda values: values.astype(np.float16).view(np.uint16).astype(np.uint32)  # noqa: E731
    return lambda warp: convert(high(warp)) << np.uint32(16) | convert(low(warp))


def _halves(text: str) -> Callable[[Warp], np.ndarray]:
    """(32, 2) float16 in float64: lower and upper half, or one of them twice."""
    negative = re.match(r"-[R|U]", text) is not None
    bare = text[1:] if negative else text
    name, _, part = bare.partition(".")
    read = words(name.strip("|"))

    def halves(warp: Warp) -> np.ndarray:
        pair = np.ascontiguousarray(read(warp)).view(np.float16).reshape(LANES, 2).astype(np.float64)
        if part in ("H0_H0", "H1_H1"):
            pair = pair[:, [int(part[1])] * 2]
        return -pair if negative else pair

    return halves


def _both_lanes(low: float, high: float) -> Callable[[Warp], np.ndarray]:
    pairs = np.broadcast_to(np.array([low, high]), (LANES, 2))
    return lambda warp: pairs


def half_arithmetic(i: Instruction) -> Compute:
    """HADD2, HMUL2, HFMA2 of float16; HADD2.F32 widens one."""
    texts = list(i.operands[1:])
    wanted = {"HADD2": 2, "HMUL2": 2, "HFMA2": 3}[i.name]
    readers: list[Callable[[Warp], np.ndarray]] = []
    while texts:
        text = texts.pop(0)
        if re.match(r"-?\|?U?R", text) or text.startswith("c["):
            readers.append(_halves(text))
        else:  # two constants: upper, then lower half
            readers.append(_both_lanes(float(texts.pop(0)), float(text)))
    assert len(readers) == wanted, i.text

    def compute(warp: Warp) -> Any:
        values = [reader(warp) for reader in readers]
        result = values[0] + values[1] if i.name == "HADD2" else values[0] * values[1]
        if i.name == "HFMA2":
            result = result + values[2]
        if "F32" in i.modifiers:
            return result[:, 0].astype(np.float32).view(np.uint32)
        return np.ascontiguousarray(result.astype(np.float16)).view(np.uint32).reshape(LANES)

    return compute


_UNITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "EX2": np.exp2,
    "LG2": np.log2,
    "RCP": lambda x: 1 / x,
    "RSQ": lambda x: 1 / np.sqrt(x),
    "SQRT": np.sqrt,
}


def _convert(i: Instruction) -> Compute:
    """Between integers and float32."""
    unsigned = "U32" in i.modifiers
    if i.name == "F2I":
        value = real(i.operands[1])
        return lambda warp: np.trunc(value(warp)).astype(np.int64).astype(np.uint32)
    read = words(i.operands[1])
    return lambda warp: read(warp).view(np.uint32 if unsigned else np.int32).astype(np.float32).view(np.uint32)


def matrix(i: Instruction) -> Compute:
    """HMMA.16816.F32: the registers of A, B and C as the PTX manual shows for mma.m16n8k16."""
    a, b = int(i.operands[1][1:]), int(i.operands[2][1:])
    c = None if i.operands[3] == "RZ" else int(i.operands[3][1:])
    brain = "BF16" in i.modifiers

    def widened(registers: np.ndarray) -> np.ndarray:
        """(registers, 32) words as (registers, 32, 2) float64."""
        if brain:
            bits = np.stack((registers << np.uint32(16), registers & np.uint32(0xFFFF0000)), -1)
            return bits.view(np.float32).astype(np.float64)
        return np.ascontiguousarray(registers).view(np.float16).reshape(len(registers), LANES, 2).astype(np.float64)

    def compute(warp: Warp) -> Any:
        # [depth half, row half] of A; lanes are (row, column of two).
        left = widened(warp.registers[a : a + 4]).reshape(2, 2, 8, 4, 2)
        right = widened(warp.registers[b : b + 2]).reshape(2, 8, 4, 2)
        products = np.einsum("drick,dnck->rin", left, right)
        if c is not None:
            start = warp.registers[c : c + 4].view(np.float32).reshape(2, 2, 8, 4)  # [row half, parity]
            products = products + start.transpose(0, 2, 3, 1).reshape(2, 8, 8)
        result = products.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, LANES)
        return result.astype(np.float32).view(np.uint32)

    return compute


def shuffle(i: Instruction) -> Compute:
    value, by, clamp = (words(text) for text in i.operands[2:5])
    mode = i.operation.split(".")[1]

    def compute(warp: Warp) -> Any:
        distance, mask = by(warp) & 31, clamp(warp)
        segment, bound = mask >> 8 & 31, mask & 31
        last = (LANE & segment) | (bound & ~segment)
        lane = LANE.astype(np.int64)
        source = {
            "BFLY": LANE ^ distance,
            "IDX": (distance & ~segment) | (LANE & segment),
            "UP": lane - distance,
            "DOWN": lane + distance,
        }[mode].astype(np.int64)
        inside = source >= last if mode == "UP" else source <= last
        source = np.where(inside, source, lane)
        return value(warp)[source], [inside]

    return compute


MAKERS: dict[str, Callable[[Instruction], Compute]] = {
    **dict.fromkeys(("IADD3", "UIADD3"), add),
    **dict.fromkeys(("IMAD", "UIMAD"), multiply_add),
    **dict.fromkeys(("LEA", "ULEA"), shift_add),
    **dict.fromkeys(("SHF", "USHF"), shift),
    **dict.fromkeys(("LOP3", "ULOP3"), logic_words),
    **dict.fromkeys(("PLOP3", "UPLOP3"), logic_predicates),
    **dict.fromkeys(("ISETP", "UISETP"), compare_integers),
    "FSETP": compare_reals,
    "FCHK": check_division,
    **dict.fromkeys(("SEL", "FSEL", "USEL"), select),
    **dict.fromkeys(("FMNMX", "VIMNMX", "VIADDMNMX", "IMNMX", "UIMNMX"), smaller_or_larger),
    **dict.fromkeys(("PRMT", "UPRMT"), permute),
    **dict.fromkeys(("POPC", "BREV", "FLO", "UFLO", "UPOPC", "UBREV"), _count_bits),
    **dict.fromkeys(("MOV", "UMOV", "R2UR"), lambda i: words(i.operands[-1])),
    "VIADD": add_two,
    "IABS": absolute,
    "FADD": lambda i: _float32(np.add, *i.operands[1:3]),
    "FMUL": multiply_reals,
    "FFMA": lambda i: _float32(_fma, *i.operands[1:4]),
    "MUFU": lambda i: _float32(_UNITS[i.operation.split(".")[1]], i.operands[1]),
    **dict.fromkeys(("I2F", "I2FP", "F2I"), _convert),
    "F2FP": pack,
    **dict.fromkeys(("HADD2", "HMUL2", "HFMA2"), half_arithmetic),
    "HMMA": matrix,
    "SHFL": shuffle,
}
