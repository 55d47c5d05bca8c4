"""Anchors as AnTKV chooses them: by full-precision attention of all queries of the window, for all later blocks.

There the future reaches the past, and the engine differs: it sees a prompt in steps, and blocks that close in a step
serve nothing within it. The figures of this choice are the paper's, not the server's.
"""

import torch

from vllm_antkv.config import AntKVConfig
from vllm_antkv.offline.attention import attend_window
from vllm_antkv.offline.coded_rows import OwnQueries
from vllm_antkv.offline.method import LayerWindow, Method
from vllm_antkv.offline.prompt_scores import POWER, prompt_scores
from vllm_antkv.select.anchors import SINK_SCORE, anchor_slots
from vllm_antkv.select.recency import last_query_table


class AllQueries(OwnQueries):
    """By the queries of the whole window."""

    def __init__(self, window: LayerWindow, config: AntKVConfig) -> None:
        super().__init__(window, config)
        tokens = window.key.shape[1]
        last_query = last_query_table(config, tokens, window.rules.window).to(window.key.device)
        self._scores = prompt_scores(window, last_query)

    def scores(self, block: slice, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class."""
        return self._scores[0][..., block], self._scores[1][..., block]

    def anchors(self, scores: torch.Tensor, errors: torch.Tensor, already_exact: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return anchor_slots(scores * errors**POWER, scores == SINK_SCORE, already_exact, self.config)


def attend_by_prompt(window: LayerWindow, method: Method, is_sink: torch.Tensor | None) -> torch.Tensor:
    """See `attend_window`."""
    return attend_window(window, method, is_sink, AllQueries)
