"""Errors a caller may want to catch. Each message is one sentence that says what is wrong and what to do."""


class AntKVError(Exception):
    """Base of everything vllm-antkv raises on purpose."""


class SettingsError(AntKVError, ValueError):
    """A flag or a setting has a value that cannot be used."""


class CodebookError(AntKVError):
    """A codebook file is missing, damaged, or does not belong to this model and preset."""


class UnsupportedModelError(AntKVError):
    """The model, or the way it is to be served, cannot be combined with an antkv cache."""


class CalibrationError(AntKVError):
    """Centroids cannot be learned from what was given."""
