"""The keys by which one of several enqueues counts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from workers.checks import MAX_DELAY, check_text


class DeduplicationMode(StrEnum):
    """How long a deduplication key stands for a job.

    `simple`: until that job has finished. `throttle`: for a time. `debounce`: while that job waits for the time to
    pass, and each duplicate meanwhile replaces its payload and starts the time anew.
    """

    SIMPLE = "simple"
    THROTTLE = "throttle"
    DEBOUNCE = "debounce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deduplication:
    """The key that a job is enqueued by at most once at a time; keys belong to the queue.

    `simple`: the key is taken until the job has finished, as whatever link of its chain, or is gone. `throttle`: for
    `ttl` from when the job becomes due, whatever becomes of it. `debounce`: until the job is claimed or gone; it
    becomes due `ttl` after the last enqueue with its key, and has the last one's payload, but all else of the first.
    The mode of the job that has the key decides how long; both must be `debounce` for a payload to be replaced.

    Jobs of one call that share a key are one group, which is enqueued or not. The key stands for the first of them.

    Raises:
        ValueError: a key that is not 1 to 512 bytes of UTF-8, an unknown mode, a `ttl` with `simple`, and with any
            other mode one that is not above 0 and up to 100 years.
        TypeError: a key that is not text, a `ttl` that is no timedelta.
    """

    key: str
    mode: DeduplicationMode = DeduplicationMode.SIMPLE
    ttl: timedelta | None = None

    def __post_init__(self) -> None:
        check_text("deduplication key", self.key)
        object.__setattr__(self, "mode", DeduplicationMode(self.mode))
        if self.mode is DeduplicationMode.SIMPLE:
            if self.ttl is not None:
                raise ValueError(f"deduplication by simple lasts as long as the job: no ttl, not {self.ttl!r}")
        elif not isinstance(self.ttl, timedelta):
            raise TypeError(f"deduplication by {self.mode} needs a ttl, a timedelta, not {self.ttl!r}")
        elif not timedelta(0) < self.ttl <= MAX_DELAY:
            raise ValueError(f"the ttl of a deduplication is above 0 and up to 100 years, not {self.ttl}")
