"""The server that has a queue's keys, where several stand in for each other, and connections that go there.

Theory of operation. All keys of a queue are in one slot of a cluster, so at any time one server has the queue, as
behind Sentinels. All that a cluster's client has to do for us is to find that server. So we ask for its address, and
talk to it as to a server that stands alone: in batches and transactions, with WATCH, blocking commands and
subscriptions, which need a connection of their own anyway. redis-py's `RedisCluster` would send each command to its
slot, and repeat commands whose answer was lost, which is not safe for ours.

An address holds until there is reason to doubt it: a connection to it was given up, for whatever reason, or the server
says that it is no master, or does not have the slot. Then the next connection asks again. `MOVED` names the new one.
If nobody answers, the last address is used: Sentinels that are all away stop no queue. Connections to another address
than the one that holds now are closed when they are next used.

`ASK` is not followed. It says that a slot's keys are under way to another server, one after the other. A script that
followed it would find some of the queue's keys missing there, and make them anew. So the queue rests until the slot has
moved, and `StorageUnavailable` is raised meanwhile.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, Connection, ConnectionPool, SSLConnection, parse_url
from redis.crc import key_slot

from workers.errors import StorageError
from workers.storage.on_redis.wire import cause
from workers.storage.redis_urls import Address, Deployment, read_deployment

ASKED_IN_TIME: Final = 3
"""How many servers that hang are asked within the time of one call."""


_HASH_TAG: Final = re.compile(rb"[^{]*{[^}]+}")
_NO_ANSWER: Final = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)


class MasterUnknown(exceptions.ConnectionError):
    """Sentinels or nodes of a cluster answered, and know no master; they may soon."""


class Master:
    """The server that has `key`. Its connections share this object, which remembers the address for all."""

    def __init__(self, deployment: Deployment, key: bytes, settings: Mapping[str, Any]) -> None:
        self._deployment = deployment
        self._slot = key_slot(key)
        self._settings = settings
        self._known: Sequence[Address] = ()  # the cluster's nodes by its own account
        self._address: Address | None = None  # None while it is doubtful
        self._last: Address | None = None

    def has_left(self, address: Address) -> bool:
        """Tell whether it is known to be elsewhere."""
        return self._address not in (None, address)

    def is_at(self, address: Address) -> bool:
        """Tell whether it is known to be there, beyond doubt."""
        return self._address == address

    def doubt(self, address: Address) -> None:
        """Ask anew before the next connection, unless another address has been found since."""
        if address == self._address:
            self._address = None

    def moved(self, address: Address) -> None:
        """Use this address from now on, because the server that had the slot says so."""
        self._last = self._address = address

    async def find(self) -> Address:
        """Return the address.

        Raises:
            RedisError, OSError: it was never known, and nobody who was asked knows it; the error of the last of them.
            MasterUnknown: those who answered know no master.
        """
        if self._address is None:
            try:
                self._last = self._address = await self._ask_around()
            except _NO_ANSWER as error:
                if self._last is None or isinstance(error, MasterUnknown):
                    raise
                return self._last
        return self._address

    async def _ask_around(self) -> Address:
        nodes = list({*self._deployment.nodes, *self._known})
        random.shuffle(nodes)  # one that is cut off from the others, and knows nothing new, is not always the first
        service = self._deployment.service
        whose = "the queue's slot" if service is None else f"the name {service!r}"
        failure: Exception = MasterUnknown(f"of those who were asked, nobody knows a master with {whose}")
        for node in nodes:
            try:
                found = await (self._ask_node(node) if self._deployment.is_cluster else self._ask_sentinel(node))
            except _NO_ANSWER as error:
                failure = error
            else:
                if found is not None:
                    return found
        raise failure

    async def _ask_node(self, node: Address) -> Address | None:
        found = None
        known = [node]
        for first, last, *servers in await _ask(node, self._settings, "CLUSTER", "SLOTS"):
            # A node that does not know its own name leaves it empty: it is the one that we have reached it by.
            addresses = [(_text(host) or node[0], int(port)) for host, port, *_ in servers]
            known += addresses
            if first <= self._slot <= last:
                found = addresses[0]
        self._known = known
        return found

    async def _ask_sentinel(self, node: Address) -> Address | None:
        own = {"username": self._deployment.sentinel_username, "password": self._deployment.sentinel_password, "db": 0}
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", str(self._deployment.service))
        found = await _ask(node, {**self._settings, **own}, *question)
        return None if found is None else (_text(found[0]), int(found[1]))


async def _ask(node: Address, settings: Mapping[str, Any], *question: str) -> Any:
    """Return the answer of this server, on a connection of its own."""
    kind = SSLConnection if "connection_class" in settings else Connection
    others = {name: value for name, value in settings.items() if name != "connection_class"}
    connection = kind(host=node[0], port=node[1], **others)
    try:
        await connection.connect()  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
        await connection.send_command(*question)
        return await connection.read_response()
    finally:
        await connection.disconnect(nowait=True)


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


class MasterConnection(Connection):
    """A connection to the master, wherever it is at the time."""

    def __init__(self, *, master: Master, **settings: Any) -> None:
        self._master = master
        super().__init__(**settings)

    @property
    def is_outdated(self) -> bool:
        """Whether it goes to another server than new connections do."""
        return self._master.has_left((self.host, self.port))

    @property
    def is_certain(self) -> bool:
        """Whether it goes to the master beyond doubt."""
        return self._master.is_at((self.host, self.port))

    async def is_right(self) -> bool:
        """Tell whether it goes to where the master is, which is found out if it is doubtful."""
        return await self._master.find() == (self.host, self.port)

    async def connect(self) -> None:
        address = await self._master.find()
        if self.is_connected and self.is_outdated:
            await self.disconnect(nowait=True)
        if not self.is_connected:
            self.host, self.port = address
        await super().connect()  # type: ignore[no-untyped-call]  # redis-py leaves it untyped

    async def disconnect(self, *how: Any, **named: Any) -> None:
        # Our calls are bounded from outside, so a server that hangs is noticed by nothing but this.
        self._master.doubt((self.host, self.port))
        await super().disconnect(*how, **named)

    async def read_response(self, *how: Any, **named: Any) -> Any:
        try:
            return await super().read_response(*how, **named)
        except exceptions.ResponseError as error:
            self.note(error)
            raise

    def note(self, error: Exception) -> None:
        """Learn from an error that the server replied whether it is still the master, and which one is."""
        if isinstance(error, exceptions.MovedError):
            self._master.moved((error.host or self.host, error.port))
        elif isinstance(cause(error), exceptions.ReadOnlyError | exceptions.ClusterDownError):
            self._master.doubt((self.host, self.port))


class TlsMasterConnection(MasterConnection, SSLConnection):
    """The same over TLS."""


def master_pool(deployment: Deployment, key: bytes, settings: Mapping[str, Any]) -> ConnectionPool:
    """Make a pool of connections to the server that has `key`; `settings` have precedence over the URL's."""
    from_url = {name: value for name, value in parse_url(deployment.server_url).items() if name not in ("host", "port")}
    seconds = settings["socket_connect_timeout"] / ASKED_IN_TIME
    asking = {"protocol": 2, "retry": settings["retry"], "socket_timeout": seconds, "socket_connect_timeout": seconds}
    master = Master(deployment, key, {**from_url, **asking})
    tls = from_url.pop("connection_class", None) is not None
    kind = TlsMasterConnection if tls else MasterConnection
    return ConnectionPool(kind, **{**from_url, **settings, "master": master})


def slot_of(deployment: Deployment, base: bytes) -> int | None:
    """Return the slot of a cluster that has all keys which begin with `base`; None behind Sentinels.

    Raises:
        StorageError: they are in many slots.
    """
    if not deployment.is_cluster:
        return None
    if not _HASH_TAG.match(base):
        keys = base.decode(errors="replace")
        raise StorageError(f"on a Redis Cluster the prefix has to be in braces, as {{bull}}: keys begin {keys!r}")
    return key_slot(base)


def client_of(url: str, settings: Mapping[str, Any]) -> Redis:
    """Make a client of one server, or of the master that Sentinels watch; not for clusters."""
    deployment = read_deployment(url)
    if deployment is None:
        client: Redis = Redis.from_url(url, **settings)
        return client
    return Redis.from_pool(master_pool(deployment, b"", settings))


def is_outdated(connection: AbstractConnection) -> bool:
    """Tell whether the connection goes to a server that has been replaced since."""
    return isinstance(connection, MasterConnection) and connection.is_outdated


def is_certain(connection: AbstractConnection) -> bool:
    """Tell whether the connection goes to the right server beyond doubt."""
    return not isinstance(connection, MasterConnection) or connection.is_certain


async def is_right(connection: AbstractConnection) -> bool:
    """Tell whether the connection goes to the right server; where that is doubtful, it is found out."""
    return not isinstance(connection, MasterConnection) or await connection.is_right()


def note_error(connection: AbstractConnection, error: Exception) -> None:
    """Let the connection learn from an error that its server replied, if it is one to a master."""
    if isinstance(connection, MasterConnection):
        connection.note(error)
