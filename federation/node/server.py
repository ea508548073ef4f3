"""uvicorn, as this application runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import uvicorn
from fastapi import FastAPI


class NodeServer(uvicorn.Server):
    """Serves the inbound side; the process handles signals, not this."""

    def __init__(self, app: FastAPI, *, grace: timedelta) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=max(1, round(grace.total_seconds())),
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def request_stop(self) -> None:
        """Accept no more, finish what is being answered; a second request drops that."""
        self.force_exit = self.should_exit
        self.should_exit = True
