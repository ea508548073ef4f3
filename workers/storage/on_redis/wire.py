"""Commands as they go over the wire, and their replies: many in one round trip.

redis-py's own packing and its pipelines take several times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from ssl import SSLCertVerificationError
from typing import Any, TypeAlias

from redis import exceptions
from redis.asyncio.connection import AbstractConnection

Command: TypeAlias = tuple[str | bytes | int | float, ...]
Reply: TypeAlias = Any  # the answer of a script or command; each caller knows its shape


def packed(command: Command) -> bytes:
    """Return the command as it goes over the wire.

    Text may contain bytes of other producers, as surrogates.
    """
    parts = [b"*%d\r\n" % len(command)]
    for value in command:
        data = value if isinstance(value, bytes) else str(value).encode(errors="surrogateescape")
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


async def read_replies(connection: AbstractConnection, commands: Sequence[Command]) -> list[Reply]:
    """Run the commands in one round trip.

    redis-py's pipelines are slow, and cannot batch between WATCH and MULTI.
    """
    if not commands:
        return []
    await connection.send_packed_command(list(map(packed, commands)))
    replies: list[Reply] = []
    for _ in commands:
        try:
            replies.append(await connection.read_response())
        except exceptions.ResponseError as error:
            replies.append(error)
    return replies


def rejected_certificate(error: BaseException | None) -> SSLCertVerificationError | None:
    """Return the reason behind an error of redis-py if it is the server's certificate."""
    while error is not None and not isinstance(error, SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error
