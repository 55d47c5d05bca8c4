"""Real vLLM engines inside the test process, and models to serve.

vLLM's in-process mode starts an engine in seconds. One engine is alive at a time; tests that share settings share it.
"""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.codebooks import interleaved_and_scaled
from tests.patience import PATIENCE
from tests.places import EMBEDDED, PRESET, TEXT
from vllm_antkv.doctor.verify import Completion, complete

_FEW_COLLECTIONS = str(Path(__file__).with_name("few_collections"))
ENGINE_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, (_FEW_COLLECTIONS, os.environ.get("PYTHONPATH")))),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
}

#: Enough for every request of these tests, and soon filled with zeros.
KV_CACHE_BYTES = 64 << 20

#: The real one: `made_quickly` puts another in its place. Engines hold each other in circles.
_collect_garbage = gc.collect
#: Engines so far, and how many of them may wait to be collected.
_started, _KEPT_ENGINES = count(1), 8

#: Starts an engine, as `running_engine` does.
Start = Callable[..., Any]


class Engine:
    def __init__(self, llm: Any) -> None:
        self.llm = llm

    @property
    def core(self) -> Any:
        """vLLM's EngineCore, for looking at its scheduler."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def block_pool(self) -> Any:
        """The pool that all pages come from."""
        return self.core.scheduler.kv_cache_manager.block_pool

    def assert_all_blocks_free(self) -> None:
        """Every block but the null block is free."""
        assert self.block_pool.get_num_free_blocks() == self.block_pool.num_gpu_blocks - 1

    def start_anew(self, max_num_batched_tokens: int) -> None:
        """As if just started: nothing is cached, and steps take no more tokens than this."""
        self.core.scheduler.max_num_scheduled_tokens = max_num_batched_tokens
        assert self.llm.reset_prefix_cache()

    def count(self, name: str) -> int:
        """A counter of vLLM's."""
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == f"vllm:{name}")

    @property
    def layers(self) -> dict[str, Any]:
        """Layers and companions of the model, by name."""
        runner = self.core.model_executor.driver_worker.worker.model_runner
        return dict(runner.vllm_config.compilation_config.static_forward_context)

    def fill_with_nan(self) -> None:
        """All pages: whoever reads what is no longer there, or not yet, reads NaN."""
        for layer in self.layers.values():
            pages = getattr(layer, "kv_cache", ())
            # Layers with states have several.
            for each in pages if isinstance(pages, tuple) else (pages,):
                each.fill_(torch.nan if each.is_floating_point() else 0xFF)

    def add(self, name: str, prompt: list[int], max_tokens: int = 8) -> None:
        """Give it a request without waiting for the answer, which is greedy and of just so many tokens."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> list[Any]:
        outputs: list[Any] = self.llm.llm_engine.step()
        return outputs

    def steps(self) -> Iterator[list[Any]]:
        """What each step gives, until no request is left."""
        while self.llm.llm_engine.has_unfinished_requests():
            yield self.step()

    def complete(
        self, prompts: list[list[int]], max_tokens: int = 8, together: bool = True, loras: Any = None
    ) -> list[Completion]:
        """Greedy completions, each with its adapter, in one batch or one after the other; their pages are saved."""
        answers = complete(self.llm, prompts, max_tokens, together, loras)
        if self.core.scheduler.connector is not None:
            self.llm.collective_rpc(flush)
        return answers

    def complete_anew(self, prompt: list[int], max_tokens: int = 8) -> Completion:
        """A greedy completion of which the pool knows nothing."""
        assert self.llm.reset_prefix_cache()
        (answer,) = self.complete([prompt], max_tokens)
        return answer


def transfer(folder: Path | str, role: str = "kv_both", **more: Any) -> dict[str, Any]:
    """The value of --kv-transfer-config for a folder that keeps pages; `more` of its own settings."""
    extra = {"folder": str(folder), **more}
    return {"kv_connector": "AntKVStore", "kv_role": role, "kv_connector_extra_config": extra}


def flush(worker: Any) -> None:
    """Wait until what this worker's KV connectors save is saved."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from vllm_antkv.vllm_adapter.kv_transfer.store import AntKVStore

    connector = get_kv_transfer_group()
    for each in getattr(connector, "sub_connectors", [connector]):
        if isinstance(each, AntKVStore):
            assert each.flush(PATIENCE)


def assert_same(mine: Completion, theirs: Completion, tolerance: float = 1e-3) -> None:
    """The same tokens, and log-probabilities that differ by `tolerance` at most."""
    assert mine.tokens == theirs.tokens
    assert mine.difference(theirs) <= tolerance


def assert_all_same(left: list[Completion], right: list[Completion]) -> None:
    """Request by request."""
    for mine, theirs in zip(left, right, strict=True):
        assert_same(mine, theirs)


def assert_scheduling_is_not_seen(engine: Engine, prompts: list[list[int]], chunks: Sequence[int]) -> None:
    """The same alone, in a batch, behind prefixes that were found, and in chunks, on pages full of NaN.

    The engine takes 1024 tokens in a step and keeps prefixes of multiples of 256.
    """
    alone = engine.complete(prompts, together=False)
    assert all(completion.num_cached_tokens == 0 for completion in alone)
    batched = engine.complete(prompts)
    assert any(completion.num_cached_tokens >= 512 for completion in batched)
    assert_all_same(alone, batched)
    shared = [[*prompt[:300], *prompt[:200]] for prompt in prompts if len(prompt) > 300]
    hits = engine.complete(shared)
    assert all(completion.num_cached_tokens == 256 for completion in hits)
    engine.assert_all_blocks_free()
    for chunk in chunks:
        engine.start_anew(chunk)
        engine.fill_with_nan()
        computed = engine.complete(shared)
        assert all(completion.num_cached_tokens == 0 for completion in computed)
        assert_all_same(computed, hits)
        assert_all_same(engine.complete(prompts), alone)


def assert_preemption_is_not_seen(
    engine: Engine, short: list[list[int]], times: int, max_tokens: int, anew: bool = False
) -> None:
    """Requests fit when they are short, and preempt each other as they grow; anew: from an empty pool."""
    before = engine.count("num_preemptions")
    alone = engine.complete(short, max_tokens, together=False)
    assert engine.count("num_preemptions") == before
    assert not anew or engine.llm.reset_prefix_cache()
    assert_all_same(engine.complete(times * short, max_tokens), times * alone)
    assert engine.count("num_preemptions") > before
    engine.assert_all_blocks_free()


def assert_aborts_leave_every_block_free(engine: Engine, prompts: list[list[int]]) -> None:
    """Every second request is aborted: while it waits, in the midst of its prompt or of its answer."""
    for num_steps in (1, 2, 3, 12):
        assert engine.llm.reset_prefix_cache()
        for number, prompt in enumerate(prompts):
            engine.add(f"{num_steps}-{number}", prompt, max_tokens=20)
        for _ in range(num_steps):
            engine.step()
        engine.llm.llm_engine.abort_request([f"{num_steps}-{number}" for number in range(0, len(prompts), 2)])
        list(engine.steps())
        engine.assert_all_blocks_free()


@contextmanager
def running_engine(
    model: Path, kv_cache_dtype: str, settings: dict[str, Any] | None = None, **options: Any
) -> Iterator[Engine]:
    """A real engine with `--kv-cache-dtype kv_cache_dtype`; float32 and eager unless `options` say otherwise.

    settings: ours. Where they do not say how prompts attend, what comes out does not depend on steps, of which those
        that it is compared with know nothing.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
    }
    options = {**defaults, **options}
    is_ours = kv_cache_dtype.startswith("antkv-")
    additional = {"antkv": {"prefill_reads_cache": True} | (settings or {})} if is_ours or settings else {}
    if next(_started) % _KEPT_ENGINES == 0 or not options["enforce_eager"]:
        # Weights of an earlier engine that are thrown away while this one is traced fail in the midst of it; and each
        # takes a hundred megabytes for as long as it waits.
        _collect_garbage()
    with made_quickly(eager=options["enforce_eager"]):
        llm = LLM(str(model), kv_cache_dtype=kv_cache_dtype, additional_config=additional, **options)
        try:
            yield Engine(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()


@contextmanager
def made_quickly(eager: bool) -> Iterator[None]:
    """Engines that are started while this is open do not repeat what one has done for all that follow in a process."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.triton_utils.dispatcher import _registry

    # Of an eager engine vLLM still compiles a line of its sampler, in every process anew.
    stance = torch.compiler.set_stance("force_eager" if eager else "default")
    with stance, pytest.MonkeyPatch.context() as patch:
        # VLLM collects garbage four times for each engine, a third of all time that these tests would take.
        patch.setattr(gc, "collect", lambda generation=2: 0)
        if _registry:
            # An earlier engine has done it. VLLM looks through all modules for it, which fails once numba is imported.
            patch.setattr(CpuPlatform, "register_triton_kernel_overrides", staticmethod(lambda: None))
        yield


@pytest.fixture(scope="session", autouse=True)
def engine_environment() -> Iterator[None]:
    """vLLM reads these when it is first imported."""
    threads = torch.get_num_threads()
    # The models are tiny: on a busy machine, threads would mostly wait for each other.
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENGINE_ENVIRONMENT.items():
            patch.setenv(name, value)
        from vllm.model_executor.models import registry

        # VLLM looks at a class that its cache does not know in a process of its own, and imports it in this one then.
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def start_engine(engine_environment) -> Start:
    """`running_engine`, once the environment is set."""
    return running_engine


@pytest.fixture
def users_cache(engine_environment, tmp_path, monkeypatch) -> Path:
    """Where codebooks are kept that were learned at a start: an empty folder. What vLLM keeps of its own stays."""
    from vllm import envs

    monkeypatch.setenv("VLLM_CACHE_ROOT", envs.VLLM_CACHE_ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vllm-antkv"


@pytest.fixture
def quick_engines(engine_environment) -> Iterator[None]:
    """For tests whose eager engines are started by the code that they test."""
    with made_quickly(eager=True):
        yield


@pytest.fixture
def eager(quick_engines, monkeypatch) -> None:
    """Engines that evaluation starts are not compiled, which would take longer than all else that they do."""
    from vllm_antkv.evaluate import engine, tasks

    options = engine.engine_options

    def eager_options(*arguments: Any) -> dict[str, Any]:
        return {**options(*arguments), "enforce_eager": True}

    for module in (engine, tasks):
        monkeypatch.setattr(module, "engine_options", eager_options)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids of ten English prompts whose lengths surround the edges of VQ blocks."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(EMBEDDED)(TEXT.read_text(), add_special_tokens=False)["input_ids"]
    lengths = [4, 39, 127, 128, 199, 255, 256, 383, 450, 600]
    return [[0, *ids[20 * i : 20 * i + length]] for i, length in enumerate(lengths)]


@pytest.fixture(scope="session")
def shared_servers(tmp_path_factory) -> Iterator[Any]:
    """Real servers of the embedded model; see `tests.serving.embedded_server`."""
    from tests.serving.embedded_server import SharedServers

    with ExitStack() as held:
        # Threads that start servers side by side must not all create it.
        tmp_path_factory.getbasetemp()
        yield SharedServers(held, lambda: tmp_path_factory.mktemp("embedded"))


@pytest.fixture
def api_key(monkeypatch):
    """What `loadtest` sends to these servers."""
    from tests.serving.embedded_server import API_KEY

    monkeypatch.setenv("VLLM_API_KEY", API_KEY)


@pytest.fixture(scope="module")
def server(shared_servers) -> Any:
    """The one with default settings, for a file of tests that leave it as it is."""
    return shared_servers.running()


@pytest.fixture(scope="session")
def codebooks(prompts, tmp_path_factory) -> str:
    """The embedded model's 1-bit codebook with a sink rule that really finds sinks: about one token in fifty.

    Its sub-vectors are taken from interleaved channels, and K is scaled, whatever the shipped centroids are for:
    nobody judges what is written here, only whether it is always the same.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from vllm_antkv.codebook import Codebook, ModelIdentity, SinkRule, codebook_path, find_codebook

    layer, channel = 1, 7
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model(torch.tensor([prompts[-1]]), output_hidden_states=True).hidden_states[layer + 1]
    threshold = float(hidden[0, :, channel].abs().quantile(0.98))
    identity = ModelIdentity.from_hf_config(AutoConfig.from_pretrained(EMBEDDED))
    codebook = Codebook.load(find_codebook(str(EMBEDDED), identity, PRESET))
    rule = SinkRule(layer=layer, channels=(channel,), threshold=threshold)
    folder = tmp_path_factory.mktemp("codebooks")
    header = codebook.header.model_copy(update={"sinks": rule})
    interleaved_and_scaled(Codebook(header, codebook.k, codebook.v)).save(codebook_path(folder, PRESET))
    return str(folder)


@pytest.fixture(scope="session")
def default(codebooks) -> dict[str, Any]:
    """Settings with which the same answer comes however a prompt is cut; with sinks to be found."""
    return {"codebooks": codebooks, "prefill_reads_cache": True}


@pytest.fixture(scope="module")
def auto(start_engine, prompts) -> list[Completion]:
    """What vLLM answers without us."""
    with start_engine(EMBEDDED, "auto") as engine:
        return engine.complete(prompts)


@pytest.fixture(scope="module")
def alone(start_engine, default, prompts) -> list[Completion]:
    """Default settings, one request at a time, whole prompts, nothing shared."""
    with start_engine(EMBEDDED, PRESET, default, enable_prefix_caching=False) as engine:
        return engine.complete(prompts, together=False)
