"""Render the chart into plain manifests: `python docker/render_manifests.py`.

Writes manifests/NAME.yaml for each manifests/values/NAME.yaml, with Helm's own engine. It is what this prints:

    helm template vllm-antkv docker/helm/vllm-antkv --namespace vllm --values docker/manifests/values/NAME.yaml
"""

from pathlib import Path
from typing import Any

import helm_python
import yaml

DOCKER = Path(__file__).parent
CHART = DOCKER / "helm" / "vllm-antkv"
MANIFESTS = DOCKER / "manifests"
RELEASE = "vllm-antkv"
NAMESPACE = "vllm"


def main() -> None:
    """Write all manifests."""
    for path in sorted((MANIFESTS / "values").glob("*.yaml")):
        target = MANIFESTS / path.name
        target.write_text(render(yaml.safe_load(path.read_text())))
        print(f"Wrote {target}.")


def render(values: dict[str, Any]) -> str:
    """The chart with these values, as one file of several documents."""
    with helm_python.Chart.load(str(CHART)) as chart:
        chart.validate_schema(chart.merge_values(values))
        rendered = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    documents = {name: text.strip() for name, text in sorted(rendered.items()) if name.endswith(".yaml")}
    header = "# Written by docker/render_manifests.py from the chart; do not edit.\n"
    return header + "".join(f"---\n# Source: {name}\n{text}\n" for name, text in documents.items() if text)


if __name__ == "__main__":
    main()
