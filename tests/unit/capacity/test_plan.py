"""`antkv plan`: what it recommends follows from what fits."""

import json

import pytest
from transformers import AutoConfig, BloomConfig, Gemma2Config, LlamaConfig, Qwen3NextConfig

from scripts import capacity_figure
from tests.unit.damaged import config_with
from vllm_antkv import cli
from vllm_antkv.capacity.gpus import GPUS
from vllm_antkv.capacity.plan import make_plan
from vllm_antkv.config import AntKVConfig

LLAMA_3_8B = LlamaConfig(**capacity_figure.LLAMA_3_8B)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    """A folder with a config and nothing else."""
    folder = tmp_path_factory.mktemp("llama")
    LLAMA_3_8B.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def qwen3_next(tmp_path_factory) -> str:
    """Six layers with a state, two that attend."""
    folder = tmp_path_factory.mktemp("qwen3-next")
    sizes = {"hidden_size": 1024, "num_hidden_layers": 8, "num_experts": 4}
    Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"], **sizes).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("gpu", "context", "batch", "recommended", "words"),
    [
        ("h100-80", 4096, 8, "auto", "all requests fit in 16 bits"),
        ("h100-80", 4096, 128, "fp8", "auto holds 103 requests, fp8 all 128"),
        ("h100-80", 32768, 64, "antkv-2bit", "the most bits that hold all 64 requests, of which fp8 holds 25"),
        ("h100-80", 131072, 200, "antkv-1bit", "none holds all 200"),
        ("h100-80", 512, 10000, "fp8", "none holds all 10000 requests at once, and no preset gets much more done"),
    ],
)
def test_what_is_recommended(llama, gpu, context, batch, recommended, words):
    plan = make_plan(llama, gpu, context, batch, AntKVConfig())
    assert plan.recommended == recommended
    assert plan.reason.startswith(f"Use {recommended}: ")
    assert words in plan.reason


def test_states_take_their_share_of_every_cache(qwen3_next):
    """So that codes gain more in longer requests."""
    gains = []
    for context in (8192, 131072):
        plan = make_plan(qwen3_next, "h100-80", context, 64, AntKVConfig())
        tokens = {cache.kv_cache_dtype: cache.tokens for cache in plan.caches}
        gains.append(tokens["antkv-1bit"] / tokens["auto"])
    # Six layers, before and behind a step: inputs of a convolution, and 32 heads of 128 x 128.
    assert plan.state_bytes == 6 * 2 * 2 * (3 * (2 * 16 + 32) * 128 + 32 * 128 * 128)
    assert 1 < 2 * gains[0] < gains[1] < 14


def test_where_states_are_most_of_a_request_fp8_is_recommended(qwen3_next):
    """Presets hold 1.3 times as much as auto there, and 1.7 times where requests are twice as long."""
    short, long = (make_plan(qwen3_next, "h100-80", *work, AntKVConfig()) for work in ((2048, 4200), (4096, 3900)))
    assert short.caches[3].requests > 4200
    assert (short.recommended, long.recommended) == ("fp8", "antkv-2bit")
    assert "States, which no cache makes smaller" in short.reason


def test_the_figures_of_a_cache_belong_together(llama):
    plan = make_plan(llama, "h100-80", 32768, 64, AntKVConfig())
    for cache in plan.caches:
        assert cache.requests == cache.tokens // 32768
        assert cache.step.batch == min(64, cache.requests)
        kv_bytes = cache.step.batch * 32768 * 2 * 32 * 8 * 128 * cache.bits / 8
        assert cache.step.read_bytes == pytest.approx(2 * 7_504_658_432 + kv_bytes)
        assert cache.step.tokens_per_second == pytest.approx(cache.step.batch / cache.step.seconds)
    assert plan.weight_bytes == 2 * 8_030_261_248


def test_two_gpus_hold_more_than_twice_as_much_as_one_and_read_half_each(llama):
    one, two = (make_plan(llama, "l40s-48", 8192, 64, AntKVConfig(), size) for size in (1, 2))
    assert two.weight_bytes == one.weight_bytes / 2
    for alone, together in zip(one.caches, two.caches, strict=True):
        assert together.bits == alone.bits
        assert together.codebook_bytes == alone.codebook_bytes / 2
        # Weights and codebooks are there once, what is left of two GPUs is for the cache.
        assert together.requests > 2 * alone.requests
        per_request = [
            (step.read_bytes - 2 * 7_504_658_432 / n) / step.batch for step, n in ((alone.step, 1), (together.step, 2))
        ]
        assert per_request[1] == pytest.approx(per_request[0] / 2)


def test_windows_bound_what_is_held_and_read(tmp_path, capsys):
    """Half of the layers hold a window; then all do."""
    kinds = ["sliding_attention", "full_attention"] * 13
    sizes = {"num_hidden_layers": 26, "layer_types": kinds, "sliding_window": 1024}
    Gemma2Config(architectures=["Gemma2ForCausalLM"], **sizes).save_pretrained(tmp_path)
    plan = make_plan(str(tmp_path), "h100-80", 32768, 64, AntKVConfig())
    assert plan.seen == (32768 + 1024) / 2
    auto, *_, one_bit = plan.caches[:5]
    assert auto.bits == 16
    assert 1 < one_bit.bits < 1.5
    heads, head_size = 26 * 4, 256
    weights = make_plan(str(tmp_path), "h100-80", 1, 1, AntKVConfig()).caches[0].step
    read = auto.step.read_bytes - (weights.read_bytes - 4 * heads * head_size)
    assert read == pytest.approx(auto.step.batch * plan.seen * 4 * heads * head_size)
    assert cli.run(["plan", str(tmp_path), "--gpu", "h100-80", "--context", "32768"]) == 0
    assert "16,896 of 32,768 tokens" in " ".join(capsys.readouterr().out.split())
    # Windows are Triton's, and so are heads of 256 channels.
    assert {cache.kernels for cache in plan.caches} == {None, "triton"}


def test_the_kernels_that_would_run_are_named_and_timed(llama, capsys):
    """By the rule of servers: tables of heads of 128 channels do not fit where a CTA has 99 KiB."""

    def named(gpu: str) -> dict[str, str | None]:
        return {cache.kv_cache_dtype: cache.kernels for cache in make_plan(llama, gpu, 8192, 4, AntKVConfig()).caches}

    assert set(named("h100-80").values()) == set(named("b200-180").values()) == {None, "cuda"}
    assert named("a100-80") == {**named("h100-80"), "antkv-4bit": "triton"}
    for gpu in ("l40s-48", "rtx4090-24", "rtx5090-32", "rtxpro6000-96"):
        assert {name for name in named(gpu).values() if name} == {"triton"}
    assert cli.run(["plan", llama, "--gpu", "l40s-48"]) == 0
    assert "triton" in capsys.readouterr().out
    # Slower kernels take more of a step.
    steps = [cache.step for cache in make_plan(llama, "a100-80", 32768, 4, AntKVConfig()).caches]
    assert steps[2].seconds > 1.5 * steps[3].seconds


def test_with_more_gpus_than_kv_heads_several_hold_the_same(llama):
    eight, sixteen = (make_plan(llama, "l4-24", 8192, 64, AntKVConfig(), size) for size in (8, 16))
    assert [cache.codebook_bytes for cache in sixteen.caches] == [cache.codebook_bytes for cache in eight.caches]
    assert sixteen.weight_bytes == eight.weight_bytes / 2


def test_anchors_as_they_are_take_more_and_leave_less(llama):
    command = ["plan", llama, "--gpu", "h100-80", "--json", "-"]
    fp8, model = (
        make_plan(llama, "h100-80", 8192, 64, AntKVConfig(anchor_dtype=dtype)).caches for dtype in ("fp8", "model")
    )
    for small, large in zip(fp8, model, strict=True):
        assert (large.bits > small.bits) == (large.tokens < small.tokens) == small.kv_cache_dtype.startswith("antkv")
    assert cli.run([*command, "--anchor-dtype", "model"]) == 0


def test_that_fp8_is_faster_is_said_where_it_is_much(llama):
    long, short = (make_plan(llama, "h100-80", context, 4, AntKVConfig()) for context in (65536, 256))
    assert long.recommended == short.recommended == "auto"
    assert "A step of fp8 reads less and takes up to " in long.reason
    assert "fp8" not in short.reason


def test_a_model_that_does_not_fit_is_told_so(tmp_path, capsys):
    LlamaConfig(**{**LLAMA_3_8B.to_dict(), "num_hidden_layers": 80}).save_pretrained(tmp_path)
    assert cli.run(["plan", str(tmp_path), "--gpu", "l4-24"]) == 0
    assert "Not one request fits beside the weights" in capsys.readouterr().out
    assert make_plan(str(tmp_path), "l4-24", 8192, 1, AntKVConfig()).recommended is None


def test_json_is_written_or_takes_the_place_of_the_table(llama, tmp_path, capsys):
    expected = json.loads(make_plan(llama, "h100-80", 8192, 64, AntKVConfig(prefix=0)).model_dump_json())
    command = ["plan", llama, "--gpu", "h100-80", "--prefix", "0", "--json"]
    assert cli.run([*command, "-"]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert cli.run([*command, str(tmp_path / "plan.json")]) == 0
    assert json.loads((tmp_path / "plan.json").read_text()) == expected
    assert "tokens/s" in capsys.readouterr().out


def test_what_cannot_be_planned_is_refused(llama, tmp_path, capsys):
    bloom, kimi, quantised = (tmp_path / name for name in ("bloom", "kimi", "quantised"))
    BloomConfig(architectures=["BloomForCausalLM"]).save_pretrained(bloom)
    AutoConfig.for_model("kimi_linear", architectures=["KimiLinearForCausalLM"]).save_pretrained(kimi)
    LLAMA_3_8B.save_pretrained(quantised)
    config_with(quantization_config={"quant_method": "awq"})(quantised)
    for model, gpu, code, words in [
        (llama, "h100", 2, f"but must be one of {', '.join(GPUS)}."),
        (tmp_path / "none", "h100-80", 2, "there is no such folder"),
        (bloom, "h100-80", 1, "BloomForCausalLM has no antkv cache (it does not support ALiBi)"),
        (kimi, "h100-80", 1, "(it does not support multi-head latent attention (MLA))"),
        (quantised, "h100-80", 1, "plan for the original"),
        (llama, "h100-80 --tensor-parallel-size 3", 2, "32 attention heads and 8 KV heads cannot be cut so"),
    ]:
        assert cli.run(["plan", str(model), "--gpu", *gpu.split()]) == code
        assert words in capsys.readouterr().err
