"""Which part of a multiprocessor an instruction keeps busy, and for how long."""

import re
from functools import cache

from research.sm_model.constants import Constants
from research.sm_model.sass import Instruction

#: Kinds of instructions for the tables, the first that fits.
_KINDS = (
    ("LDS", r"LDS|LDSM"),
    ("STS", r"STS|STSM|ATOMS"),
    ("LDG", r"LDG|LD|LDGSTS|UBLKCP"),
    ("STG", r"STG|ST|REDG?|ATOMG|ATOM"),
    ("LOCAL", r"LDL|STL"),
    ("LDC", r"LDC|ULDC|S2R|S2UR|CS2R"),
    ("SHFL", r"SHFL|VOTE|VOTEU|R2UR|ELECT|REDUX"),
    ("HMMA", r"HMMA|HGMMA|IMMA|QMMA"),
    ("HFMA2", r"HFMA2|HMUL2|HADD2"),
    ("FP32", r"FFMA|FMUL|FADD|FMNMX|FSETP|FSEL|MUFU|F2FP|F2I|I2F|I2FP|F2F"),
    ("PRMT", r"PRMT"),
    (
        "CTRL",
        r"BRA|BSSY|BSYNC|BREAK|EXIT|BAR|DEPBAR|LDGDEPBAR|CALL|RET|WARPSYNC|NOP|YIELD|SYNCS|MEMBAR|FENCE|ERRBAR"
        r"|CGAERRBAR|UCGABAR_\w+|NANOSLEEP|ENDCOLLECTIVE|CCTL|USETMAXREG",
    ),
)
KINDS = (*(name for name, _ in _KINDS), "INT")
#: What goes through the queue to the pipe of loads and stores, which all four schedulers share.
_QUEUED = frozenset(("LDS", "STS", "LDG", "STG", "LOCAL"))


@cache
def _kind_of_name(name: str) -> str:
    return next((kind for kind, pattern in _KINDS if re.fullmatch(pattern, name)), "INT")


def kind(i: Instruction) -> str:
    """One of `KINDS`: what else counts with integers."""
    return _kind_of_name(i.name)


def is_queued(i: Instruction) -> bool:
    return (kind(i) in _QUEUED or i.name == "SHFL") and i.name != "UBLKCP"


def unit(i: Instruction, c: Constants) -> tuple[str, float] | None:
    """The pipe of a scheduler and the cycles that it is busy; None for what no pipe limits."""
    if i.name == "IMAD" or i.operation == "HFMA2.MMA":
        return "fma", c.imad_interval
    if i.name == "MUFU":
        return "special", c.special_interval
    if i.name in ("FMNMX", "FSETP", "FSEL", "F2FP", "PRMT"):
        return "alu", c.alu_interval
    named = {
        "HMMA": ("mma", c.mma_interval),
        "HFMA2": ("fma", c.half_interval),
        "FP32": ("fma", c.fma_interval),
        "INT": ("alu", c.alu_interval),
    }
    return None if i.name.startswith("U") else named.get(kind(i))
