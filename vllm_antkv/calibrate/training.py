"""Training through the quantised attention, as the intact prefix (`prefix`) is.

Steps draw their windows by the seed alone, so that a killed run goes on as if nothing had happened. Some windows are
not trained on, and judge. Anchors and sinks are off meanwhile: which tokens they are is a choice, through which no
gradient goes. Recency and prefix are the server's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from vllm_antkv.config import AntKVConfig

#: What the model keeps exact while something is trained.
TRAINING = AntKVConfig(anchor_share=0.0, sinks=False)
#: Tokens in a step.
_TOKENS_PER_STEP = 2048
#: One window in so many is not trained on, and judges.
_HELD_OUT_EVERY = 16
#: Steps between two points from which a killed run goes on.
_STEPS_PER_SAVE = 20


@dataclass
class Progress:
    """Everything a later run needs to go on as if nothing had happened.

    step: steps done. tensors: what is trained and moments of the optimiser, by name; empty before the first step.
    """

    step: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Schedule:
    """How long to train, and what a run that goes on needs.

    steps: of about 2,048 tokens each.
    seed: draws the windows of each step.
    progress: where an earlier run stopped.
    save: called now and then with what to keep.
    advance: called with the number of steps done since the last call.
    """

    steps: int
    seed: int
    progress: Progress
    save: Callable[[Progress], None]
    advance: Callable[[int], object]


def split(windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows that judge, and windows that are trained on."""
    held_out = max(1, len(windows) // _HELD_OUT_EVERY)
    return windows[:held_out], windows[held_out:]


def train(
    tensors: Mapping[str, torch.Tensor],
    optimiser: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], None],
    windows: torch.Tensor,
    schedule: Schedule,
) -> None:
    """Take the steps that are not taken yet.

    Args:
        tensors: what is trained, each a parameter of the optimiser; float32, changed in place.
        optimiser: Adam or one of its kind.
        backward: leaves the gradients of a step's windows, (num_windows, seq_len) int64.
        windows: (num_windows, seq_len) int64, those that are trained on.
        schedule: see `Schedule`.
    """
    _restore(schedule.progress, tensors, optimiser)
    schedule.advance(schedule.progress.step)
    device = next(iter(tensors.values())).device
    for step in range(schedule.progress.step, schedule.steps):
        optimiser.zero_grad()
        backward(windows[_drawn(len(windows), windows.shape[1], schedule.seed, step)].to(device))
        optimiser.step()
        schedule.advance(1)
        if (step + 1) % _STEPS_PER_SAVE == 0 or step + 1 == schedule.steps:
            schedule.save(_kept(step + 1, tensors, optimiser))


def _drawn(num_windows: int, seq_len: int, seed: int, step: int) -> torch.Tensor:
    """Indices of a step's windows: every window comes once before any comes again."""
    count = max(1, _TOKENS_PER_STEP // seq_len)
    indices = []
    for position in range(step * count, (step + 1) * count):
        turn, place = divmod(position, num_windows)
        generator = torch.Generator().manual_seed(seed + turn)
        indices.append(torch.randperm(num_windows, generator=generator)[place])
    return torch.stack(indices)


def _kept(step: int, tensors: Mapping[str, torch.Tensor], optimiser: torch.optim.Optimizer) -> Progress:
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        state = optimiser.state[tensor]
        kept |= {name: tensor.detach(), f"{name}.mean": state["exp_avg"], f"{name}.square": state["exp_avg_sq"]}
    return Progress(step, {name: tensor.to("cpu", copy=True) for name, tensor in kept.items()})


def _restore(progress: Progress, tensors: Mapping[str, torch.Tensor], optimiser: torch.optim.Optimizer) -> None:
    if not progress.step:
        return
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(progress.tensors[name])
            optimiser.state[tensor] = {
                "step": torch.tensor(float(progress.step)),
                "exp_avg": progress.tensors[f"{name}.mean"].to(tensor),
                "exp_avg_sq": progress.tensors[f"{name}.square"].to(tensor),
            }
