"""`antkv calibrate`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from vllm_antkv.calibrate.settings import Bits, CalibrationSettings, Channels, Weights
from vllm_antkv.cli.options import Model, grouped


@dataclass(frozen=True)
class LearningOptions:
    """How codebooks are learned."""

    samples: Annotated[int, typer.Option(min=1, help="Windows of text, at most.")] = CalibrationSettings.samples
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = CalibrationSettings.seq_len
    weights: Annotated[Weights, typer.Option(help="Weigh tokens by gradients and K by queries, or all alike.")] = (
        CalibrationSettings.weights
    )
    channels: Annotated[
        Channels,
        typer.Option(help="Channels of K in a sub-vector: spread over the RoPE frequencies, or consecutive (CQ)."),
    ] = CalibrationSettings.channels
    bits: Annotated[
        Bits,
        typer.Option(
            help="mixed: each layer gets what it needs, in no more bytes together than --preset for all. uniform: all "
            "layers get --preset."
        ),
    ] = CalibrationSettings.bits
    lora: Annotated[Path | None, typer.Option(help="Folder of a LoRA adapter that is always on.")] = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = CalibrationSettings.device
    train_steps: Annotated[
        int,
        typer.Option(
            min=0,
            help="Train centroids end to end for so many steps of 1,024 tokens: 200 take a third off the perplexity "
            "that SmolLM2 loses at 1 bit.",
        ),
    ] = CalibrationSettings.train_steps
    seed: Annotated[int, typer.Option(help="The same command and seed write the same file.")] = CalibrationSettings.seed


@grouped
def calibrate(
    model: Model,
    preset: Annotated[list[str], typer.Option(help="Preset to learn centroids for, e.g. antkv-1bit; repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder for the codebooks.")],
    learning: LearningOptions,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Calibration text: plain UTF-8 file or data set name; repeatable. Default: the text of the package."
        ),
    ] = None,
) -> None:
    """Learn codebooks for a model from text.

    Example: `antkv calibrate MODEL --preset antkv-1bit --out DIR`

    The preset `all` stands for every preset. A killed run continues where it stopped.
    """
    from vllm_antkv.calibrate import run

    for file in run.calibrate(CalibrationSettings(model, preset, text or [], out, **asdict(learning))):
        print(file)
