"""How a delivery attempt can fail, and what that means for its job and its row."""

from __future__ import annotations

from datetime import timedelta

from workers import Retry, UnrecoverableError


class PermanentFailure(UnrecoverableError):
    """The delivery can never succeed. `code` names the reason in the attempt log, `method` what was to be delivered.

    `keep_row`: the row stays, settled, for an operator to look at; otherwise there is nothing to diagnose and it goes.
    """

    def __init__(self, code: str, message: str, *, keep_row: bool) -> None:
        super().__init__(message)
        self.code = code
        self.keep_row = keep_row
        self.method: str | None = None  # set by the attempt that ends with it


class RetryableFailure(Retry):
    """The attempt failed and may succeed later. `at_least` is how long the server asked to be left alone."""

    def __init__(self, code: str, message: str, *, at_least: timedelta | None = None) -> None:
        super().__init__(message, at_least=at_least)
        self.code = code
        self.method: str | None = None  # set by the attempt that ends with it


class Parked(Retry):
    """The server is busy with other attempts of this process: the job goes back, uncounted."""

    def __init__(self, server_url: str, delay: timedelta) -> None:
        super().__init__(f"{server_url} has all the attempts it may have at once", delay=delay, postponed=True)
