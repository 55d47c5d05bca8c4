"""Which cache to serve a model with on a GPU: what each holds and reads, and which one to take, from sizes alone."""

from pydantic import BaseModel, Field

from vllm_antkv.capacity.gpus import GPUS
from vllm_antkv.capacity.memory import DecodeShape, codebooks_of, largest_batch, pool_bytes, sequence_bytes
from vllm_antkv.capacity.step_bound import kernels, step_bound
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import SettingsError, UnsupportedModelError
from vllm_antkv.features import unserved_feature
from vllm_antkv.offline.pretrained import read_config
from vllm_antkv.presets import PRESETS

#: A preset is recommended only if it holds so many times the tokens of auto, and, where it does not hold all requests
#: either, gets so much more done than fp8.
_WORTH_A_CODEBOOK = 1.5


class Step(BaseModel, frozen=True):
    """A decode step: what it reads, and what it takes at least."""

    batch: int = Field(description="Requests in it: those asked for, or as many as the cache holds.")
    read_bytes: float = Field(description="By one GPU: weights, and everything in the cache.")
    seconds: float = Field(description="At least; see `vllm_antkv.capacity.step_bound`.")
    tokens_per_second: float = Field(description="At most, of all its requests.")


class CachePlan(BaseModel, frozen=True):
    """What one `--kv-cache-dtype` makes of a GPU."""

    kv_cache_dtype: str
    bits: float = Field(description="Per K or V element that the next token of a sequence sees, everything counted.")
    kernels: str | None = Field(description="That decode: cuda, triton or cuda+triton; null for vLLM's own.")
    codebook_bytes: int = Field(description="Of one GPU.")
    tokens: int = Field(description="That the cache holds, in sequences of the context asked for.")
    requests: int = Field(description="Such sequences at once.")
    step: Step | None = Field(description="Null where not even one request fits.")


class Plan(BaseModel, frozen=True):
    """The JSON of `antkv plan`."""

    model: str
    gpu: str
    context: int
    batch: int
    tensor_parallel_size: int
    weight_bytes: int = Field(description="Of one GPU.")
    settings: AntKVConfig
    state_bytes: int = Field(description="Of a request, on one GPU, in layers that keep a state; in every cache.")
    seen: float = Field(description="Tokens of a sequence that its next token sees, the mean of all layers.")
    caches: list[CachePlan] = Field(description="By bits, the most first.")
    recommended: str | None = Field(description="A `kv_cache_dtype`, or null where the model does not fit.")
    reason: str


def make_plan(
    model: str, gpu: str, context: int, batch: int, settings: AntKVConfig, tensor_parallel_size: int = 1
) -> Plan:
    """Plan for `batch` requests of `context` tokens each.

    Args:
        model: folder or Hugging Face name; only its config is read.
        gpu: one of GPUS.
        context: tokens of a request, prompt and answer.
        batch: requests at once.
        settings: the antkv settings.
        tensor_parallel_size: GPUs over which the model is cut; what they tell each other takes no time here.

    Raises:
        SettingsError: no such GPU, no model that can be read, or one that cannot be cut so.
        UnsupportedModelError: a model that has no antkv cache.
    """
    if gpu not in GPUS:
        raise SettingsError(f"--gpu is '{gpu}', but must be one of {', '.join(GPUS)}.")
    config = read_config(model, SettingsError)
    identity = ModelIdentity.from_hf_config(config)
    heads, kv_heads, size = identity.num_attention_heads, identity.num_kv_heads, tensor_parallel_size
    if heads % size or max(kv_heads, size) % min(kv_heads, size):
        raise SettingsError(
            f"--tensor-parallel-size is {size}, but {heads} attention heads and {kv_heads} KV heads cannot be cut so."
        )
    if feature := unserved_feature(config.get_text_config()):
        raise UnsupportedModelError(
            f"{identity.architecture} has no antkv cache (it does not support {feature}): use auto or fp8."
        )
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"The weights of '{model}' are quantised, and a config does not say how many bytes they take: plan for the "
            "original, whose weights take more."
        )
    shape = DecodeShape.of(config).of_rank(tensor_parallel_size)
    caches = [_cache_plan(shape, gpu, cache, (context, batch), settings) for cache in shape.caches]
    recommended, reason = recommend(caches, batch)
    return Plan(
        model=model,
        gpu=gpu,
        context=context,
        batch=batch,
        tensor_parallel_size=tensor_parallel_size,
        weight_bytes=2 * shape.weights,
        settings=settings,
        state_bytes=shape.num_states * shape.state_bytes * shape.states_per_request,
        seen=shape.seen(context),
        caches=caches,
        recommended=recommended,
        reason=reason,
    )


def recommend(caches: list[CachePlan], batch: int) -> tuple[str | None, str]:
    """The cache with the most bits that holds the batch, or else the one that gets the most done, and why."""
    least = _WORTH_A_CODEBOOK * caches[0].tokens
    worth_it = [cache for cache in caches if cache.kv_cache_dtype not in PRESETS or cache.tokens >= least]
    served = {cache.kv_cache_dtype: cache.step for cache in worth_it if cache.step is not None}
    if not served:
        return None, "Not one request fits beside the weights: use a larger GPU, several, or a shorter context."
    holds = {cache.kv_cache_dtype: cache.requests for cache in worth_it}
    if max(holds.values()) < batch <= max(cache.requests for cache in caches):
        return "fp8", (
            f"Use fp8: it holds {holds['fp8']} requests, the others wait. States, which no cache makes smaller, take "
            "so much of a request that presets hold hardly more."
        )
    name = next((name for name, requests in holds.items() if requests >= batch), None)
    if name is None:
        return _where_none_holds_all({name: step.tokens_per_second for name, step in served.items()}, holds, batch)
    if name == "auto":
        saved = 1 - served["fp8"].seconds / served["auto"].seconds
        faster = f" A step of fp8 reads less and takes up to {saved:.0%} less time." if saved >= 0.1 else ""
        return name, (
            "Use auto: all requests fit in 16 bits, and a smaller cache makes nothing better that memory does not "
            f"limit.{faster}"
        )
    if name == "fp8":
        return name, f"Use fp8: auto holds {holds['auto']} requests, fp8 all {batch}, and it needs no codebook."
    return name, (
        f"Use {name}: the most bits that hold all {batch} requests, of which fp8 holds {holds['fp8']}. Fewer bits cost "
        "quality: measure it on your text with `antkv eval served --against auto`."
    )


def _where_none_holds_all(speeds: dict[str, float], holds: dict[str, int], batch: int) -> tuple[str, str]:
    # Fewer bits than one are for those who have measured what they cost.
    recommended = {
        name: speed for name, speed in speeds.items() if name not in PRESETS or PRESETS[name].nominal_bits >= 1
    } or speeds
    name = max(recommended, key=lambda name: recommended[name])
    most = "it gets the most done"
    if speeds[name] < _WORTH_A_CODEBOOK * speeds.get("fp8", 0):
        name, most = "fp8", "no preset gets much more done than it"
    return name, (
        f"Use {name}: none holds all {batch} requests at once, and {most} with the {holds[name]} that it holds; the "
        "others wait. A second GPU, or a shorter context, holds more."
    )


def _cache_plan(
    shape: DecodeShape, gpu: str, kv_cache_dtype: str, work: tuple[int, int], settings: AntKVConfig
) -> CachePlan:
    context, batch = work
    per_head = sequence_bytes(shape, kv_cache_dtype, context, settings)
    requests = largest_batch(shape, GPUS[gpu], kv_cache_dtype, context, settings)
    step = None
    if requests:
        bound = step_bound(shape, GPUS[gpu], kv_cache_dtype, context, min(batch, requests), settings)
        step = Step(
            batch=bound.batch,
            read_bytes=bound.read_bytes,
            seconds=bound.matrices + bound.attention,
            tokens_per_second=bound.tokens_per_second,
        )
    return CachePlan(
        kv_cache_dtype=kv_cache_dtype,
        bits=8 * per_head / (2 * shape.head_size * shape.seen(context)),
        kernels=kernels(shape, GPUS[gpu], kv_cache_dtype) if kv_cache_dtype in PRESETS else None,
        codebook_bytes=codebooks_of(shape, kv_cache_dtype),
        tokens=int(pool_bytes(shape, GPUS[gpu], kv_cache_dtype) * context / (shape.heads * per_head)),
        requests=requests,
        step=step,
    )
