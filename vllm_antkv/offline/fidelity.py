"""How close predictions are to the model's own; reports have it without the model's code."""

from pydantic import BaseModel, ConfigDict


class OwnFidelity(BaseModel):
    """One entry of `fidelity` in the JSON of `antkv eval compare`.

    kl: mean divergence of the next-token distributions from the model's own, in nats.
    top1_agreement: share of positions with the model's own most likely token.
    """

    model_config = ConfigDict(frozen=True)

    kl: float
    top1_agreement: float
