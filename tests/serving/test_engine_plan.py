"""One plan of an engine, made when it is configured and read by whatever runs in it."""

from typing import Any

from vllm.engine.arg_utils import EngineArgs

from tests.serving.conftest import EMBEDDED
from tests.serving.tiny import FAMILY, make_codebook, make_model
from vllm_antkv.cache.footprint import footprint
from vllm_antkv.codebook import Codebook
from vllm_antkv.vllm_adapter.plan import engine_plan as plans
from vllm_antkv.vllm_adapter.plan.engine_plan import engine_plan
from vllm_antkv.vllm_adapter.server.routes import Config
from vllm_antkv.vllm_adapter.server.status import Setup


def test_a_start_reads_the_codebook_once_for_each_role_and_computes_layouts_once(start_engine, monkeypatch):
    layouts, loads = plans.page_layouts, Codebook.load
    calls: list[str] = []

    def counted(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: (calls.append(name), function(*args, **kwargs))[1]

    monkeypatch.setattr(plans, "page_layouts", counted("layouts", layouts))
    monkeypatch.setattr(Codebook, "load", counted("load", loads))
    with start_engine(EMBEDDED, "antkv-1bit", {"anchor_share": 0.03125}) as engine:
        engine.complete([[0, 1, 2]])
        config = engine.core.vllm_config
        assert Setup.of(config).settings == Config.of(config).settings == engine_plan(config).settings
    # The server, which refuses a bad one, and its worker, which may be on another machine.
    assert sorted(calls) == ["layouts", "load", "load"]


def test_a_configuration_carries_the_plan_alone(tmp_path):
    model = make_model(tmp_path / "gemma", *FAMILY["gemma3"])
    make_codebook(tmp_path / "books", model, "antkv-1bit")
    config = EngineArgs(
        model=str(model),
        kv_cache_dtype="antkv-1bit",
        kv_cache_dtype_skip_layers=["1"],
        additional_config={"antkv": {"codebooks": str(tmp_path / "books"), "prefix": 3}, "other": 5},
        max_model_len=512,
        skip_tokenizer_init=True,
    ).create_engine_config()
    plan = engine_plan(config)
    assert set(config.additional_config) == {"antkv", "other"}
    assert (plan.settings.prefix, plan.exact) == (3, (1,))
    assert len(plan.layers) == len(plan.windows) == len(plan.layouts)
    assert len(plan.exact_windows) == 1
    assert plan.blocks.num_exact == plan.exact_windows.count(None)
    assert plan == plans.EnginePlan.model_validate_json(plan.model_dump_json())
    assert plan.footprint == footprint(plan.layouts, plan.settings, 512, plan.windows, plan.exact_windows)
