"""Write docs/settings.md from the settings object: `python scripts/settings_page.py` (`make docs` does so)."""

import json
from pathlib import Path

from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
_HEAD = """# Settings

<!-- Written by scripts/settings_page.py from vllm_antkv/config.py; `make docs` renews it. -->

After this page you can set everything about the cache that can be set, and know what each setting does.

The preset is chosen with `--kv-cache-dtype`. Everything else has a default and is set through vLLM's
`--additional-config`, under the key `antkv`:

```console
$ vllm serve MODEL --kv-cache-dtype antkv-1bit --additional-config '{"antkv": {"recency": "log:42"}}'
```

An unknown key, or a value that cannot be used, stops the server with one sentence.
"""


def render() -> str:
    """The page, as Markdown."""
    lines = [_HEAD, "| setting | default | meaning |", "|---|---|---|"]
    for name, field in AntKVConfig.model_fields.items():
        lines.append(f"| `{name}` | `{json.dumps(field.default)}` | {field.description} |")
    lines += [
        "",
        f"A VQ block has {VQ_BLOCK_SIZE} tokens. With the defaults, {AntKVConfig().anchor_rows} of its K rows and",
        "as many V rows are anchors, per KV head. A sink takes the bytes of both. Of two sinks in a block what their",
        "codes lose is kept; with `anchor_share: 0.031` both are kept as they are. With `anchor_dtype: model` there",
        "are as many anchors in twice the bytes: at 1 bit the page of a block and KV head of 128 channels has 5,136",
        "bytes instead of 4,624. `anchor_share: 0.0075` keeps one such row in the bytes of two in FP8.",
        "",
        "## JSON schema",
        "",
        "```json",
        json.dumps(AntKVConfig.model_json_schema(), indent=2),
        "```",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render())
