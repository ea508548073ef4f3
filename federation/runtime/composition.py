"""The composition root: everything concrete is built here, from settings, and closed here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import urlsplit

from db import Database, new_timed_id
from federation.base.database_clock import DatabaseClock
from federation.base.errors import ConfigurationError
from federation.base.meter import NO_METER, Meter, Metrics
from federation.base.own_keys import own_key_ring
from federation.base.queues.job_data import ACTIVITY_JOB
from federation.base.queues.queue import (
    ACTIVITIES_QUEUE_NAME,
    DELIVERY_QUEUE_NAME,
    DISCOVERY_QUEUE_NAME,
    HEALTH_CHECK_QUEUE_NAME,
    TASKS_QUEUE_NAME,
    JobQueue,
    delivery_queue,
    discovery_queue,
    health_check_queue,
    longest_delivery_pause,
    tasks_queue,
)
from federation.base.queues.redis import BLOCKING_TIMEOUT, TaskKeys, redis_client
from federation.base.queues.storages import bullmq_url, is_plain, keyless_redis_url, open_storage, queue_place
from federation.base.settings.settings import Settings
from federation.base.settings.types import JobPayload
from federation.delivery.attempt.crash_suspects import CrashSuspects
from federation.delivery.attempt.host_limits import HostLimits
from federation.delivery.attempt.processor import DeliveryProcessor
from federation.delivery.held.probes import LinkProbes
from federation.delivery.held.release import Releaser
from federation.delivery.held.sweep_times import Sweeps
from federation.delivery.held.sweeper import HeldSweeper
from federation.delivery.job_origins import DeliveryQueue, DeliveryQueues, OtherNodesJobs, OwnJobOrigin
from federation.delivery.ledger.attempt_log import AttemptLog
from federation.delivery.ledger.ledger import DatabaseWatch, Ledger
from federation.delivery.outbox.outbox import Outbox
from federation.delivery.outbox.sweeper import OutboxSweeper
from federation.delivery.rows import Payloads
from federation.delivery.sightings import Sightings, UnnamedProxies
from federation.delivery.wire import Wire, Wires
from federation.http.client import FederationClient, FederationFetch, SendThroughPeer
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool, pool_limits
from federation.monitoring.endpoints import Endpoints
from federation.monitoring.readiness import Readiness, WriteTrials, node_checks, serving_checks
from federation.node.limits import MemoryWindows, RedisWindows, Windows
from federation.sealed.outbound.activities import Producers
from federation.sealed.outbound.wire import SealedWire
from federation.sealed.peers.discovery import Discovery, SharedDiscovery
from federation.sealed.peers.discovery_queue import DiscoveryProcessor, QueuedDiscovery
from federation.sealed.peers.health_checks import HealthCheckProcessor, HealthSchedule, LongRangeProbes, ProbePlan
from federation.sealed.peers.key_rotation import KeyRotation
from federation.sealed.peers.own_identity import OwnIdentity
from federation.sealed.peers.probe import Probe
from federation.sealed.peers.registry import Registry
from federation.sealed.relays.peers import RelayPeers, RelayRanking
from federation.sealed.relays.send import PeerRelay
from federation.servers.blacklist import Blacklist
from federation.servers.links import Links
from workers.clock import Clock
from workers.storage.base import Storage

if TYPE_CHECKING:
    from fastapi import FastAPI
    from redis.asyncio import Redis

    from federation.node.clients import ClientStanding
    from federation.runtime.activitypub import ActivityPub

MARKS_NAME: Final = "federation-tasks-keys"
"""Takes the place of a queue's name in Redis keys; no queue of ours has this name."""

OpenStorage: TypeAlias = Callable[[str], Storage]
OtherWires: TypeAlias = "Callable[[Federation], Sequence[Wire]]"


def no_others(_: Federation) -> Sequence[Wire]:
    """Make no wire beside the sealed one."""
    return ()


NO_OWN_QUEUES: Final[Mapping[str, str]] = {}


class Federation:
    """One node's parts, wired. Cheap to make: connections open on first use; `close` ends what was opened.

    `client` replaces the HTTP client, for tests. `delivery_processor` works on its own; `shared_delivery_processor`
    leaves discoveries to the discovery worker that has to run beside it. `metrics` is told of everything that is
    counted. `clock` replaces the time that processes share, see `DatabaseClock`. `database`, and `storage`, which opens
    the queue of a name, replace those that the settings choose. `new_id` makes the ids of deliveries. `wires` makes
    those that send jobs of the names that they claim, of the parts of this node; all others are the sealed wire's.
    `own_queues` names the queues, by the names of jobs that do not lie in the delivery queue.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        client: FederationClient | None = None,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
        database: Database | None = None,
        storage: OpenStorage | None = None,
        new_id: Callable[[], str] = new_timed_id,
        wires: OtherWires = no_others,
        own_queues: Mapping[str, str] = NO_OWN_QUEUES,
    ) -> None:
        self.settings = settings
        self._storage = storage
        self._wires, self._own_queues = wires, own_queues
        self.metrics = metrics
        self.meter: Meter = metrics or NO_METER
        self.own_url = settings.better_auth_url
        self.keys = own_key_ring(settings)
        self.database = database or Database(settings.database_url.get_secret_value())
        self.clock: Clock = clock or DatabaseClock(self.database)
        self.identity = OwnIdentity(self.keys, self.database) if self.keys is not None else None
        self.guard = AddressGuard(settings.dev_allowed_hostnames)
        self._given_client = client
        self.client = client or FederationClient(self.guard, ConnectionPool(self.guard, limits=pool_limits(settings)))
        # In this order: each part is made of those before it.
        self._make_queues(own_queues)
        self._make_servers()
        self.activitypub = self._make_activitypub()
        others = wires(self) if self.activitypub is None else (*wires(self), self.activitypub.wire)
        self._make_outbox(new_id, others)
        self._make_processors(others)
        self._make_held()
        self._make_probes()
        self._make_checks()

    def _make_queues(self, own_queues: Mapping[str, str]) -> None:
        settings = self.settings
        self.job_origin = OwnJobOrigin(self.database, self.own_url)
        inline = settings.federation_job_payload is JobPayload.INLINE
        self.delivery_queue = self._delivery_queue(DELIVERY_QUEUE_NAME, inline=inline)
        named = {ACTIVITY_JOB: ACTIVITIES_QUEUE_NAME, **own_queues}
        own = {name: self._delivery_queue(name) for name in dict.fromkeys(named.values())}
        self.delivery_queues = DeliveryQueues(
            self.delivery_queue,
            {job: own[name] for job, name in named.items()},
            off=() if settings.federation_activitypub else (ACTIVITY_JOB,),
        )
        self.sightings = Sightings(self.database, queue_place(settings), meter=self.meter, clock=self.clock)
        self.health_check_queue = health_check_queue(settings, self._open_storage(HEALTH_CHECK_QUEUE_NAME))
        self.discovery_queue = discovery_queue(self._open_storage(DISCOVERY_QUEUE_NAME))
        self.tasks_queue = tasks_queue(self._open_storage(TASKS_QUEUE_NAME))

    def _make_servers(self) -> None:
        self.schedule_health_check = HealthSchedule(
            self.health_check_queue,
            first_delay=self.settings.federation_health_first_delay,
            step=self.settings.federation_health_step,
        )
        self.blacklist = Blacklist(self.database, clock=self.clock)
        self.registry = Registry(
            self.database,
            schedule_health_check=self.schedule_health_check,
            blacklist=self.blacklist,
            clock=self.clock,
        )
        self.links = Links(self.database, self.registry, clock=self.clock)
        self.relay_ranking = RelayRanking(self.database, clock=self.clock)
        self.relay_peers = RelayPeers(
            self.database, self.registry, self.client, own_url=self.own_url or "", ranking=self.relay_ranking
        )
        self.fetch = FederationFetch(self.client, mark_unhealthy=self.registry.mark_unhealthy, relay=self._relay())
        self.discovery = Discovery(
            own_url=self.own_url,
            identity=self.identity,
            fetch=self.fetch,
            registry=self.registry,
            links=self.links,
            clock=self.clock,
        )
        self.key_rotation = self._key_rotation()
        self.queued_discovery = QueuedDiscovery(self.discovery_queue, self.registry)
        self.discovery_processor = DiscoveryProcessor(self.discovery)
        self.probe = Probe(self.registry, self.fetch, self.links, own_url=self.own_url)

    def _make_outbox(self, new_id: Callable[[], str], others: Sequence[Wire]) -> None:
        self._sealed = self._sealed_wire()
        self.wires = Wires(self._sealed, *others)
        self.outbox = Outbox(
            self.database,
            self.delivery_queues,
            check=self.wires.check,
            joins=self.queues_join_database,
            clock=self.clock,
            new_id=new_id,
        )
        self.sweeps = Sweeps(self.database)
        self.outbox_sweeper = OutboxSweeper(
            self.database,
            self.delivery_queues,
            min_age=self.settings.federation_outbox_interval,
            longest_pause=longest_delivery_pause(self.settings),
            clock=self.clock,
        )

    def _make_activitypub(self) -> ActivityPub | None:
        if not self.settings.federation_activitypub:
            return None
        from federation.runtime.activitypub import activitypub_of  # here: no other node has a use for it

        return activitypub_of(self, given=self._given_client)

    def _make_processors(self, others: Sequence[Wire]) -> None:
        settings = self.settings
        self.payloads = Payloads(self.database)
        self.ledger = Ledger(self.database, add_jobs=self.delivery_queues.add_bulk, clock=self.clock)
        self.attempts = AttemptLog(self.database, meter=self.meter)
        self.database_watch = DatabaseWatch(self.database)
        self.crash_suspects = CrashSuspects()
        self.host_limits = HostLimits(per_server=settings.federation_per_server, most=settings.federation_overtime)
        self.delivery_processor = self._delivery_processor(self.wires)
        self.shared_delivery_processor = self._delivery_processor(
            Wires(self._sealed_wire(self.queued_discovery), *others)
        )

    def _make_held(self) -> None:
        settings = self.settings
        self.held_sweeper = HeldSweeper(
            self.database,
            self.delivery_queues,
            links=self.links,
            blacklist=self.blacklist,
            wires=self.wires.names,
            max_age=settings.federation_delivery_max_age,
            meter=self.meter,
            clock=self.clock,
        )
        self.releaser = Releaser(
            self.database,
            self.delivery_queues,
            links=self.links,
            wires=self.wires.names,
            rate=settings.federation_release_rate,
            most_waiting=2 * settings.federation_delivery_concurrency,
            meter=self.meter,
            clock=self.clock,
        )
        self.link_probes = LinkProbes(
            links=self.links,
            blacklist=self.blacklist,
            is_well=self.wires.is_well,
            send_canary=self.releaser.send_canary,
            newly_held=self.held_sweeper.newly_held,
            wires=self.wires.names,
        )

    def _make_probes(self) -> None:
        settings = self.settings
        self.probe_plan = ProbePlan(
            checks=settings.federation_health_checks,
            quick_first=settings.federation_health_first_delay,
            quick_step=settings.federation_health_step,
            first=settings.federation_long_probe_first,
            maximum=settings.federation_long_probe_maximum,
        )
        self.long_range_probes = LongRangeProbes(
            self.database,
            registry=self.registry,
            probe=self.probe,
            plan=self.probe_plan,
            clock=self.clock,
        )
        self.health_check_processor = HealthCheckProcessor(
            registry=self.registry,
            probe=self.probe,
            schedule=self.schedule_health_check,
            checks=settings.federation_health_checks,
        )

    def _make_checks(self) -> None:
        self.write_trials = WriteTrials(self.database)
        checks = node_checks(
            database=self.database, writes=self.write_trials, queues=self.delivery_queues.all, blacklist=self.blacklist
        )
        self.readiness = Readiness(checks)
        self.serving_readiness = Readiness(serving_checks(checks, self.database))
        self.unnamed_proxies = UnnamedProxies(
            self.database, named=self.settings.federation_trusted_proxies, clock=self.clock
        )

    def _key_rotation(self) -> KeyRotation | None:
        """Return None for a node without a URL or keys: nobody knows it by any."""
        if self.own_url is None or self.keys is None:
            return None
        return KeyRotation(
            own_url=self.own_url,
            ring=self.keys,
            database=self.database,
            registry=self.registry,
            fetch=self.fetch,
            introduce=self.discovery.introduce_ourselves,
            clock=self.clock,
        )

    def _relay(self) -> SendThroughPeer | None:
        """Return None for a node without a URL or keys: no peer would relay for it."""
        if self.own_url is None or self.keys is None:
            return None
        return PeerRelay(
            own_url=self.own_url,
            keys=self.keys,
            client=self.client,
            registry=self.registry,
            peers=self.relay_peers,
            meter=self.meter,
            clock=self.clock,
        )

    def _sealed_wire(self, discover: SharedDiscovery | None = None) -> SealedWire:
        return SealedWire(
            own_url=self.own_url,
            keys=self.keys,
            registry=self.registry,
            links=self.links,
            discovery=self.discovery,
            discover=discover,
            probe=self.probe,
            guard=self.guard,
            fetch=self.fetch,
            clock=self.clock,
        )

    def _delivery_processor(self, wires: Wires) -> DeliveryProcessor:
        return DeliveryProcessor(
            wires=wires,
            blacklist=self.blacklist,
            links=self.links,
            payloads=self.payloads,
            ledger=self.ledger,
            attempts=self.attempts,
            host_limits=self.host_limits,
            crash_suspects=self.crash_suspects,
            database_watch=self.database_watch,
            other_nodes_jobs=OtherNodesJobs(self.job_origin, self.sightings, self.clock),
            clock=self.clock,
        )

    def another(self) -> Federation:
        """Make a node with the same settings and wires for another event loop, as connections cannot leave theirs."""
        return Federation(self.settings, wires=self._wires, own_queues=self._own_queues)

    def worker_storage(self, queue: str) -> Storage:
        """Open the storage that a worker of this process uses, on the workers' own connection."""
        return self._storage(queue) if self._storage else open_storage(self.settings, queue, client=self.worker_redis)

    def _delivery_queue(self, name: str, *, inline: bool = False) -> JobQueue:
        make = partial(DeliveryQueue, database=self.database, origin=self.job_origin, inline=inline)
        return delivery_queue(self.settings, self._open_storage(name), make=make)

    def _open_storage(self, queue: str) -> Storage:
        return self._storage(queue) if self._storage else open_storage(self.settings, queue, client=self.redis)

    @cached_property
    def own_client(self) -> FederationClient:
        """The client that may also ask this node itself, by its public name. Our own address may well be private."""
        if self._given_client is not None:
            return self._given_client
        guard = AddressGuard(self.guard.allowed_hostnames | {urlsplit(self.own_url or "").hostname or ""})
        return FederationClient(guard, ConnectionPool(guard))

    @cached_property
    def redis(self) -> Redis | None:
        """The producers' Redis client, or None without a Redis."""
        return redis_client(self.settings)

    @cached_property
    def windows(self) -> Windows:
        """What counts who asks this node for something."""
        return RedisWindows(self.redis) if self.redis is not None else MemoryWindows()

    @cached_property
    def worker_redis(self) -> Redis | None:
        """The workers' Redis client, apart from the producers', so that a busy worker never delays an enqueue."""
        return redis_client(self.settings, BLOCKING_TIMEOUT)

    @cached_property
    def task_keys(self) -> TaskKeys | None:
        """Where tasks' deduplication keys are kept on BullMQ and Bull; None elsewhere, where the queues keep them."""
        url = keyless_redis_url(self.settings)
        if url is None:
            return None
        place = self.redis if self.redis is not None and is_plain(url) else url
        return TaskKeys(place, prefix=f"{self.settings.federation_queue_prefix}:{MARKS_NAME}")

    @property
    def producers(self) -> Producers:
        """The builder of activities in this node's name.

        Raises:
            ConfigurationError: the node has no URL of its own.
        """
        if self.own_url is None:
            raise ConfigurationError(["BETTER_AUTH_URL: not set; activities carry it as their origin"])
        return Producers(
            own_url=self.own_url,
            outbox=self.outbox,
            registry=self.registry,
            discovery=self.discovery,
            clock=self.clock,
        )

    def node_app(self, *, standing: ClientStanding | None = None) -> FastAPI:
        """Create the inbound side. With *standing*, the server may turn clients away before the application sees them.

        Raises:
            ConfigurationError: the node has no URL or no keys of its own.
        """
        # Imported here, because only nodes that serve need the `node` extra.
        from federation.node.app import NodeParts, create_node_app
        from federation.node.clients import Clients, ClientStanding
        from federation.node.limits import deliveries_limit
        from federation.node.monitoring import MonitoringRoutes

        self.settings.require_identity()
        assert self.own_url is not None
        assert self.keys is not None
        clients = Clients(self.settings.federation_trusted_proxies, unnamed=self.unnamed_proxies)
        return create_node_app(
            NodeParts(
                own_url=self.own_url,
                keys=self.keys,
                database=self.database,
                registry=self.registry,
                links=self.links,
                fetch=self.fetch,
                guard=self.guard,
                discovery=self.discovery,
                windows=self.windows,
                clients=clients,
                per_client=deliveries_limit(self.settings.federation_inbound_per_client),
                per_origin=deliveries_limit(self.settings.federation_inbound_per_origin),
                standing=standing or ClientStanding(),
                meter=self.meter,
                monitoring=MonitoringRoutes(
                    Endpoints(self.serving_readiness, self.metrics),
                    clients=clients,
                    readers=self.settings.federation_metrics_clients,
                ),
                activitypub=None if self.activitypub is None else self.activitypub.served_for(self),
            )
        )

    async def close(self) -> None:
        """Write everything and close every connection. Stop workers first. A second call does nothing."""
        async with contextlib.AsyncExitStack() as stack:  # each step runs, whatever the others raise
            stack.push_async_callback(self.database.close)
            stack.push_async_callback(self.unnamed_proxies.close)
            stack.push_async_callback(self.ledger.close)
            stack.push_async_callback(self.payloads.close)
            stack.push_async_callback(self.registry.close)
            stack.push_async_callback(self.links.close)
            if self.activitypub is not None:
                stack.push_async_callback(self.activitypub.close)
            for client in (self.redis, self.worker_redis):
                if client is not None:
                    stack.push_async_callback(client.aclose)
            if self.task_keys is not None:
                stack.push_async_callback(self.task_keys.close)
            stack.push_async_callback(self.client.close)
            if "own_client" in vars(self):  # somebody asked
                stack.push_async_callback(self.own_client.close)
            stack.push_async_callback(self.discovery.close)
            stack.push_async_callback(self.relay_ranking.close)
            stack.push_async_callback(self.relay_peers.close)
            stack.push_async_callback(self.tasks_queue.stop)
            stack.push_async_callback(self.discovery_queue.stop)
            stack.push_async_callback(self.queued_discovery.close)
            stack.push_async_callback(self.health_check_queue.stop)
            stack.push_async_callback(self.delivery_queues.stop)
            stack.push_async_callback(self.attempts.close)
            stack.push_async_callback(self.write_trials.close)
            stack.push_async_callback(self.readiness.close)
            stack.push_async_callback(self.serving_readiness.close)
            stack.push_async_callback(self.outbox.close)

    @property
    def queues_join_database(self) -> bool:
        """Whether the queues live in the application's database, so that jobs can be part of its transactions."""
        return self._storage is None and self.settings.queue_url is None and bullmq_url(self.settings) is None
