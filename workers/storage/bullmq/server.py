"""The Redis or Valkey server under BullMQ queues: what its URL says, and what `on_redis.server` does not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Final

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection

from workers.errors import StorageError, StorageUnavailable
from workers.storage.bullmq.lua_files import scripts
from workers.storage.on_redis import server as on_redis
from workers.storage.on_redis.errors import checked, good, translate
from workers.storage.on_redis.examination import Care
from workers.storage.on_redis.server import ROUNDS, ask, to_the_end
from workers.storage.on_redis.wire import Command, Reply, read_replies
from workers.storage.redis_urls import take_parameter

__all__ = ["BullMQServer", "Contended", "Reply", "ask", "parse_url", "to_the_end", "translate"]

SCHEME: Final = "bullmq+"


class Contended(StorageUnavailable):
    """Other clients changed the same jobs each time; nothing has run."""


class BullMQServer(on_redis.RedisServer):
    """Runs commands on the server at `target`, whose replies are text; `timeout` is how long it may be silent."""

    def __init__(self, target: str | Redis, timeout: timedelta, base: str = "", care: Care | None = None) -> None:
        loaded = partial(tuple, scripts().values())
        super().__init__(target, timeout, base=base.encode(), scripts=loaded, text=True, care=care)
        if isinstance(target, Redis) and not target.connection_pool.connection_kwargs.get("decode_responses"):
            raise StorageError("BullMQ needs text replies: create the client with decode_responses=True")

    async def run_atomic(self, units: Sequence[Sequence[Command]], *, confirmed: bool = False) -> list[list[Reply]]:
        """Run every command, in one transaction. Returns the replies by unit; one that failed is a `StorageError`.

        A unit whose script was lost runs again as a whole.

        Raises:
            StorageUnavailable: either all have run or none.
        """
        if not units:
            return []
        answers: list[list[Reply]] = [[] for _ in units]
        missing = list(range(len(units)))
        for _ in range(ROUNDS):
            commands = [command for at in missing for command in units[at]]
            replies = iter(await self.where_the_queue_is(partial(self._transaction, commands, confirmed)))
            for at in missing:
                answers[at] = [next(replies) for _ in units[at]]
            missing = [at for at in missing if _lost_script(answers[at])]
            if not missing:
                break
            await self._load_scripts()
        return [[checked(reply) for reply in answer] for answer in answers]

    async def transact(
        self,
        watched: Sequence[str],
        read: Sequence[Command],
        decide: Callable[[list[Reply]], Sequence[Command]],
        *,
        rounds: int = ROUNDS,
        confirmed: bool = False,
    ) -> list[Reply]:
        """Run what `decide` makes of the replies to `read`, provided that none of `watched` changes in between.

        Returns the replies that `decide` saw last; it is called again each time another client was faster.

        Raises:
            Contended: another client was faster in all `rounds`.
            StorageUnavailable: the commands may have run.
            StorageError: a command failed; the others have run.
        """
        for _ in range(rounds):
            seen, done = await self.where_the_queue_is(partial(self._try, watched, read, decide, confirmed))
            if done is not None and not _lost_script(seen) and not _lost_script(done):
                for reply in done:
                    good(reply)
                return seen
            await self._load_scripts()
        raise Contended(f"other clients changed the same jobs {rounds} times in a row")

    async def _try(
        self,
        watched: Sequence[str],
        read: Sequence[Command],
        decide: Callable[[list[Reply]], Sequence[Command]],
        confirmed: bool,
    ) -> tuple[list[Reply], list[Reply] | None]:
        """Return the replies to `read` and those to the transaction, None if another client was faster."""
        async with self.borrowed() as connection:
            watching, *seen = await read_replies(connection, [("WATCH", *watched), *read])
            good(watching)
            done = await _execute(connection, [] if _lost_script(seen) else decide([good(reply) for reply in seen]))
            if confirmed and done is not None and not _lost_script([*seen, *done]):  # else it will run again
                await self.confirm(connection)
            return seen, done

    async def _transaction(self, commands: Sequence[Command], confirmed: bool) -> list[Reply]:
        if not commands:
            return []
        if not (confirmed and self.confirms):
            return _executed(await self._send(_in_transaction(commands))) or []
        async with self.borrowed() as connection:
            replies = await _execute(connection, commands) or []
            if not _lost_script(replies):  # else it will run again
                await self.confirm(connection)
            return replies


async def _execute(connection: AbstractConnection, commands: Sequence[Command]) -> list[Reply] | None:
    """Run the commands in one transaction; None if a watched key has changed, and none of them has run."""
    return _executed(await read_replies(connection, _in_transaction(commands)))


def _in_transaction(commands: Sequence[Command]) -> list[Command]:
    return [("MULTI",), *commands, ("EXEC",)]


def _executed(replies: Sequence[Reply]) -> list[Reply] | None:
    """Return the answers of a transaction's commands from the replies to it; None if none has run."""
    _, *queued, answers = replies
    if isinstance(answers, exceptions.RedisError):  # none has run, mostly because one could not be queued
        raise translate(next((reply for reply in queued if isinstance(reply, exceptions.RedisError)), answers))
    return None if answers is None else list(answers)


def parse_url(url: str) -> tuple[str, str | None]:
    """Return the server's URL as redis-py takes it, and the queue named by `?queue=`."""
    return on_redis.parse_url(url.removeprefix(SCHEME))


def _lost_script(replies: Sequence[Reply]) -> bool:
    return any(isinstance(reply, exceptions.NoScriptError) for reply in replies)


STALLS_PARAMETER: Final = "max_foreign_stalls"
METRICS_PARAMETER: Final = "metrics"


def stalls_of(url: str) -> int | None:
    """Return the `max_foreign_stalls` of a storage's URL, None if it says nothing.

    Raises:
        StorageError: it is no number.
    """
    return _number(url, STALLS_PARAMETER, "a whole number of at least 0")


def metrics_of(url: str) -> int | None:
    """Return the `metrics` of a storage's URL, None if it says nothing.

    Raises:
        StorageError: it is no number.
    """
    return _number(url, METRICS_PARAMETER, "a whole number of minutes")


def server_url(url: str) -> str:
    """Return a storage's URL without what only the storage understands, apart from the queue."""
    for name in (STALLS_PARAMETER, METRICS_PARAMETER):
        url, _ = take_parameter(url, name)
    return url


def _number(url: str, name: str, wanted: str) -> int | None:
    written = take_parameter(url, name)[1]
    if written is not None and not (written.isascii() and written.isdigit()):
        raise StorageError(f"{name} is {wanted}, not {written[:40]!r}")
    return None if written is None else int(written)
