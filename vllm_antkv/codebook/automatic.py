"""Has a missing codebook made before the engine is loaded, in a process of its own, whose memory is free afterwards.

Knows nothing of calibration but the command line of `vllm_antkv.calibrate.once`.
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
class Wanted:
    """The codebook that a server needs.

    model: folder or Hugging Face name.
    revision: of a Hugging Face name; None: its main branch.
    """

    model: str
    revision: str | None
    identity: ModelIdentity
    preset: str


def find_or_make(wanted: Wanted, settings: AntKVConfig) -> Path:
    """The codebook's file; one that is nowhere is learned and kept in the user's cache, unless settings forbid it.

    Raises:
        SettingsError: `calibration_text` cannot be read.
        CodebookError: there is none, and it may not or could not be made.
    """
    own = own_folder(wanted.model, wanted.identity, wanted.revision, settings.calibration_text)
    try:
        return find_codebook(wanted.model, wanted.identity, wanted.preset, settings.codebooks, own)
    except NoCodebookError:
        # A folder that was named and does not hold it is a mistake, not a wish for another.
        if settings.calibrate == "never" or settings.codebooks is not None:
            raise
    _make(wanted, own, settings.calibration_text)
    return codebook_path(own, wanted.preset)


def _make(wanted: Wanted, folder: Path, text: str | None) -> None:
    source = "text that it writes itself" if text is None else text
    logger.info(
        "There is no %s codebook for %s yet: learning one from %s, for %s. Later starts find it there.",
        wanted.preset,
        wanted.model,
        source,
        folder,
    )
    command = [sys.executable, "-m", "vllm_antkv.calibrate.once", wanted.model, wanted.preset, str(folder)]
    command += [] if text is None else ["--text", text]
    command += [] if wanted.revision is None else ["--revision", wanted.revision]
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
            f"There is no {wanted.preset} codebook for {wanted.model}, and learning one failed with exit code "
            f"{process.returncode} ({said.rstrip('.')}): see docs/calibration.md, or serve with --kv-cache-dtype auto."
        )
