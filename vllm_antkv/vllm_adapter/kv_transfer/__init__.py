"""Pages beyond one server, through vLLM's KV connectors: in a folder, or straight to a server that answers (NIXL)."""

from typing import Any

from vllm.config import KVTransferConfig

STORE, NIXL = "AntKVStore", "NixlConnector"
#: Connectors for `--kv-transfer-config` that know all classes of pages, and the modules with classes of these names.
MODULES = {STORE: f"{__name__}.store", NIXL: f"{__name__}.nixl"}
EXTRA_KEY = "kv_connector_extra_config"


def names(transfer: KVTransferConfig | None) -> set[str]:
    """Of all connectors."""
    return {str(connector.get("kv_connector")) for connector in connectors(transfer)}


def connectors(transfer: KVTransferConfig | None) -> list[dict[str, Any]]:
    """The configuration of each connector, as `--kv-transfer-config` has it: of those in a `MultiConnector`, too."""
    if transfer is None:
        return []
    extra = transfer.kv_connector_extra_config
    inner: list[dict[str, Any]] = extra.get("connectors", []) if transfer.kv_connector == "MultiConnector" else []
    return inner or [{"kv_connector": transfer.kv_connector, EXTRA_KEY: extra}]
