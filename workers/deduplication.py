"""Deduplication keys: of several enqueues with one key, only one counts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from workers.checks import MAX_DELAY, check_text


class DeduplicationMode(StrEnum):
    """How long a deduplication key stands for a job.

    `simple`: until that job has finished. `throttle`: for a fixed time. `debounce`: until that job's delay has passed;
    each duplicate meanwhile replaces its payload and restarts the delay.
    """

    SIMPLE = "simple"
    THROTTLE = "throttle"
    DEBOUNCE = "debounce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deduplication:
    """A key under which at most one job at a time is enqueued; keys belong to the queue.

    `simple`: the key is taken until the job has finished, with whichever link of its chain, or is gone. `throttle`: it
    is taken for `ttl` from the moment the job becomes due, whatever becomes of the job. `debounce`: it is taken until
    the job is claimed or gone; the job becomes due `ttl` after the last enqueue with its key, with the payload of that
    enqueue and everything else of the first. The mode of the job that has the key decides how long; a payload is
    replaced only if both modes are `debounce`.

    Jobs of one call that share a key are one group, which is enqueued as a whole or not at all. The key then stands for
    the first of them.

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
