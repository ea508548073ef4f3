"""What the errors of a Redis server and of its connections mean to a caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from redis import exceptions

from workers.errors import ForeignQueue, StorageDamaged, StorageError, StorageFull, StorageUnavailable, WorkersError
from workers.storage.on_redis.master import MasterUnknown
from workers.storage.on_redis.wire import Reply, cause, rejected_certificate

_UNAVAILABLE: Final = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.AskError,  # MOVED too
    TimeoutError,
    OSError,
)
_REFUSED: Final = (exceptions.AuthenticationError, exceptions.AuthorizationError)
FULL: Final = (
    "the Redis server's memory is full (maxmemory), and it took nothing of this step: work jobs off, remove some, or"
    " raise maxmemory"
)
NOT_RUN: Final = (exceptions.NoScriptError, exceptions.MovedError)
ALONE: Final = "the server is one of a Redis Cluster, and another has the queue: its URL begins with redis+cluster://"
DAMAGED: Final = "DAMAGED"
"""The error code by which our scripts name a key of the wrong kind."""
FOREIGN: Final = "FOREIGN"
"""That by which they name another library's queue."""
_BUSY_CODES: Final = frozenset({"BUSY", "MISCONF", "NOREPLICAS", "UNBLOCKED", "UNKILLABLE"})


class Redirected(StorageUnavailable):
    """Another server has the queue now, and is asked from now on. Nothing has run."""


def translate(error: BaseException) -> WorkersError:
    """Return the error of ours that a server's or connection's error means."""
    error = cause(error)
    if isinstance(error, _REFUSED):
        return StorageError(f"the Redis server refused the log-in ({type(error).__name__}); check user and password")
    certificate = rejected_certificate(error)
    if certificate is not None:
        return StorageError(f"the Redis server's certificate is not trusted: {certificate.verify_message}")
    if isinstance(error, MasterUnknown):
        return StorageUnavailable(str(error))
    if isinstance(error, exceptions.MovedError):
        return Redirected("another server of the Redis Cluster has the queue now")
    # redis-py has no types for these errors, and leaves the protocol's error code in front of the message.
    code, _, rest = str(error).partition(" ")
    if isinstance(error, exceptions.OutOfMemoryError):
        return StorageFull(FULL)
    if isinstance(error, _UNAVAILABLE) or code in _BUSY_CODES:
        return StorageUnavailable(f"the Redis server did not answer ({type(error).__name__})")
    if code == DAMAGED:
        return StorageDamaged(f"the queue is damaged: {rest[:200]}")
    if code == FOREIGN:
        return ForeignQueue(rest[:500])
    return StorageError(f"the Redis server answered with an error: {str(error)[:200]}")


@contextmanager
def translated() -> Iterator[None]:
    """Translate errors of redis-py that leave the block into `StorageUnavailable` or `StorageError`."""
    try:
        yield
    except (exceptions.RedisError, OSError) as error:
        raise translate(error) from error


def checked(reply: Reply) -> Reply:
    """Return the reply.

    An error becomes a `StorageError` in its place; one that concerns the whole server is raised.
    """
    if not isinstance(reply, exceptions.RedisError):
        return reply
    ours = translate(reply)
    if isinstance(ours, StorageUnavailable):
        raise ours from reply
    return ours


def good(reply: Reply) -> Reply:
    if isinstance(reply, exceptions.RedisError):
        raise translate(reply) from reply
    return reply
