"""The Redis or Valkey server under BullMQ queues: what BullMQ's scripts need in addition to `on_redis.server`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from redis import exceptions
from redis.asyncio import Redis

from workers.errors import StorageError, StorageUnavailable
from workers.storage.bullmq.scripts import scripts
from workers.storage.on_redis import server as on_redis
from workers.storage.on_redis.server import (
    ROUNDS,
    Command,
    Reply,
    ask,
    checked,
    good,
    read_replies,
    to_the_end,
    translate,
)

__all__ = ["BullMQServer", "Contended", "Reply", "ask", "parse_url", "to_the_end", "translate"]

SCHEME: Final = "bullmq+"


class Contended(StorageUnavailable):
    """Other clients changed the same jobs each time; nothing has run."""


class BullMQServer(on_redis.RedisServer):
    """Runs commands on the server at `target`, whose replies are text; `timeout` bounds each call."""

    def __init__(self, target: str | Redis, timeout: timedelta) -> None:
        super().__init__(target, timeout, scripts=lambda: tuple(scripts().values()), text=True)
        if isinstance(target, Redis) and not target.connection_pool.connection_kwargs.get("decode_responses"):
            raise StorageError("BullMQ needs text replies: create the client with decode_responses=True")

    async def run_atomic(self, units: Sequence[Sequence[Command]]) -> list[list[Reply]]:
        """Run every command, in one transaction. Returns the replies by unit; one that failed is a `StorageError`.

        A unit whose script was lost runs again as a whole.

        Raises:
            StorageUnavailable: either all have run or none.
        """
        answers: list[list[Reply]] = [[] for _ in units]
        missing = list(range(len(units)))
        for _ in range(ROUNDS):
            replies = iter(await self._transaction([command for at in missing for command in units[at]]))
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
    ) -> list[Reply]:
        """Run what `decide` makes of the replies to `read`, provided that none of `watched` changes in between.

        Returns the replies that `decide` saw last; it is called again each time another client was faster.

        Raises:
            Contended: another client was faster in all `rounds`.
            StorageUnavailable: the commands may have run.
            StorageError: a command failed; the others have run.
        """
        for _ in range(rounds):
            async with self._call() as pipe:
                await pipe.watch(*watched)
                seen = await read_replies(pipe.connection, read)
                plan = [] if _lost_script(seen) else decide([good(reply) for reply in seen])
                pipe.multi()  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
                for command in plan:
                    pipe.execute_command(*command)
                if await _commit(pipe, seen):
                    return seen
            await self._load_scripts()
        raise Contended(f"other clients changed the same jobs {rounds} times in a row")


def parse_url(url: str) -> tuple[str, str | None]:
    """Return the server's URL as redis-py takes it, and the queue named by `?queue=`."""
    return on_redis.parse_url(url.removeprefix(SCHEME))


async def _commit(pipe: Any, seen: list[Reply]) -> bool:
    """Execute the transaction; return False when it has to be tried again from the start."""
    try:
        replies = await pipe.execute(raise_on_error=False)
    except exceptions.WatchError as error:
        # redis-py raises this also when the connection broke; then nobody knows whether the transaction ran.
        if isinstance(error.__context__, exceptions.ConnectionError | exceptions.TimeoutError):
            raise error.__context__ from error
        return False
    if _lost_script(seen) or _lost_script(replies):
        return False
    for reply in replies:
        good(reply)
    return True


def _lost_script(replies: Sequence[Reply]) -> bool:
    return any(isinstance(reply, exceptions.NoScriptError) for reply in replies)
