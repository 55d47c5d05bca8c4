"""`antkv-Xbit`: what is served with `--kv-cache-dtype antkv-Xbit` under the same settings."""

from vllm_antkv.evaluate.methods.request import MethodRequest
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.vector_quantiser import VectorQuantiser
from vllm_antkv.presets import PRESETS, nominal_bits

NAMES = tuple(PRESETS)


def build(name: str, request: MethodRequest) -> Method:
    """Load the codebook that the server would load, with its sink rule."""
    codebook = request.codebook(name)
    return Method(
        name=name,
        nominal_bits=nominal_bits(codebook.header.layer_presets),
        config=request.config,
        quantiser=VectorQuantiser(codebook),
        layers=codebook.header.layer_presets,
        sinks=codebook.header.sinks if request.config.sinks else None,
        key_errors=codebook.k_errors,
        k_scale=codebook.k_scale,
        provenance={
            "codebook": codebook.identity,
            "weights": codebook.header.calibration.get("weights"),
            "layers": codebook.header.layers,
        },
    )
