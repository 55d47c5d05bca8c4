"""How close predictions are to the model's own; reports have it without the model's code."""

from pydantic import BaseModel


class PositionBand(BaseModel, frozen=True):
    """Positions from `first` to the next band's: as far into the context, as close.

    loss: mean of what the negative log-likelihood of a token grows by, in nats.
    """

    first: int
    kl: float
    top1_agreement: float
    loss: float


class OwnFidelity(BaseModel, frozen=True):
    """One entry of `fidelity` in the JSON of `antkv eval compare`.

    kl: mean divergence of the next-token distributions from the model's own, in nats.
    top1_agreement: share of positions with the model's own most likely token.
    by_position: the same by how many tokens came before; a band ends where twice as many do.
    """

    kl: float
    top1_agreement: float
    by_position: tuple[PositionBand, ...]
