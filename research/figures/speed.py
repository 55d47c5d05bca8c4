"""Draw docs/figures/speed.svg from docs/figures/speed.json, which has what docs/performance.md shows."""

import json
from pathlib import Path

from research.figures import style

NUMBERS = Path(__file__).parents[2] / "docs" / "figures" / "speed.json"


def main() -> None:
    """Write the figure."""
    numbers = json.loads(NUMBERS.read_text())
    cpu, gpu = numbers["CPU"], numbers["GPU"]
    figure, (decode, prefill, attention) = style.canvas("Speed of antkv-1bit relative to a cache in 16 bits", 3)
    figure.set_size_inches(11, 3.8)
    for panel, name, meaning in (
        (decode, "decode", "tokens per second over auto's"),
        (prefill, "prefill", "time of a prompt over auto's"),
    ):
        for index, (who, ratios) in enumerate(cpu[name].items()):
            tokens, marker = cpu["tokens"][: len(ratios)], style.MARKERS[index]
            panel.plot(tokens, ratios, color=style.COLOURS[index], marker=marker, label=f"{who} at once")
        panel.set_xscale("log", base=2)
        panel.set_xticks(cpu["tokens"], [f"{tokens:,}" for tokens in cpu["tokens"]])
        panel.axhline(1, color=style.INK, linestyle=":")
        panel.set_ylim(bottom=0)
        style.label(panel, f"CPU, {name}", "tokens", meaning)

    places = range(len(gpu["tokens x requests"]))
    baseline = gpu["milliseconds"]["FA3, BF16"]
    for index, (who, times) in enumerate(gpu["milliseconds"].items()):
        ratios = [mine / theirs for mine, theirs in zip(baseline, times, strict=True)]
        attention.plot(places, ratios, color=style.COLOURS[index], marker=style.MARKERS[index], label=who)
    attention.set_xticks(places, [name.replace(" x ", "\nx ") for name in gpu["tokens x requests"]])
    attention.set_ylim(0, 2.5)
    style.label(attention, "H200, attention for a new token", "tokens x requests", "times as fast as FA3, BF16")
    attention.legend(loc="upper left", ncols=2)
    style.save(figure, NUMBERS.parent, NUMBERS.stem, ("svg",))


if __name__ == "__main__":
    main()
