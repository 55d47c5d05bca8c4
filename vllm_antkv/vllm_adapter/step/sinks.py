"""Flags of attention sinks, found in the hidden states at the emergence layer (KVSink, algorithm 1).

A forward hook on decoder layer `rule.layer` calls a custom op that fills a buffer, which the attention layers after it
read. In a pipeline the flags go from stage to stage with the hidden states. The op declares that it mutates the hidden
states (it does not), so that torch.compile neither drops it nor moves it past the layers that follow.
"""

from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_antkv.codebook import SinkRule

#: Where the op finds the flags in a step's context, and what stages of a pipeline call them.
_NAME = "antkv_sinks"


class SinkFlags:
    """Which of the step's tokens are sinks.

    flags: (max_num_tokens,) bool.
    """

    def __init__(self, rule: SinkRule, max_num_tokens: int, device: torch.device) -> None:
        self._channels = torch.tensor(rule.channels, device=device)
        self._threshold = rule.threshold
        self.flags = torch.zeros(max_num_tokens, dtype=torch.bool, device=device)
        self._of_step, self._num_tokens = self.flags, max_num_tokens

    def update(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Set the flags from hidden states (num_tokens, hidden_size), what is added to them included.

        Layers of Gemma-3n hand on several streams, one behind the other, of which attention reads the first.
        """
        # A few channels of thousands: the sum of all would be the largest tensor of a step.
        values = hidden[: len(self.flags), self._channels]
        if residual is not None:
            values = values.float() + residual[: len(self.flags), self._channels].float()
        extreme = values.abs() > self._threshold
        self.flags[: len(extreme)] = extreme.any(dim=1)

    def of_step(self, num_tokens: int) -> torch.Tensor:
        """Flags of the step's tokens, a view: the layers of a step ask for the same one."""
        if self._num_tokens != num_tokens:
            self._of_step, self._num_tokens = self.flags[:num_tokens], num_tokens
        return self._of_step


def watch(layer: nn.Module, adds_residual: bool, flags: SinkFlags, context: dict[str, Any]) -> None:
    """Fill the flags whenever this decoder layer has run.

    Args:
        adds_residual: whether the hidden state is the sum of the two tensors that decoder layers hand on, or the first.
        context: of the worker's steps (`static_forward_context`): the custom op can only be handed tensors and names.
    """
    context[_NAME] = flags
    if not hasattr(torch.ops.vllm, "antkv_mark_sinks"):
        direct_register_custom_op(
            op_name="antkv_mark_sinks", op_func=_mark_sinks, mutates_args=["hidden"], fake_impl=_mark_sinks_fake
        )

    def after(layer: nn.Module, args: Any, output: Any) -> None:
        hidden, residual = (*output, None)[:2] if isinstance(output, tuple) else (output, None)
        torch.ops.vllm.antkv_mark_sinks(hidden, residual if adds_residual else None)

    layer.register_forward_hook(after)


def hand_on(model: Any, flags: SinkFlags, is_first: bool, is_last: bool) -> None:
    """Take the flags from the stage of a pipeline before this one, and give them to the next one."""
    make_empty = model.make_empty_intermediate_tensors

    def make_empty_with_flags(batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        made = make_empty(batch_size, dtype, device)
        made.tensors[_NAME] = torch.zeros(batch_size, dtype=dtype, device=device)
        return made

    def before(model: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tensors = dict(options["intermediate_tensors"].items())
        known = tensors.pop(_NAME)
        flags.flags[: len(known)] = known > 0
        return args, options | {"intermediate_tensors": IntermediateTensors(tensors)}

    def after(model: nn.Module, args: Any, output: IntermediateTensors) -> None:
        hidden = next(iter(output.tensors.values()))
        output.tensors[_NAME] = flags.of_step(len(hidden)).to(hidden.dtype)

    model.make_empty_intermediate_tensors = make_empty_with_flags
    if not is_first:
        model.register_forward_pre_hook(before, with_kwargs=True)
    if not is_last:
        model.register_forward_hook(after)


def _mark_sinks(hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
    flags: SinkFlags = get_forward_context().no_compile_layers[_NAME]
    # Layers of transformers have one more dimension, of a batch of one.
    flags.update(hidden.flatten(0, -2), None if residual is None else residual.flatten(0, -2))


def _mark_sinks_fake(hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
    return
