"""The tiny model, its codebooks and text."""

from tests.unit.evaluate.conftest import *  # noqa: F403
