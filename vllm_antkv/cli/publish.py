"""`antkv publish`."""

from typing import Annotated

import typer

from vllm_antkv.cli.options import Model


def publish(
    model: Model,
    target: Annotated[
        str,
        typer.Argument(
            metavar="DIR_OR_REPO",
            help="A folder (./NAME for a new one), or a repository of the Hugging Face hub as owner/name.",
        ),
    ],
    codebooks: Annotated[
        str | None, typer.Option(help="Where the codebooks are, as in the setting; without it where the server looks.")
    ] = None,
) -> None:
    """Put a model's codebooks where other servers find them.

    Example: `antkv publish MODEL owner/name --codebooks DIR`

    A server finds them with the setting `codebooks`, or without it in the model's own repository.
    """
    from vllm_antkv.codebook import ModelIdentity
    from vllm_antkv.codebook.publish import codebooks_of
    from vllm_antkv.codebook.publish import publish as publish_all
    from vllm_antkv.errors import SettingsError
    from vllm_antkv.offline.pretrained import read_config

    identity = ModelIdentity.from_hf_config(read_config(model, SettingsError))
    for place in publish_all(model, codebooks_of(model, identity, codebooks), target):
        print(place)
