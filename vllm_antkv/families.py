"""The families of models that are tested: `configs/families.toml`, for everything that asks.

The start-up check, calibration, the evaluator, `antkv doctor`, the tests and `docs/compatibility.md` read it. Pure
Python.
"""

import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Family:
    """One family; the file says what its fields are."""

    model_type: str
    architecture: str
    title: str
    evaluated: bool = True
    served: str = "run"
    trained: str = ""
    special: str = ""


_TABLE = tomllib.loads(files("vllm_antkv.configs").joinpath("families.toml").read_text(encoding="utf-8"))
#: By `model_type`.
FAMILIES = {model_type: Family(model_type, **row) for model_type, row in _TABLE.items()}

#: What is tested. Servers take others too, whose layers are of kinds that the cache has, and say so.
SERVED_ARCHITECTURES = tuple(family.architecture for family in FAMILIES.values() if family.served)
