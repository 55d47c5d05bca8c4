"""What `vllm_antkv.server` stands on."""

from scripts.vllm_contract.reliance import How, Reliance

_PLUGIN = "vllm.plugins.endpoint_plugins.interface:EndpointPlugin"
_AUTH = "vllm.entrypoints.serve.middleware.authenticate"

ENTRIES = (
    Reliance(_PLUGIN, How.SUBCLASS, "", "routes: a Protocol that ours has the methods of"),
    Reliance(f"{_PLUGIN}.attach_router", How.WRAP, "self, app", "routes: gets the application"),
    Reliance(f"{_PLUGIN}.init_state", How.WRAP, "self, engine_client, state, args", "routes: gets the engine"),
    Reliance(
        "vllm.plugins.endpoint_plugins.interface:attach_endpoint_plugins",
        How.CALL,
        "app, supported_tasks",
        "tests: as vLLM's server attaches them",
    ),
    Reliance(f"{_AUTH}:AuthenticationMiddleware.__init__", How.CALL, "app, tokens", "routes: made for its check alone"),
    Reliance(f"{_AUTH}:AuthenticationMiddleware.verify_token", How.CALL, "headers", "routes: whether a key is right"),
    Reliance(f"{_AUTH}:AuthenticationMiddleware", How.FIELDS, "verify_token", "routes: as above"),
    Reliance(f"{_AUTH}:GUARDED_PREFIX", How.NAME, "", "routes: `/antkv/` is not guarded by vLLM itself"),
    Reliance("vllm:envs", How.FIELDS, "VLLM_API_KEY", "routes: a key may come from the environment"),
    Reliance("vllm.envs:VLLM_API_KEY", How.NAME, "", "routes: as above"),
    Reliance("vllm.tasks:SupportedTask", How.NAME, "", "routes: in a signature"),
    Reliance(
        "vllm.v1.engine.async_llm:AsyncLLM",
        How.FIELDS,
        "engine_core get_tokenizer vllm_config",
        "routes: the client of the engines",
    ),
    Reliance(
        "vllm.v1.engine.core_client:AsyncMPClient",
        How.FIELDS,
        "call_utility_all_async engine_ranks_managed",
        "routes: all engines of this server",
    ),
    Reliance("vllm.v1.engine.exceptions:EngineDeadError", How.NAME, "", "routes: answers 503"),
    Reliance("vllm.v1.metrics.prometheus:unregister_vllm_metrics", How.CALL, "-", "metrics: drops `vllm` collectors"),
)
