"""`BASE+kvsink-N`: N attention sinks stay exact, wherever they are (KVSink, algorithm 1).

Sinks are predicted after decoder layer l_E by the magnitude of the hidden state in the outlier channels, and are exact
in all later layers. The paper takes the N largest of a prompt; here every query has the N largest of the tokens so far,
and a token that is outdone is quantised from then on, so that no position depends on a later one.

Where sinks show (l_E, channels) comes from a codebook's sink rule; without one, from the calibration text.
"""

from dataclasses import replace

from research.literature.method import LiteratureMethod
from research.literature.request import LiteratureRequest
from vllm_antkv.codebook import Codebook, SinkRule, find_codebook
from vllm_antkv.errors import CodebookError, SettingsError
from vllm_antkv.offline.method import Method
from vllm_antkv.presets import PRESETS

NAME = "kvsink"


def apply(base: Method, number: int, request: LiteratureRequest) -> Method:
    """`base` with its `number` strongest sinks exact."""
    assert isinstance(base, LiteratureMethod)
    return replace(base, name=f"{base.name}+{NAME}-{number}", sinks=_rule(request), num_sinks=number)


def _rule(request: LiteratureRequest) -> SinkRule:
    folder = None if request.codebooks is None else str(request.codebooks)
    for preset in PRESETS:
        try:
            path = find_codebook(request.model_name, request.identity, preset, folder)
        except CodebookError:
            continue
        rule = Codebook.load(path, preset, request.identity).header.sinks
        if rule is not None:
            return rule
    if request.sample is None:
        raise SettingsError(
            f"{NAME} needs to know where sinks show, and no codebook of {request.model_name} says so: give "
            "--calibration FILE."
        )
    # The strongest are taken, however strong: this threshold is not looked at.
    return SinkRule(layer=request.sample.sink_layer, channels=request.sample.sink_channels, threshold=1.0)
