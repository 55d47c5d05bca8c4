"""Makes `AntKVStore` a name that `--kv-transfer-config` knows."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from vllm_antkv.vllm_adapter.hooks.base import Hook, Patches, new_plugin_groups
from vllm_antkv.vllm_adapter.kv_transfer import MODULES, STORE


def _install(patches: Patches) -> None:
    KVConnectorFactory.register_connector(STORE, MODULES[STORE], STORE)
    patches.on_undo(lambda: KVConnectorFactory._registry.pop(STORE))


HOOK = Hook(
    name="connector",
    why="users would have to name the module of a connector beside its class",
    upstream="https://github.com/vllm-project/vllm/issues/42449",
    install=_install,
    superseded=lambda: bool(new_plugin_groups()),
)
