"""Typed errors of the engine. Each is mapped to an HTTP answer once, in `serve/errors.py`.

Imports nothing, so that every room may raise them.
"""


class SlipstreamError(Exception):
    """The base of all errors that Slipstream raises on purpose."""


class BadRequest(SlipstreamError, ValueError):
    """A caller's mistake. The engine's state has not changed.

    `param` names the offending field as the caller wrote it; the message says what would be right.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.status = status


class ConfigError(SlipstreamError, ValueError):
    """A flag, file or environment value that cannot be used; stops the start and names the flag."""


class ModelError(SlipstreamError, ValueError):
    """A model that cannot be found, verified, read or is of an unknown architecture."""


class Overloaded(SlipstreamError):
    """The queue is full; the client may try again (HTTP 429)."""


class EngineDown(SlipstreamError):
    """The group is gone or not ready (HTTP 500 for a request that it held, else 503)."""


class Diverged(SlipstreamError):
    """A rank's reply was wrong; names the rank and the first entry that differs. Poisons the group."""


class BadEntry(SlipstreamError, ValueError):
    """An entry or an outcome that does not fit the state of the request it names. Every rank refuses it alike."""
