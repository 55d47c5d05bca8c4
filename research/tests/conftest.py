"""The tiny model, its codebooks and text; one thread, and readable errors."""

from tests.conftest import gradients, reads_well, refused  # noqa: F401
from tests.unit.evaluate.conftest import *  # noqa: F403
