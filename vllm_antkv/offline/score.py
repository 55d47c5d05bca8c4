"""The loss of a model whose past goes through a method, and how far its predictions are from the model's own."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from vllm_antkv.offline.attention import quantised_past
from vllm_antkv.offline.fidelity import OwnFidelity, PositionBand
from vllm_antkv.offline.float32_products import faster_products
from vllm_antkv.offline.method import Method

#: Tokens in one forward pass: enough to keep two cores or a GPU busy, few enough for the activations of an 8B model.
_TOKENS_PER_PASS = 4096
#: Positions whose logits are held at a time: 128 x a vocabulary of 128 K in float32 is 64 MB.
_LOGITS_CHUNK = 128
#: Positions of the first band; every other is as long as all before it.
_FIRST_BAND = 128

#: Called after every batch with the number of windows done since the last call.
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Scores:
    """Means over the scored positions of all windows; fields as in `PerplexityReport`."""

    nll: float
    fidelity: OwnFidelity | None


@faster_products()
def score(
    model: PreTrainedModel,
    method: Method,
    windows: torch.Tensor,
    progress: Progress = lambda done: None,
    against_own: bool = False,
) -> Scores:
    """The model on windows through a method; summed in float64, so that it does not depend on the batches."""
    num_windows, context = windows.shape
    # By position: negative log-likelihood, that of the model's own predictions, divergence, agreement.
    nll, own_nll, kl, agreed = sums = torch.zeros(4, context - 1, dtype=torch.float64, device=model.device)
    with torch.inference_mode():
        for batch in windows.split(max(1, _TOKENS_PER_PASS // context)):
            batch = batch.to(model.device)
            own = model.get_decoder()(batch, use_cache=False).last_hidden_state if against_own else None
            with quantised_past(model, method, context):
                hidden = model.get_decoder()(batch, use_cache=False).last_hidden_state
            for start in range(0, context - 1, _LOGITS_CHUNK):
                at = slice(start, min(start + _LOGITS_CHUNK, context - 1))
                following = batch[:, 1:][:, at, None]
                found = _log_probs(model, hidden[:, at])
                nll[at] -= found.gather(-1, following)[..., 0].double().sum(0)
                if own is not None:
                    wanted = _log_probs(model, own[:, at])
                    own_nll[at] -= wanted.gather(-1, following)[..., 0].double().sum(0)
                    kl[at] += (wanted.exp() * (wanted - found)).sum(-1).double().sum(0)
                    agreed[at] += (wanted.argmax(-1) == found.argmax(-1)).sum(0)
            progress(len(batch))
    means = sums.cpu() / num_windows
    return Scores(means[0].mean().item(), _fidelity(means) if against_own else None)


def _fidelity(means: torch.Tensor) -> OwnFidelity:
    """From means over windows by position, (4, num_positions) float64, as in `score`."""
    bands, first = [], 0
    while first < means.shape[1]:
        nll, own_nll, kl, agreed = means[:, first : max(2 * first, _FIRST_BAND)].mean(1).tolist()
        bands.append(PositionBand(first=first, kl=kl, top1_agreement=agreed, loss=nll - own_nll))
        first = max(2 * first, _FIRST_BAND)
    _, _, kl, agreed = means.mean(1).tolist()
    return OwnFidelity(kl=kl, top1_agreement=agreed, by_position=tuple(bands))


def _log_probs(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Natural logarithms of the next-token distributions, (num_windows, num_positions, vocab_size) float32."""
    logits: torch.Tensor = model.get_output_embeddings()(hidden)
    return logits.float().log_softmax(-1)
