"""`antkv calibrate`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from vllm_antkv.cli.options import Model, grouped


@dataclass(frozen=True)
class LearningOptions:
    """How codebooks are learned."""

    samples: Annotated[int, typer.Option(min=1, help="Windows of text, at most.")] = 128
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 2048
    weights: Annotated[
        Literal["grad", "none"], typer.Option(help="How tokens count: by their gradient, or all alike.")
    ] = "grad"
    channels: Annotated[
        Literal["interleaved", "consecutive"],
        typer.Option(help="How sub-vectors take the channels of K; consecutive is CQ's way."),
    ] = "interleaved"
    bits: Annotated[
        Literal["uniform", "mixed"],
        typer.Option(
            help="uniform: all layers get --preset. mixed: each gets what it needs, all together no more bytes: closer "
            "to full precision, but slower to learn and, with tables of 4,096 centroids, to decode."
        ),
    ] = "uniform"
    refine: Annotated[
        int, typer.Option(min=0, help="Steps of training the centroids end to end after k-means; 0: none.")
    ] = 0
    train_prefix: Annotated[
        bool,
        typer.Option(
            "--train-prefix",
            help="Train K and V of the first tokens of prompts (IntactKV), 160 steps: of BOS, or of --prefix-text.",
        ),
    ] = False
    prefix_text: Annotated[
        str | None,
        typer.Option(help="Plain text file with the system prompt that --train-prefix trains, as prompts have it."),
    ] = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    seed: Annotated[int, typer.Option(help="The same command and seed write the same file.")] = 0


@grouped
def calibrate(
    model: Model,
    preset: Annotated[list[str], typer.Option(help="Preset to learn centroids for, e.g. antkv-1bit; repeatable.")],
    text: Annotated[list[str], typer.Option(help="Calibration text: plain UTF-8 file or data set name; repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder for the codebooks.")],
    learning: LearningOptions,
) -> None:
    """Learn codebooks for a model from text.

    Example: `antkv calibrate MODEL --preset antkv-1bit --text FILE --out DIR`

    The preset `all` stands for every preset. A killed run continues where it stopped.
    """
    from vllm_antkv.calibrate import run

    for file in run.calibrate(model, preset, text, out, **asdict(learning)):
        print(file)
