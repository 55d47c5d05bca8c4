"""`cq-Xbit`: coupled quantisation, the baseline of AnTKV. Plain k-means centroids and no token in full precision.

The same vector quantiser as `antkv-Xbit`, with centroids calibrated with `--weights none --channels consecutive`; no
anchors, no sinks, no prefix. Recency is the one setting it shares, so that methods are compared at the same recency.
"""

from vllm_antkv.codebook import Codebook, codebook_path, find_codebook
from vllm_antkv.errors import CodebookError
from vllm_antkv.evaluate.methods.request import MethodRequest
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.vector_quantiser import VectorQuantiser
from vllm_antkv.presets import PRESETS, get_preset

#: Folder of the plain centroids inside a folder of codebooks.
PLAIN_FOLDER = "cq"

NAMES = tuple(preset.replace("antkv-", "cq-") for preset in PRESETS)


def build(name: str, request: MethodRequest) -> Method:
    """Load plain centroids from `DIR/cq`, or from `DIR` itself when those were calibrated with `--weights none`."""
    preset = get_preset(name.replace("cq-", "antkv-"))
    codebook = _plain_codebook(name, preset.name, request)
    config = request.config.model_copy(update={"anchor_share": 0.0, "sinks": False, "prefix": 0})
    return Method(
        name=name,
        nominal_bits=preset.nominal_bits,
        config=config,
        quantiser=VectorQuantiser(codebook),
        layers=codebook.header.layer_presets,
        provenance={"codebook": codebook.identity, "weights": "none"},
    )


def _plain_codebook(name: str, preset: str, request: MethodRequest) -> Codebook:
    folder = request.codebooks or find_codebook(request.model_name, request.identity, preset).parent
    for candidate in (codebook_path(folder / PLAIN_FOLDER, preset), codebook_path(folder, preset)):
        if candidate.is_file():
            codebook = Codebook.load(candidate, preset, request.identity)
            header = codebook.header
            if header.calibration.get("weights") == "none" and not header.k_orders and header.layers is None:
                return codebook
    raise CodebookError(
        f"{name} needs {preset} centroids of neighbouring channels learned without weights, and neither "
        f"{folder / PLAIN_FOLDER} nor {folder} has them: make them with `antkv calibrate {request.model_name} --preset "
        f"{preset} --weights none --channels consecutive --text FILE --out {folder / PLAIN_FOLDER}`."
    )
