"""Valkey servers that stand in for each other: a cluster, and a master with a replica that a Sentinel watches."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from tests.patience import eventually, until
from tests.servers import Caretaker, Tell, ValkeyProcess, free_port, tell_nobody, valkey

NODE_TIMEOUT_MS: Final = 1_000
"""When a cluster with replicas takes a node that does not answer for dead; one without is more patient."""
DOWN_AFTER_MS: Final = 500
"""When a Sentinel does."""
SLOTS: Final = 16_384
SERVICE: Final = "the-master"


def ask(server: ValkeyProcess, *command: str | int) -> Any:
    """The server's answer to the command."""
    with Redis(port=server.port, decode_responses=True) as client:
        client.response_callbacks.clear()
        return client.execute_command(*command)


class ClusterNode(ValkeyProcess):
    """A node that knows all others when it starts."""

    def __init__(self, directory: Path, tell: Tell = tell_nobody, *, timeout_ms: int = NODE_TIMEOUT_MS) -> None:
        super().__init__(directory, tell)
        self._timeout_ms = timeout_ms
        self.id = secrets.token_hex(20)
        self.bus_port = free_port()

    @property
    def arguments(self) -> Sequence[str]:
        return (
            *(*super().arguments, "--cluster-enabled", "yes", "--cluster-port", str(self.bus_port)),
            *("--cluster-node-timeout", str(self._timeout_ms), "--cluster-replica-validity-factor", "0"),
            *("--repl-diskless-sync-delay", "0"),
        )

    def know(self, nodes: Sequence[str]) -> None:
        """What the node finds when it starts: a line for each, its own among them."""
        place = _place(self)
        lines = [line.replace(place, f"{place} myself,").replace("myself, ", "myself,") for line in nodes]
        lines.append(f"vars currentEpoch {len(nodes)} lastVoteEpoch 0\n")
        (self.directory / "nodes.conf").write_text("\n".join(lines))


class Cluster:
    """Masters that share the slots, and as many replicas."""

    def __init__(self, masters: Sequence[ClusterNode], replicas: Sequence[ClusterNode]) -> None:
        self.nodes = (*masters, *replicas)
        lines = []
        for number, master in enumerate(masters):
            first, after = (SLOTS * edge // len(masters) for edge in (number, number + 1))
            lines.append(f"{_place(master)} master - 0 0 {number + 1} connected {first}-{after - 1}")
        for number, (replica, master) in enumerate(zip(replicas, masters, strict=False)):
            lines.append(f"{_place(replica)} slave {master.id} 0 0 {number + 1} connected")
        for node in self.nodes:
            node.know(lines)
            node.start()

    @property
    def url(self) -> str:
        """It names two of the nodes."""
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port},127.0.0.1:{self.nodes[1].port}"

    async def ready(self) -> None:
        """All slots are served, and replicas follow their masters."""
        for node in self.nodes:
            await eventually(partial(_told, node, "CLUSTER", "INFO"), lambda told: "cluster_state:ok" in told)
            await eventually(partial(_told, node, "INFO"), lambda told: "master_link_status:down" not in told)

    def master_of(self, key: bytes) -> ClusterNode:
        """The server that has the key, as the first node that answers sees it."""
        slot = key_slot(key)
        for node in self.nodes:
            with contextlib.suppress(RedisError):
                for first, last, (_, port, *_), *_ in ask(node, "CLUSTER", "SLOTS"):
                    if first <= slot <= last:
                        return next(one for one in self.nodes if one.port == port)
        raise AssertionError(f"nobody has slot {slot}")


def _place(node: ClusterNode) -> str:
    return f"{node.id} 127.0.0.1:{node.port}@{node.bus_port}"


async def _told(server: ValkeyProcess, *command: str) -> str:
    try:
        return str(ask(server, *command))
    except RedisError as error:
        return repr(error)


@contextlib.contextmanager
def cluster(*, masters: int = 3, replicas: int = 3) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        timeout_ms = NODE_TIMEOUT_MS if replicas else 20 * NODE_TIMEOUT_MS
        nodes = [_node(stack, timeout_ms) for _ in range(masters + replicas)]
        yield Cluster(nodes[:masters], nodes[masters:])


def _node(stack: contextlib.ExitStack, timeout_ms: int) -> ClusterNode:
    tell = stack.enter_context(Caretaker("fd-cluster-"))
    node = ClusterNode(tell.directory, tell, timeout_ms=timeout_ms)
    stack.callback(node.kill)
    return node


class SentinelProcess(ValkeyProcess):
    """A Sentinel that watches the master at this port alone."""

    def __init__(self, port: int, directory: Path, tell: Tell = tell_nobody) -> None:
        super().__init__(directory, tell)
        settings = [
            *("bind 127.0.0.1", f"port {self.port}", f"dir {directory}"),
            f"sentinel monitor {SERVICE} 127.0.0.1 {port} 1",
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {SERVICE} 1000",
        ]
        (directory / "sentinel.conf").write_text("\n".join(settings) + "\n")

    @property
    def arguments(self) -> Sequence[str]:
        return (str(self.directory / "sentinel.conf"), "--sentinel")

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.port}/{SERVICE}/0"


class Watched:
    """A master, its replica, and the Sentinel that watches them."""

    def __init__(self, first: ValkeyProcess, second: ValkeyProcess, sentinel: SentinelProcess) -> None:
        self.servers, self.sentinel = (first, second), sentinel

    @property
    def url(self) -> str:
        return self.sentinel.url

    async def ready(self) -> None:
        """The replica follows, and the Sentinel knows it."""
        await until(lambda: "master_link_status:up" in ask(self.servers[1], "INFO", "replication"))
        await until(lambda: "slaves=1" in ask(self.sentinel, "INFO", "sentinel"))

    @property
    def master(self) -> ValkeyProcess:
        _, port = ask(self.sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(server for server in self.servers if server.port == int(port))


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    with contextlib.ExitStack() as stack:
        quick = ("--repl-diskless-sync-delay", "0")
        master = stack.enter_context(valkey(*quick))
        replica = stack.enter_context(valkey("--replicaof", "127.0.0.1", str(master.port), *quick))
        yield Watched(master, replica, stack.enter_context(sentinel_of(master.port)))


@contextlib.contextmanager
def sentinel_of(port: int) -> Iterator[SentinelProcess]:
    """A Sentinel for the master at this port."""
    with Caretaker("fd-sentinel-") as tell:
        sentinel = SentinelProcess(port, tell.directory, tell)
        try:
            sentinel.start()
            yield sentinel
        finally:
            sentinel.kill()
