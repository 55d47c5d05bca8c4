"""Runs images.py in a process that has torchvision, which vLLM needs to look at most models that see images."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.processes import run_pytest

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
#: Where `make venv` puts torchvision, beside the CPU build of PyTorch.
WHEEL = Path(sys.prefix) / "vision"


def test_models_that_see_images():
    environment = dict(os.environ)
    if importlib.util.find_spec("torchvision") is None:
        assert WHEEL.exists(), "make venv"
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (HERE / "beside_cpu_torch", WHEEL)))
    run_pytest(HERE / "images.py", environment=environment)
