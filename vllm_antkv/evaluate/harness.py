"""lm-evaluation-harness's own vLLM clients, which also remember how long each answer was.

Imports the harness, so only `tasks.py` imports this, and late.
"""

from dataclasses import dataclass
from typing import Any

import requests
from lm_eval.models.openai_completions import LocalCompletionsAPI  # type: ignore[import-not-found,import-untyped]
from lm_eval.models.vllm_causallms import VLLM  # type: ignore[import-not-found,import-untyped]

from vllm_antkv.errors import SettingsError


@dataclass(frozen=True)
class Answer:
    """A generated text: its tokens, and whether the limit on them cut it off."""

    num_tokens: int
    capped: bool


class RecordingVLLM(VLLM):
    """The model type `vllm`: an engine in this process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.answers: list[Answer] = []
        super().__init__(*args, **kwargs)

    def _model_generate(self, requests: Any, generate: bool = False, sampling_params: Any = None) -> Any:
        outputs = super()._model_generate(requests, generate, sampling_params)
        if generate:
            best = [output.outputs[0] for output in outputs]
            self.answers += [Answer(len(text.token_ids), text.finish_reason == "length") for text in best]
        return outputs


class RecordingServer(LocalCompletionsAPI):
    """The model type `local-completions`: a running server, asked one prompt per request."""

    def __init__(self, url: str, **kwargs: Any) -> None:
        self.answers: list[Answer] = []
        super().__init__(base_url=f"{url}/v1/completions", batch_size=1, **kwargs)
        self.model = self._served_model_name(f"{url}/v1/models")

    def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str]:
        """See the base class."""
        for output in outputs if isinstance(outputs, list) else [outputs]:
            capped = output["choices"][0]["finish_reason"] == "length"
            self.answers.append(Answer(output["usage"]["completion_tokens"], capped))
        return super().parse_generations(outputs, **kwargs)

    def _served_model_name(self, address: str) -> str:
        try:
            response = requests.get(address, headers=self.header, timeout=30)
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (requests.RequestException, ValueError, KeyError, IndexError) as error:
            raise SettingsError(f"No OpenAI-compatible server answers at {address} ({type(error).__name__}).") from None
