"""Learn a missing codebook before the engine is loaded, in a process of its own that gives its memory back.

Only the command line of `calibrate.calibrate_on_start` is known here.
"""

import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from vllm_antkv.codebook.identity import ModelIdentity
from vllm_antkv.codebook.search import NoCodebookError, codebook_path, find_codebook, own_folder
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import CodebookError

logger = logging.getLogger("vllm.antkv")


@dataclass(frozen=True)
class CodebookRequest:
    """The codebook that a server needs.

    model: folder or Hugging Face name.
    revision: of a Hugging Face name; None: its main branch.
    """

    model: str
    revision: str | None
    identity: ModelIdentity
    preset: str


def find_or_make(request: CodebookRequest, settings: AntKVConfig) -> Path:
    """The codebook's file. A missing one is learned and stored in the user's cache, unless settings forbid it.

    Raises:
        SettingsError: `calibration_text` cannot be read.
        CodebookError: there is none, and it may not or could not be made.
    """
    model, identity, revision, text = request.model, request.identity, request.revision, settings.calibration_text
    try:
        return find_codebook(model, identity, request.preset, settings.codebooks, revision, text)
    except NoCodebookError:
        # A named folder without the codebook is a mistake; learning one elsewhere would hide it.
        if settings.calibrate == "never" or settings.codebooks is not None:
            raise
    own = own_folder(model, identity, revision, text)
    _make(request, own, text)
    return codebook_path(own, request.preset)


def _make(request: CodebookRequest, folder: Path, text: str | None) -> None:
    source = "the text that comes with the package" if text is None else text
    logger.info(
        "There is no %s codebook for %s yet: learning one from %s, for %s. Later starts find it there.",
        request.preset,
        request.model,
        source,
        folder,
    )
    command = [sys.executable, "-m", "vllm_antkv.calibrate.calibrate_on_start"]
    command += [request.model, request.preset, str(folder)]
    command += [] if text is None else ["--text", text]
    command += [] if request.revision is None else ["--revision", request.revision]
    said = "it said nothing"
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in filter(str.strip, process.stdout):
            said = line.strip()
            logger.info("Calibration: %s", said)
    if process.returncode:
        raise CodebookError(
            f"There is no {request.preset} codebook for {request.model}, and learning one failed with exit code "
            f"{process.returncode} ({said.rstrip('.')}): see docs/calibration.md, or serve with --kv-cache-dtype auto."
        )
