"""A Redis or Valkey server under queues: connections, batches, scripts, errors.

Theory of operation. Queues on one target share one connection pool, opened by the first `open` in an event loop and
closed by the last `close`. A client that is passed in lends only its settings, and its own connections stay untouched.
Its retry policy is not used: redis-py blindly repeats a batch when a reply is lost, and a repeated claim would strand
the jobs it claimed. Reads have no socket timeout, so that one pool serves blocking commands too. Instead every call is
bounded from outside, and redis-py discards a connection with an unread reply. Most calls need none of their own, and
share one (`shared_connection`).

Where several servers stand in for each other, connections go to the one that has the queue (`master`). One that says it
has it no more (MOVED) has done nothing for that call, which is repeated at the right one.

Scripts are called by hash. A server that lost them (restart, `SCRIPT FLUSH`, failover) answers NOSCRIPT for the calls
in question and has done nothing for them. Then the scripts are loaded, and exactly those calls are repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from inspect import signature
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakKeyDictionary

from redis import exceptions
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.connection import parse_url as named_in
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from workers.errors import ForeignLoop, StorageError
from workers.homes import Home, keep_inherited
from workers.storage.on_redis.errors import ALONE, NOT_RUN, Redirected, checked, good, translate, translated
from workers.storage.on_redis.examination import Care, Examination, Lookout
from workers.storage.on_redis.master import is_certain, is_right, master_pool, slot_of
from workers.storage.on_redis.shared_connection import SharedConnection
from workers.storage.on_redis.wire import Command, Reply, read_replies
from workers.storage.redis_urls import read_deployment, take_parameter, take_replication

T = TypeVar("T")

ROUNDS: Final = 10
"""How often an optimistic transaction is tried, and a call whose scripts get lost again."""
BLOCKING_SLACK_SECONDS: Final = 5.0
"""How much later than asked a blocking command may answer."""

CALLS_AT_ONCE: Final = 64
"""How many connections of one pool are lent for single calls at most; others wait, so that a burst costs time alone."""
CONNECTIONS: Final = 2**31
"""The pool's own limit: redis-py's 100 would be used up by waits and subscriptions, which take no turn."""


class LoadableScript(Protocol):
    """A Lua script, and the SHA-1 it is called by."""

    @property
    def text(self) -> str: ...
    @property
    def sha(self) -> str: ...


class _Pool:
    """Connections that several queues share, and the number of those queues."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.client = Redis(connection_pool=pool)
        self.users = 0
        self.turn = asyncio.Semaphore(CALLS_AT_ONCE)
        self.home = Home.here()
        self.lookout = Lookout()
        self._shared: SharedConnection | None = None
        self._opening = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def shared(self) -> SharedConnection | None:
        """The connection that calls share, if there is one that works and goes to the right server."""
        shared = self._shared
        return shared if shared is not None and not shared.closed and is_certain(shared.connection) else None

    async def share(self, seconds: float, *, text: bool) -> SharedConnection:
        """Return the connection that calls share, and make it if there is none; that may last `seconds`.

        One that goes to the wrong server is given up when what was asked on it is answered.
        """
        async with asyncio.timeout(seconds), self._opening:
            if (former := self._shared) is not None:
                if not former.closed and await is_right(former.connection):
                    return former
                self._shared = None
                leaving = asyncio.create_task(self._leave(former), name="redis-connection-left")
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)
            pool = self.client.connection_pool
            connection = await pool.get_connection()  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
            self._shared = SharedConnection(connection, seconds, text=text)
            return self._shared

    async def close(self) -> None:
        """Close all connections: what was asked on them fails."""
        await self.client.connection_pool.disconnect()
        if self._leaving:
            await asyncio.wait(self._leaving)

    async def _leave(self, shared: SharedConnection) -> None:
        await shared.close_when_answered()
        await shared.connection.disconnect(nowait=True)
        await self.client.connection_pool.release(shared.connection)


_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[object, _Pool]] = WeakKeyDictionary()


class Taking:
    """Puts the `limit` of a call off for as long as the server takes what is sent on the connection."""

    def __init__(self, connection: AbstractConnection, limit: asyncio.Timeout, seconds: float) -> None:
        self._connection = connection
        self._limit = limit
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._unsent = 0
        self._timer = self._loop.call_later(seconds / 4, self._look)

    def end(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        writer = self._connection._writer  # redis-py has no public way to its transport
        unsent = 0 if writer is None else writer.transport.get_write_buffer_size()
        if unsent < self._unsent and not self._limit.expired():
            self._limit.reschedule(self._loop.time() + self._seconds)
        self._unsent = unsent
        self._timer = self._loop.call_later(self._seconds / 4, self._look)


class RedisServer:
    """Runs commands on the server at `target`; `timeout` is how long it may be silent. Replies are `text`, or
    else bytes.

    With `care` the server is examined. All keys begin with `base`, which tells a cluster's client where they are.
    """

    def __init__(
        self,
        target: str | Redis,
        timeout: timedelta,
        *,
        scripts: Callable[[], Sequence[LoadableScript]],
        text: bool,
        base: bytes = b"",
        care: Care | None = None,
    ) -> None:
        self._replication = None
        if isinstance(target, str):
            target, self._replication = take_replication(target, timeout)
        check_target(target)
        self._target = target
        self._deployment = read_deployment(target) if isinstance(target, str) else None
        self._base = base
        slot = None if self._deployment is None else slot_of(self._deployment, base)
        self._shared = (target, text, slot)  # storages for which this is the same share connections
        self._timeout = timeout.total_seconds()
        self._scripts = scripts
        self._text = text
        self._care = care
        self._users = 0
        self._pool: _Pool | None = None

    async def open(self) -> None:
        """Make sure that the server answers and knows the scripts. Counted: each call needs one `close`."""
        if self._pool is not None and self._pool.home.is_gone:
            self.forget()
        if self._pool is None:
            pools = _pools.setdefault(asyncio.get_running_loop(), {})
            self._pool = pools.setdefault(self._shared, _Pool(self._make_pool()))
        self._pool.users += 1
        self._users += 1
        try:
            await self._load_scripts()
            await self.examine()
        except BaseException:
            await self.close()
            raise

    async def examine(self) -> None:
        """Look at the server's settings and clock, unless that was done a moment ago, and log what is wrong."""
        if self._care is not None:
            lookout = self._opened().lookout
            await lookout.look(self.run, channel=self._care.channel)
            self._care.tell(lookout.seen)

    @property
    def seen(self) -> Examination:
        """What the server said when it was last looked at."""
        return Examination() if self._pool is None else self._pool.lookout.seen

    def forget(self) -> None:
        """Forget the event loop, which ended without a `close`, and its connections with it."""
        if self._pool is not None and self._pool.home.is_inherited:
            keep_inherited(self._pool)
        self._pool, self._users = None, 0

    @property
    def database(self) -> int:
        """The number of the database on the server."""
        return int(self._opened().client.connection_pool.connection_kwargs.get("db") or 0)

    @property
    def timeout(self) -> float:
        """Seconds that the server may be silent."""
        return self._timeout

    @property
    def confirms(self) -> bool:
        """Whether changes wait for replicas, so that a call may fail although it ran."""
        return self._replication is not None

    @property
    def in_last_use(self) -> bool:
        """Whether the next `close` is the last."""
        return self._users == 1

    async def close(self) -> None:
        """Give up one use; connections that nobody uses any more are closed."""
        if self._pool is None:
            return
        pool = self._pool
        pool.users -= 1
        self._users -= 1
        if self._users == 0:
            self._pool = None
        if pool.users == 0:
            _pools.get(asyncio.get_running_loop(), {}).pop(self._shared, None)
            await pool.close()

    def _make_pool(self) -> ConnectionPool:
        fixed: dict[str, Any] = {  # whatever a URL says; Any: as redis-py takes them
            "protocol": 2,  # so replies have one shape, whatever the server and the client's default
            "decode_responses": self._text,
            "encoding": "utf-8",
            "encoding_errors": "surrogateescape",  # bytes of other producers survive the conversion to text
            "retry": Retry(NoBackoff(), 0),
            "retry_on_error": [],
            "retry_on_timeout": False,
        }
        settings = {
            **fixed,
            "socket_timeout": None,
            "socket_connect_timeout": self._timeout,
            "max_connections": CONNECTIONS,
        }
        if self._deployment is not None:
            return master_pool(self._deployment, self._base, settings)
        if isinstance(self._target, str):
            return ConnectionPool(**{**settings, **named_in(self._target), **fixed})
        lent = self._target.connection_pool
        # Maintenance notifications exist only in RESP 3, but redis-py sets up handlers for them unasked.
        kept = {name: value for name, value in lent.connection_kwargs.items() if "maint_notifications" not in name}
        return ConnectionPool(lent.connection_class, **{**kept, **settings})

    async def run(self, commands: Sequence[Command], *, confirmed: bool = False) -> list[Reply]:
        """Run every command, in one round trip, each for itself; one that failed answers a `StorageError`.

        Here and below, what is to be `confirmed` by replicas is, if the target's URL asks for it (`redis_urls`).

        Raises:
            StorageUnavailable: some may have run, some may not.
        """
        replies = await self._send(commands, confirmed=confirmed)
        for _ in range(ROUNDS):
            lost = [at for at, reply in enumerate(replies) if isinstance(reply, NOT_RUN)]
            if not lost:
                break
            if self._deployment is None and any(isinstance(reply, exceptions.MovedError) for reply in replies):
                raise StorageError(ALONE)
            await self._load_scripts()
            again = await self._send([commands[at] for at in lost], confirmed=confirmed)
            for at, reply in zip(lost, again, strict=True):
                replies[at] = reply
        return [checked(reply) for reply in replies]

    async def call(self, script: LoadableScript, *arguments: str | bytes | int, confirmed: bool = False) -> Reply:
        """Run a script and return its answer; the first argument is its key.

        Raises:
            StorageUnavailable: the script may have run.
            StorageError: the script failed.
        """
        return await self.where_the_queue_is(partial(self._call, script, arguments, confirmed))

    async def where_the_queue_is(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the attempt, made again wherever a server says that another one has the queue.

        Raises:
            StorageError: the target names one server alone.
        """
        for _ in range(ROUNDS):
            try:
                return await attempt()
            except Redirected as error:
                if self._deployment is None:
                    raise StorageError(ALONE) from error
        return await attempt()

    async def _call(self, script: LoadableScript, arguments: Sequence[str | bytes | int], confirmed: bool) -> Reply:
        (reply,) = await self._send([("EVALSHA", script.sha, 1, *arguments)], confirmed=confirmed)
        if isinstance(reply, exceptions.NoScriptError):  # nothing has run, and EVAL loads the script again
            (reply,) = await self._send([("EVAL", script.text, 1, *arguments)], confirmed=confirmed)
        return good(reply)

    async def confirm(self, connection: AbstractConnection) -> None:
        """Wait for replicas to have what ran on this connection, if the target's URL asks for it.

        Raises:
            NotReplicated: too few of them confirmed it.
        """
        if self._replication is not None:
            self._replication.check(await ask(connection, self._replication.command))

    async def run_blocking(self, command: Command, seconds: float) -> Reply:
        """Run a command that blocks up to `seconds` and changes nothing, and return its answer."""
        async with self._bounded(seconds + BLOCKING_SLACK_SECONDS), self.connection() as connection:
            return await ask(connection, command)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AbstractConnection]:
        """Borrow a connection for this context alone; errors are translated, and close it."""
        pool = self._opened().client.connection_pool
        with translated():
            async with asyncio.timeout(self._timeout):
                connection = await pool.get_connection()  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
            try:
                yield connection
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
            finally:
                await pool.release(connection)

    async def _send(self, commands: Sequence[Command], *, confirmed: bool = False) -> list[Reply]:
        if not commands:
            return []
        if confirmed and self.confirms:
            return await self._send_confirmed(commands)
        opened = self._opened()
        try:
            shared = opened.shared or await opened.share(self._timeout, text=self._text)
            return await shared.ask(commands)
        except (exceptions.RedisError, OSError) as error:
            raise translate(error) from error

    async def _send_confirmed(self, commands: Sequence[Command]) -> list[Reply]:
        async with self.borrowed() as connection:
            replies = await read_replies(connection, commands)
            ran = not any(isinstance(reply, NOT_RUN) for reply in replies)  # else they will run again
            if ran and not all(isinstance(reply, exceptions.ResponseError) for reply in replies):
                await self.confirm(connection)
            return replies

    async def _load_scripts(self) -> None:
        for reply in await self._send([("SCRIPT", "LOAD", script.text) for script in self._scripts()]):
            good(reply)

    def _opened(self) -> _Pool:
        if self._pool is None:
            raise StorageError("this storage is not connected; await its connect() first")
        if not self._pool.home.is_here:
            raise ForeignLoop("this storage is connected in another event loop; make one for each")
        return self._pool

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[AbstractConnection]:
        """Borrow a connection as `connection` does, for one call: when it is its turn, and for as long as one lasts."""
        opened = self._opened()
        pool = opened.client.connection_pool
        # Not in terms of `connection`: this is on the way of every job, and each context costs some microseconds.
        with translated():
            async with asyncio.timeout(self._timeout) as limit, opened.turn:
                connection = await pool.get_connection()  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
                taking = Taking(connection, limit, self._timeout)
                try:
                    yield connection
                except BaseException:
                    await connection.disconnect(nowait=True)
                    raise
                finally:
                    taking.end()
                    await pool.release(connection)

    @asynccontextmanager
    async def _bounded(self, seconds: float | None = None) -> AsyncIterator[None]:
        with translated():
            async with asyncio.timeout(seconds or self._timeout):
                yield


def parse_url(url: str) -> tuple[str, str | None]:
    """Return the server's URL as redis-py takes it, and the queue named by `?queue=`."""
    return take_parameter(url, "queue")


def check_target(target: str | Redis) -> None:
    """Accept a URL that redis-py understands, or a client.

    Raises:
        StorageError: anything else.
    """
    if isinstance(target, str):
        deployment = read_deployment(target)
        try:
            pool = ConnectionPool.from_url(target if deployment is None else deployment.server_url)
        except ValueError:
            scheme = target.partition(":")[0]
            raise StorageError(f"not the URL of a Redis server: its scheme is {scheme[:40]!r}") from None
        unknown = sorted(pool.connection_kwargs.keys() - _parameters(pool.connection_class))
        if unknown:
            raise StorageError(f"the URL of a Redis server has no parameter {unknown[0][:40]!r}")
    elif not isinstance(target, Redis):
        raise StorageError(f"the queue needs a URL or a redis.asyncio.Redis client, not {type(target).__name__}")


def _parameters(kind: type) -> frozenset[str]:
    """Return what a connection of redis-py's may be told, of which each class passes on what it does not know."""
    makers = [vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each)]
    return frozenset(name for make in makers for name in signature(make).parameters)


async def ask(connection: AbstractConnection, command: Command) -> Reply:
    """Run one command on this connection, which the caller has borrowed, and return the answer."""
    return good((await read_replies(connection, [command]))[0])


async def to_the_end(work: Coroutine[object, object, None]) -> None:
    """Finish `work`, however often this task is cancelled meanwhile; it must be bounded."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.shield(task)
