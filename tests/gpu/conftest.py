"""Real engines and prompts: the fixtures of tests/serving."""

from tests.serving.conftest import codebooks, engine_environment, prompts, start_engine

__all__ = ["codebooks", "engine_environment", "prompts", "start_engine"]
