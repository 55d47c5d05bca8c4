"""The one settings object: what `--additional-config '{"antkv": {...}}'` may hold."""

import re
import reprlib
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, field_validator

from vllm_antkv.errors import SettingsError, first_problem

#: Tokens per VQ block. Anchors are chosen when a block closes, so this is also the span over which they compete.
VQ_BLOCK_SIZE = 128
#: Of vLLM's `additional_config`, where the settings are.
SETTINGS_KEY = "antkv"
#: They break a message into lines, and a terminal obeys some of them.
_CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MAX_PATH = 4096


class Recency(BaseModel, frozen=True, extra="forbid"):
    """Which recent tokens stay in full precision, written `sliding:W`, `log:W` or `none`.

    kind: `sliding` keeps the last `window` tokens; `log` keeps up to 3 `window` tokens, log-distributed (LogQuant,
    algorithm 1); `none` leaves a token in full precision for itself alone.
    """

    kind: Literal["sliding", "log", "none"]
    window: int = Field(ge=0)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `sliding:32`, `log:42` or `none`; ValueError when `text` is none of them."""
        if text == "none":
            return cls(kind="none", window=0)
        match = re.fullmatch(r"(sliding|log):([0-9]{1,9})", text)
        if match is None or int(match[2]) < 1 or (match[1] == "log" and int(match[2]) % 2):
            shown = reprlib.repr(text)
            raise ValueError(f"{shown} must be sliding:W, log:W (W even) or none, with W a number of tokens >= 1")
        return cls(kind=match[1], window=int(match[2]))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return self.kind if self.kind == "none" else f"{self.kind}:{self.window}"


class AntKVConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """Everything a user can set about the cache, beside the preset. Frozen; unknown keys are an error.

    Strict: "false" is no truth value and 8.5 no number of tokens.
    """

    codebooks: str | None = Field(
        default=None,
        min_length=1,
        description="Where to find codebooks: a folder written by `antkv calibrate`, or a Hugging Face repository "
        "(`owner/name` or `owner/name@revision`) with a folder `codebooks`. Default: beside the "
        "model, then those shipped with vllm-antkv, then the user's cache.",
    )
    calibrate: Literal["auto", "never"] = Field(
        default="auto",
        description="What a server without a codebook does. auto: learn one before the engine is loaded, and keep "
        "it in the user's cache. never: stop, and name the command that makes one.",
    )
    calibration_text: str | None = Field(
        default=None,
        min_length=1,
        description="Plain text file to learn that codebook from. Default: the text that comes with the package.",
    )
    anchor_share: float = Field(
        default=0.015,
        ge=0.0,
        le=1.0,
        description="Share of the tokens of a VQ block that become anchors: the K and V vectors with the highest "
        "Anchor Score, per KV head. 0 switches anchors off.",
    )
    anchor_dtype: Literal["fp8", "model"] = Field(
        default="fp8",
        description="What an anchor stores beside its code. fp8: its quantisation error in FP8. model: the vector "
        "in the dtype of the model, in twice the bytes. Sinks are stored unquantised with either.",
    )
    sinks: bool = Field(
        default=True,
        description="Store attention sinks (KVSink: tokens with an extreme hidden state in a calibrated channel) "
        "unquantised, ahead of all anchors.",
    )
    prefix: int = Field(
        default=8,
        ge=0,
        le=4096,
        description="Number of first tokens (BOS, a system prompt) whose K and V stay unquantised (IntactKV).",
    )
    recency: str = Field(
        default="sliding:32",
        description="Recent tokens that stay unquantised: sliding:W keeps the last W (in layers with a sliding window "
        "at most a 32nd of it, or 8 if that is more), log:W up to 3 W log-distributed ones (LogQuant), none only the "
        "current token. Unless none, the VQ block that is being filled stays unquantised too.",
    )
    windows: Literal["coded", "exact"] = Field(
        default="coded",
        description="Layers with a sliding window. coded: quantised like all others. exact: the whole window "
        "stays in the dtype of the model.",
    )
    prefill_reads_cache: bool = Field(
        default=False,
        description="false: queries of a prompt see the tokens of their own step unquantised, as in the papers, and "
        "what else its first one does. true: every query sees past tokens as decode will, so that chunking, prefix "
        "hits and preemption change nothing.",
    )

    kernels: Literal["auto", "cpu", "amx", "avx512_bf16", "avx512", "avx2", "triton", "cuda", "reference"] = Field(
        default="auto",
        description="Which kernels run. auto: the fastest that have code for a layer. cpu: the fastest of those for "
        "CPUs. amx, avx512_bf16, avx512, avx2, triton, reference: these, or an error at start-up. cuda: these, and "
        "triton for layers without code.",
    )
    dashboard_text: bool = Field(
        default=False,
        description="Let the dashboard's anchor map show the text of recent prompts and answers to everybody who "
        "may call the server. false: positions only; token ids never leave the engine.",
    )

    @field_validator("codebooks", "calibration_text")
    @classmethod
    def _can_be_a_path(cls, value: str | None) -> str | None:
        if value is not None and _CONTROL_CHARACTERS.search(value):
            raise ValueError("a name with control characters would not be shown as it is")
        if value is not None and len(value) > _MAX_PATH:
            raise ValueError(f"no path has more than {_MAX_PATH} characters")
        return value

    @field_validator("recency")
    @classmethod
    def _recency_can_be_read(cls, value: str) -> str:
        return str(Recency.parse(value))

    @classmethod
    def from_additional_config(cls, additional_config: dict[str, Any] | None) -> Self:
        """Validate the `antkv` entry of vLLM's `additional_config`.

        Raises SettingsError with one sentence that names the first offending key.
        """
        given = {} if additional_config is None else additional_config
        if not isinstance(given, dict):
            raise SettingsError(f"--additional-config must be a JSON object, got {reprlib.repr(given)}.")
        try:
            return cls.model_validate(given.get(SETTINGS_KEY, {}))
        except ValidationError as error:
            field, problem = first_problem(error, whole=SETTINGS_KEY)
            raise SettingsError(
                f"--additional-config: antkv setting {field} is not usable ({problem}); "
                f"known settings are {', '.join(cls.model_fields)}."
            ) from None

    @property
    def of_pages(self) -> dict[str, Any]:
        """The settings that decide pages and answers: not where codebooks are found, nor what is shown."""
        return self.model_dump(exclude={"codebooks", "calibrate", "calibration_text", "dashboard_text"})

    @property
    def recency_policy(self) -> Recency:
        """`recency`, parsed."""
        return Recency.parse(self.recency)

    @property
    def anchor_rows(self) -> int:
        """Rows for anchors of K (and of V) per VQ block and KV head, in 8 bits; a row that is kept as it is takes two.

        A sink has room even without anchors.
        """
        rows = max(round(self.anchor_share * VQ_BLOCK_SIZE), 1) if self.anchor_share > 0 else 0
        if self.anchor_dtype == "model":
            rows *= 2
        return max(rows, 2) if self.sinks else rows
