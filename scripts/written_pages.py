"""Write docs/settings.md and the list of models of docs/compatibility.md: `make docs` does so."""

import json
from pathlib import Path

from vllm_antkv.config import AntKVConfig
from vllm_antkv.families import FAMILIES

DOCS = Path(__file__).parent.parent / "docs"
SETTINGS, FAMILY_LIST = DOCS / "settings.md", DOCS / "compatibility.md"
_BEGIN = (
    "<!-- families: from vllm_antkv/configs/families.toml by scripts/written_pages.py; `make docs` renews them -->\n\n"
)
_END = "\n<!-- end of families -->\n"
_HEAD = """# Settings

<!-- Written by scripts/written_pages.py from vllm_antkv/config.py; `make docs` renews it. -->

```console
$ vllm serve MODEL --kv-cache-dtype antkv-1bit --additional-config '{"antkv": {"recency": "sliding:128"}}'
```

`--kv-cache-dtype` chooses the preset. Other settings have defaults and go into `--additional-config`, under `antkv`.
An unknown key, or a value that cannot be used, stops the server with one sentence.

"""
_FOOT = """
## Anchors and sinks

A VQ block has 128 tokens. By default, two of its K vectors and two of its V vectors are anchors, per KV head.
An unquantised sink uses two anchor slots. With two sinks in a block, both fall back to their quantisation error in FP8.
`"anchor_share": 0.031` stores both unquantised.

`"anchor_dtype": "model"` makes a page of 1 bit and 128 channels 5,136 bytes instead of 4,624.

`GET /antkv/config` shows the settings in effect ([Metrics](metrics.md#get-antkvconfig)).
`AntKVConfig.model_json_schema()` in `vllm_antkv.config` gives the JSON schema.
"""


def settings_page() -> str:
    """The page, as Markdown."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in AntKVConfig.model_fields.items():
        lines.append(f"| `{name}` | `{json.dumps(field.default)}` | {field.description} |")
    return _HEAD + "\n".join(lines) + "\n" + _FOOT


def with_families(page: str) -> str:
    """The page with the list of these families in its place."""
    before, rest = page.split(_BEGIN)
    after = rest.split(_END)[1]
    names = (f"{family.title} (`{family.architecture}`)" for family in FAMILIES.values() if family.served)
    return before + _BEGIN + ",\n".join(names) + ".\n" + _END + after


if __name__ == "__main__":
    SETTINGS.write_text(settings_page())
    FAMILY_LIST.write_text(with_families(FAMILY_LIST.read_text()))
