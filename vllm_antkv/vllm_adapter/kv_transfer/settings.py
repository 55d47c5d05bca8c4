"""The settings of `AntKVStore`: `kv_connector_extra_config` in `--kv-transfer-config`."""

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, ValidationError, field_validator

from vllm_antkv.errors import SettingsError, first_problem
from vllm_antkv.vllm_adapter.kv_transfer import EXTRA_KEY, STORE

#: Where `identity.prepare` leaves the identity, for the scheduler and the workers.
IDENTITY_KEY = "identity"


class StoreSettings(BaseModel, frozen=True, extra="forbid", strict=True):
    """What a user can set.

    folder: for pages, an absolute path.
    max_bytes: that the files in it take at most, of all servers; None: whatever there is.
    """

    folder: str
    max_bytes: int | None = Field(default=None, ge=1)

    @field_validator("folder")
    @classmethod
    def _is_absolute(cls, value: str) -> str:
        if not Path(value).is_absolute():
            raise ValueError("the folder for pages must be an absolute path")
        return value

    @classmethod
    def of(cls, extra: dict[str, Any]) -> Self:
        """Validate them.

        Raises SettingsError with one sentence that names the first offending key.
        """
        try:
            return cls.model_validate({key: value for key, value in extra.items() if key != IDENTITY_KEY})
        except ValidationError as error:
            field, problem = first_problem(error, whole=EXTRA_KEY)
            raise SettingsError(
                f"--kv-transfer-config: setting {field} of {STORE} is not usable ({problem}); it takes "
                f'"{EXTRA_KEY}": {{"folder": "/var/cache/antkv", "max_bytes": 100000000000}}, an absolute path and, '
                "where the folder is to have one, a limit."
            ) from None
