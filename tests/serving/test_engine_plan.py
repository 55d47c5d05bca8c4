"""One plan of an engine, made when it is configured and read by whatever runs in it."""

from typing import Any

from tests.serving.conftest import EMBEDDED
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
