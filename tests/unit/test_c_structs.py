import ctypes

import pytest

from vllm_antkv.ops.c_structs import fields

HEADER = """
struct pair {  // 2 of them
    const float *first, *second;
};
struct all {
    pair both;
    int32_t a, b;  // float c;
    int64_t d;
    uint8_t* e;
    float f;
};
"""


def test_members_are_read_in_their_order():
    pair = type("Pair", (ctypes.Structure,), {"_fields_": fields(HEADER, "pair")})
    assert pair._fields_ == [("first", ctypes.c_void_p), ("second", ctypes.c_void_p)]
    assert fields(HEADER, "all", {"pair": pair}) == [
        ("both", pair),
        ("a", ctypes.c_int32),
        ("b", ctypes.c_int32),
        ("d", ctypes.c_int64),
        ("e", ctypes.c_void_p),
        ("f", ctypes.c_float),
    ]


def test_a_member_of_a_type_that_is_not_known_is_refused():
    with pytest.raises(KeyError, match="pair"):
        fields(HEADER, "all")
