"""The test engine of tests/kernels with its operations on a GPU."""

from collections.abc import Callable
from dataclasses import fields, replace

import torch

from tests.kernels.varlen_reference import planned
from vllm_antkv.ops.counters import Counters
from vllm_antkv.ops.layer import LayerOperations, LayerState
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan

DEVICE = torch.device("cuda", 0)


class OnDevice:
    """Runs operations on the test engine's pages, which are in host memory: there and back for every call.

    layer, operations: what was moved to the device.
    """

    def __init__(self, layer: LayerState, build: Callable[[LayerState], LayerOperations]) -> None:
        self._host = torch.empty(0, dtype=torch.uint8).set_(layer.vq.k_codes.untyped_storage())
        self._pages = self._host.to(DEVICE)
        self._positions = layer.positions
        self.layer = replace(
            layer,
            vq=self._moved(layer.vq),
            recency=self._moved(layer.recency),
            k_centroids=layer.k_centroids.to(DEVICE),
            v_centroids=layer.v_centroids.to(DEVICE),
            k_order=None if layer.k_order is None else layer.k_order.to(DEVICE),
            rotary=None if layer.rotary is None else layer.rotary.to(DEVICE),
            jensen_weights=layer.jensen_weights.to(DEVICE),
            rules=replace(layer.rules, sinks=_to_device(layer.rules.sinks)),
            last_query=layer.last_query.to(DEVICE),
            positions=None if layer.positions is None else layer.positions.to(DEVICE),
            counters=Counters(DEVICE, "on a device", layer.max_num_reqs),
            scratch=_scratch,
        )
        self._missing_rows = layer.counters.missing_rows
        self.operations = build(self.layer)

    def _moved(self, pages):
        views = {}
        for name, view in vars(pages).items():
            raw = self._pages.view(view.dtype)
            views[name] = raw.as_strided(view.shape, view.stride(), view.storage_offset())
        return type(pages)(**views)

    def upload(self):
        """Copy the engine's pages to the device."""
        self._pages.copy_(self._host)
        if self._positions is not None:
            self.layer.positions.copy_(self._positions)

    def run(self, rows, output, step):
        self.upload()
        self.layer.counters.missing_rows.zero_()
        moved = torch.empty_like(output, device=DEVICE)
        self.operations.run(
            StepRows(*map(_to_device, (rows.query, rows.key, rows.value, rows.is_sink))),
            moved,
            planned(_to_device(step), self.layer),
        )
        self._host.copy_(self._pages)
        output.copy_(moved)
        self._missing_rows.copy_(self.layer.counters.missing_rows)


def _scratch(*shapes_and_dtypes):
    return [
        torch.full(shape, torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max, dtype=dtype, device=DEVICE)
        for shape, dtype in shapes_and_dtypes
    ]


def _to_device(argument):
    if isinstance(argument, StepPlan):
        # What is in the host's memory stays there.
        names = [field.name for field in fields(StepPlan) if field.init]
        values = {name: getattr(argument, name) for name in names}
        return StepPlan(**{n: value if n.endswith("_cpu") else _to_device(value) for n, value in values.items()})
    return argument.to(DEVICE) if isinstance(argument, torch.Tensor) else argument
