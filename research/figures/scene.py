"""What every figure is drawn from: a model, windows of text, and the methods that can be built for it."""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from research.figures.activations import LayerRows, visit_layers
from research.literature.registry import build_method
from research.literature.request import LiteratureRequest
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.evaluate.report import perplexity_of
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.offline.score import score
from vllm_antkv.offline.traits import rotary_tables
from vllm_antkv.ops.rope import RotaryTable

T = TypeVar("T")

#: Shown by figures of one preset, where there is a codebook for it.
DEFAULT_PRESET = "antkv-1bit"


@dataclass(frozen=True)
class Scene:
    """One model and text under one set of settings.

    presets: those that have a codebook, at least one.
    windows: (num_windows, context) int64.
    request: what methods are built from; its `config` has the recency that all of them share, its `sample` what
        calibrated methods learn from.
    """

    card: ModelCard
    model: PreTrainedModel
    presets: list[str]
    windows: torch.Tensor
    request: LiteratureRequest

    @property
    def context(self) -> int:
        """Tokens per window."""
        return self.windows.shape[1]

    @property
    def preset(self) -> str:
        """The preset of figures that show one."""
        return DEFAULT_PRESET if DEFAULT_PRESET in self.presets else self.presets[0]

    @cached_property
    def rotaries(self) -> list[RotaryTable]:
        """The layers' own tables for a window."""
        return rotary_tables(self.model, self.context)

    def method(self, name: str, **changes: Any) -> Method:
        """The method called `name`, with changes to the settings."""
        return build_method(name, replace(self.request, config=self.config(**changes)))

    def config(self, **changes: Any) -> AntKVConfig:
        """The settings with changes."""
        return AntKVConfig.model_validate({**self.request.config.model_dump(), **changes})

    def perplexity(self, method: Method) -> float:
        """Of the model on the windows through `method`."""
        return perplexity_of(score(self.model, method, self.windows).nll)

    @cached_property
    def full_perplexity(self) -> float:
        """Of the model as it is."""
        return self.perplexity(self.method("fp16"))

    def divergence(self, method: Method) -> float:
        """Mean KL divergence, in nats, of the next-token distributions through `method` from the model's own.

        Unlike perplexity, it cannot fall because an error happens to suit the text.
        """
        fidelity = score(self.model, method, self.windows, against_own=True).fidelity
        assert fidelity is not None
        return fidelity.kl

    def visit(self, visitor: Callable[[LayerRows], None], window: int = 0) -> None:
        """Hand the rows of every layer of one window, in full precision, to `visitor`."""
        visit_layers(self.model, self.windows[window], visitor)

    def plain_layers(self) -> list[LayerRows]:
        """The layers of the first window whose queries see all before them by plain logits.

        Raises UnsupportedModelError when there is none: methods that drop rows are made for those.
        """
        layers: list[LayerRows] = []
        self.visit(layers.append)
        plain = [rows for rows in layers if rows.sees_all and replace(rows.rules, window=None).are_plain]
        if not plain:
            raise UnsupportedModelError(
                "Figures of methods that drop rows need a layer without a soft cap, learned sinks, and a sliding "
                "window shorter than --context, and this model has none: name others with --figures."
            )
        return plain

    def coded(self, method: Method, rows: LayerRows) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer's K (after RoPE) and V come back as, each (num_tokens, num_kv_heads, head_size)."""
        assert method.quantiser is not None
        scale = torch.ones(()) if method.k_scale is None else method.k_scale[rows.layer].to(rows.key)
        rotary = self.rotaries[rows.layer]
        key, value = method.quantiser.read_back(rows.layer, (rows.key * scale)[None], rows.value[None], rotary)
        return key[0] / scale, value[0]


def track(items: Iterable[T], what: str) -> Iterator[T]:
    """The items, with a progress bar on standard error that goes when they are done."""
    return iter(tqdm(list(items), desc=what, leave=False, mininterval=0.1 if sys.stderr.isatty() else 30))


def numbers_of(tensor: torch.Tensor) -> list[Any]:
    """As JSON keeps them, with the six digits that a figure can use at most."""
    flat = [float(f"{value:.6g}") for value in tensor.flatten().tolist()]
    return torch.tensor(flat, dtype=torch.float64).view(tensor.shape).tolist()
