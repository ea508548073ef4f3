"""Waiting until replicas have what a call has changed, before its answer is given.

Redis and Valkey replicate after they have answered, so a master that dies takes with it what it acknowledged last.
With `?wait_replicas=1` in the URL of a queue, whatever changes a job in the name of a producer, an operator or a
settlement is followed by `WAIT`, on the same connection. Claims, renewals, progress and recoveries are not: when a
claim is lost, another worker claims the job, and the former one's token is worth nothing any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from workers.errors import NotReplicated, StorageError
from workers.storage.on_redis.deployment import take_parameter

WAIT_MS: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """How many replicas have to confirm a change, and how long that may take."""

    replicas: int
    wait_ms: int = WAIT_MS

    @property
    def command(self) -> tuple[str | int, ...]:
        """The command that waits for what was sent before it on its connection."""
        return "WAIT", self.replicas, self.wait_ms

    def check(self, confirmed: int) -> None:
        """Take the answer to the command.

        Raises:
            NotReplicated: too few replicas have confirmed.
        """
        if confirmed < self.replicas:
            raise NotReplicated(
                f"{confirmed} of {self.replicas} replicas confirmed the change within {self.wait_ms} ms;"
                " it is stored on the master, and may be lost with it"
            )


def take_replication(url: str, timeout: timedelta) -> tuple[str, Replication | None]:
    """Return the URL without `?wait_replicas=` and `?wait_timeout_ms=`, and what they say, None without them.

    Raises:
        StorageError: they are no numbers above 0, or the wait takes no less than a whole call, which is `timeout`.
    """
    url, replicas = take_parameter(url, "wait_replicas")
    url, named_ms = take_parameter(url, "wait_timeout_ms")
    if replicas is None:
        return url, None
    wait_ms = str(WAIT_MS) if named_ms is None else named_ms
    if not _is_positive(replicas) or not _is_positive(wait_ms):
        raise StorageError("wait_replicas and wait_timeout_ms are whole numbers above 0")
    if timedelta(milliseconds=int(wait_ms)) >= timeout:
        raise StorageError(
            f"wait_timeout_ms has to be less than the time of a call, {timeout.total_seconds() * 1000:g}"
        )
    return url, Replication(replicas=int(replicas), wait_ms=int(wait_ms))


def _is_positive(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0
