"""Which models vLLM has to run for a calibration, in the place of transformers' code."""

from dataclasses import dataclass

from transformers import PretrainedConfig

from vllm_antkv.errors import CalibrationError, UnsupportedModelError
from vllm_antkv.features import unserved_feature
from vllm_antkv.offline.pretrained import hands_over_rows, is_quantised


@dataclass(frozen=True)
class WhyVllm:
    """Why transformers' code is no use.

    because: as a sentence goes on after "as".
    instead: what else can be done; empty: nothing.
    """

    because: str
    instead: str = ""


QUANTISED = WhyVllm(
    "no gradient flows through quantised weights", "calibrate the unquantised model, whose codebooks fit both"
)
HIDDEN = WhyVllm("transformers' code of this model does not hand them over")


def why_vllm(config: PretrainedConfig) -> WhyVllm | None:
    """Why vLLM has to run the model of a config; None: transformers does.

    Raises:
        CalibrationError: the config describes no model.
        UnsupportedModelError: only vLLM could, and the codebook would serve nobody.
    """
    if is_quantised(config):
        return QUANTISED
    if hands_over_rows(config, CalibrationError):
        return None
    if feature := unserved_feature(config.get_text_config()):
        raise UnsupportedModelError(
            f"There is no antkv cache for a model with {feature}, and transformers' code of it does not hand over K "
            "and V: serve it with --kv-cache-dtype auto."
        )
    return HIDDEN
