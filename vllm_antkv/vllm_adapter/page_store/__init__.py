"""Keeps pages in a folder, for later starts and for other servers: vLLM's KV connector `AntKVStore`."""

#: The connector's name in `--kv-transfer-config`.
CONNECTOR = "AntKVStore"
