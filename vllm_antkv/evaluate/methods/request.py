"""What a method is built for."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_antkv.codebook import Codebook, ModelIdentity, find_codebook
from vllm_antkv.config import AntKVConfig
from vllm_antkv.offline.method import Method


@dataclass(frozen=True)
class MethodRequest:
    """A model, and the settings asked for.

    model_name: folder or Hugging Face name of the model, for the messages and for finding codebooks.
    identity: the model's sizes.
    codebooks: folder with codebooks; None looks where the server looks.
    config: the settings; a method takes those it has.
    """

    model_name: str
    identity: ModelIdentity
    codebooks: Path | None
    config: AntKVConfig

    def codebook(self, preset: str) -> Codebook:
        """What the server would load; CodebookError when there is none, or a bad one."""
        folder = None if self.codebooks is None else str(self.codebooks)
        return Codebook.load(find_codebook(self.model_name, self.identity, preset, folder), preset, self.identity)


#: Builds the method called `name`; raises AntKVError when what it needs is missing.
Builder = Callable[[str, MethodRequest], Method]
