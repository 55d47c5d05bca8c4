"""What a server runs as a process of its own where it finds no codebook: learns one, however many servers ask for it.

`python -m vllm_antkv.calibrate.calibrate_on_start MODEL PRESET OUT`. If the exit code is not 0, the last line on
standard error says what is wrong.
"""

import argparse
import math
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import snapshot_download

from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.calibrate.workspace import check_writable
from vllm_antkv.codebook import codebook_path
from vllm_antkv.errors import AntKVError, CalibrationError, reason
from vllm_antkv.presets import get_preset, parts_of_mix
from vllm_antkv.progress import say

#: On a CPU and on a GPU: a server waits for them, and a CPU takes many seconds for every window.
#: Twice as many on a CPU gain nothing (`docs/results.md`).
TOKENS_PER_CENTROID = {"cpu": 24, "cuda": 128}
#: Tokens per window there: attention's share of the time grows with them.
SEQ_LEN = {"cpu": 1024, "cuda": CalibrationSettings.seq_len}
#: What calibration reads of a repository of a model.
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md")


def main() -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="vllm_antkv.calibrate.calibrate_on_start")
    parser.add_argument("model")
    parser.add_argument("preset")
    parser.add_argument("out", type=Path)
    parser.add_argument("--text")
    parser.add_argument("--revision")
    given = parser.parse_args()
    texts = [] if given.text is None else [given.text]
    try:
        with _held(given.out, given.preset):
            if not codebook_path(given.out, given.preset).exists():
                _calibrate(given.model, given.revision, given.preset, texts, given.out)
                say(f"{given.preset} is learned.")
    except AntKVError as error:
        say(" ".join(str(error).split()))
        return 1
    return 0


def _calibrate(model: str, revision: str | None, preset: str, texts: list[str], out: Path) -> None:
    # They take seconds to import, which is for nothing where another server has made it, or nothing can be written.
    from transformers.utils.logging import disable_progress_bar

    from vllm_antkv.calibrate.original import original_of
    from vllm_antkv.calibrate.resources import pick_device
    from vllm_antkv.calibrate.run import calibrate
    from vllm_antkv.codebook import ModelIdentity
    from vllm_antkv.offline.pretrained import read_config

    disable_progress_bar()
    folder = original_of(_local_folder(model, revision))
    config = read_config(folder, CalibrationError)
    head_size = ModelIdentity.from_hf_config(config).head_size
    context = config.get_text_config().max_position_embeddings
    device = pick_device("auto").type
    seq_len = min(SEQ_LEN[device], context)
    samples = num_samples(seq_len, preset, head_size, device)
    calibrate(CalibrationSettings(folder, [preset], texts, out, samples=samples, seq_len=seq_len))


def _held(out: Path, preset: str) -> AbstractContextManager[object]:
    """The lock on one preset in this folder, waited for while another server has it."""
    try:
        check_writable(out)
        lock = FileLock(out / f".{preset}.lock")
        try:
            return lock.acquire(blocking=False)
        except Timeout:
            say("Another server is learning it: waiting for that.")
            return lock.acquire()
        except OSError as error:
            raise CalibrationError(f"{out} is in a file system without locks: {error.strerror}.") from None
    except CalibrationError as error:
        raise CalibrationError(
            f"{str(error).rstrip('.')}; XDG_CACHE_HOME in the server's environment puts it elsewhere."
        ) from None


def num_samples(seq_len: int, preset: str, head_size: int, device: str) -> int:
    """Windows of so many tokens that a server takes for a model with this head size on a device, `cpu` or `cuda`."""
    asked = get_preset(preset)
    learned = parts_of_mix(asked, head_size) or [asked]
    tokens = TOKENS_PER_CENTROID[device] * max(each.num_centroids for each in learned)
    return min(CalibrationSettings.samples, math.ceil(tokens / seq_len))


def _local_folder(model: str, revision: str | None) -> str:
    """The folder of a model; one that has only a name is downloaded, as vLLM would do a moment later."""
    if Path(model).is_dir():
        return model
    try:
        return snapshot_download(model, revision=revision, allow_patterns=list(_FILES))
    except Exception as error:  # the hub's client raises errors of many libraries
        raise CalibrationError(f"{model} cannot be downloaded ({reason(error)}).") from None


if __name__ == "__main__":
    # When the server ends, nobody reads any more: the next line of progress then ends this process too. Of this process
    # alone: whoever calls `main` in another one would end with its next broken connection.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
