"""Errors of an engine that a user can meet. Messages name the value, the limit and what to do."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration value is unknown, out of range or does not fit another one."""


class ModelFormatError(ValueError):
    """A model file is missing, damaged, or of a kind that is not supported; names the file, tensor or field."""


class EngineDeadError(RuntimeError):
    """The engine process ended; requests it held must be sent again."""


class Overloaded(RuntimeError):  # noqa: N818 - a state of the service, answered by 503
    """The bounded queue is full. `retry_after_s` is when a retry is worthwhile."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message
