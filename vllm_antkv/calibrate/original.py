"""Finds the unquantised original of a model with quantised weights, through which no gradient flows."""

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub.repocard import metadata_load
from transformers import PretrainedConfig

from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.errors import AntKVError, UnsupportedModelError
from vllm_antkv.offline.pretrained import is_quantised, read_config
from vllm_antkv.progress import say


def original_of(folder: str) -> str:
    """The model to learn from for the one in `folder`: itself or, where its weights are quantised, its original.

    An original that is not named, is not at hand, or has other sizes is none: then it is the model itself again.
    """
    config = read_config(folder, UnsupportedModelError)
    if not is_quantised(config):
        return folder
    identity = ModelIdentity.from_hf_config(config)
    named = list(dict.fromkeys(_named(Path(folder))))
    for name in named:
        if _is_original(name, identity):
            say(f"Its weights are quantised: learning from its original, {name}.")
            return name
    shown = f"is not at hand ({' or '.join(named)})" if named else "is not named in its config or card"
    say(f"Its weights are quantised, and its original {shown}.")
    return folder


def _named(folder: Path) -> Iterator[str]:
    """What the model says it was made from: in its config, then in its card."""
    config, _ = PretrainedConfig.get_config_dict(folder)
    card = folder / "README.md"
    metadata = (metadata_load(card) if card.exists() else None) or {}
    for value in (config.get("_name_or_path"), config.get("base_model"), metadata.get("base_model")):
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and name:
                yield name


def _is_original(name: str, identity: ModelIdentity) -> bool:
    """Whether this is an unquantised model of these sizes that can be read here."""
    try:
        config = read_config(name, UnsupportedModelError)
        same = ModelIdentity.from_hf_config(config) == identity
    except AntKVError:
        return False
    return same and not is_quantised(config)
