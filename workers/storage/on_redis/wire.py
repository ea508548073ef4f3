"""Commands as they go over the wire, and their replies: many in one round trip.

redis-py's own packing and its pipelines take several times as long.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ssl import SSLCertVerificationError
from typing import Any, Final, TypeAlias

from redis import exceptions
from redis.asyncio.connection import AbstractConnection

Command: TypeAlias = tuple[str | bytes | int | float, ...]
Reply: TypeAlias = Any  # the answer of a script or command; each caller knows its shape

_STOPPED: Final = re.compile(
    r"(?:ERR )?(?:Error running script \(call to f_\w+\): )?(?:@user_script: ?\d+: )+-?"
    r"(?P<code>[A-Z]+) (?P<message>.*)",
    re.DOTALL,
)
"""What a server before Redis 7 says of a script that an error stopped; since then it says the error itself."""
_TYPES: Final = {"OOM": exceptions.OutOfMemoryError, "READONLY": exceptions.ReadOnlyError}
"""Those of redis-py for errors that stop a script, by their codes."""


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


def cause(error: BaseException) -> BaseException:
    """Return the error that stopped a script, as a server since Redis 7 says it; any other error is itself."""
    stopped = _STOPPED.match(str(error)) if isinstance(error, exceptions.ResponseError) else None
    if stopped is None:
        return error
    known = _TYPES.get(stopped["code"])
    if known is None:
        return exceptions.ResponseError(f"{stopped['code']} {stopped['message']}")
    return known(stopped["message"])


def rejected_certificate(error: BaseException | None) -> SSLCertVerificationError | None:
    """Return the reason behind an error of redis-py if it is the server's certificate."""
    while error is not None and not isinstance(error, SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error
