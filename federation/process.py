"""The one node of a process."""

from __future__ import annotations

import gc
import resource
import sys
from dataclasses import dataclass
from typing import Final

from federation.app import Federation, pool_limits
from federation.base.settings import Settings

COLLECT_AFTER: Final = 10_000
"""Objects made and kept; CPython's 700 to 2 000 are a few deliveries."""

SPARE_DESCRIPTORS: Final = 200
"""For databases, queues, inbound connections, logs and the interpreter, beside the connections to other servers."""


class _Process:
    """Written by the functions below."""

    federation: Federation | None = None


def get_federation() -> Federation:
    """This process's node, made from the environment on first use.

    Raises:
        ConfigurationError: lists every malformed setting.
    """
    if _Process.federation is None:
        _Process.federation = Federation(Settings.load())
    return _Process.federation


def adopt(federation: Federation) -> None:
    """`federation` is this process's node: what the application's tasks use is what runs them."""
    _Process.federation = federation


def release() -> Federation | None:
    """This process has no node any more; the one it had is for the caller to close."""
    federation, _Process.federation = _Process.federation, None
    return federation


def set_aside_loaded() -> None:
    """Garbage collections pass over what the process holds now, its code above all, and come less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """How many open files a node needs where all its slots and all its room are taken, and may have."""

    needed: int
    allowed: int

    @property
    def advice(self) -> str | None:
        """What to do where they are too few; None where they suffice."""
        if self.allowed >= self.needed:
            return None
        raised = f"raise the hard limit of open files to {self.needed} (`LimitNOFILE=`, `ulimit -Hn`)"
        return f"{raised}, or lower FEDERATION_OVERTIME"


def descriptors(settings: Settings) -> Descriptors:
    """Those of a process started as this one was, once `allow_descriptors` has done what it can."""
    return Descriptors(needed=_needed(settings), allowed=_or_endless(resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def allow_descriptors(settings: Settings) -> Descriptors:
    """The soft limit of open files is as high as the node needs, or as the hard limit is; it is never lowered."""
    needed = _needed(settings)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _or_endless(soft) < needed:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, _or_endless(hard)), hard))
        except (OSError, ValueError):  # macOS has another limit besides, and says "unlimited" here
            return Descriptors(needed=needed, allowed=soft)
    return Descriptors(needed=needed, allowed=_or_endless(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def _needed(settings: Settings) -> int:
    limits = pool_limits(settings)
    return limits.connections + limits.idle_servers + SPARE_DESCRIPTORS


def _or_endless(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
