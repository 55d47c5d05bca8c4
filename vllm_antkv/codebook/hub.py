"""Repositories of the Hugging Face hub that have codebooks, in their folder `codebooks`.

Downloaded files are checked like any other: header, checksum and model.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from vllm_antkv.errors import CodebookError, reason

#: Of a repository, and of a model's folder.
FOLDER = "codebooks"
_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w-][\w./-]*))?")


@dataclass(frozen=True)
class Repository:
    """A repository, and its branch, tag or commit; None: the main branch."""

    name: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read `owner/name` or `owner/name@revision`; None where it is neither, or a folder that exists."""
        match = _NAME.fullmatch(text)
        return None if match is None or Path(text).exists() else cls(match[1], match[2])

    def folders(self, preset: str) -> list[Path]:
        """The folder in the hub's cache with the codebook, downloaded if missing; empty when the repository has none.

        Raises CodebookError when the hub cannot be asked.
        """
        try:
            return [Path(hf_hub_download(self.name, f"{FOLDER}/{preset}.safetensors", revision=self.revision)).parent]
        except LocalEntryNotFoundError:
            raise CodebookError(
                f"The codebooks of {self.name} are not in the Hugging Face cache, and the hub cannot be reached (or "
                "HF_HUB_OFFLINE is set)."
            ) from None
        except EntryNotFoundError:
            return []
        except Exception as error:  # the hub's client raises errors of many libraries
            raise CodebookError(f"The codebooks of {self.name} cannot be fetched ({reason(error)}).") from None
