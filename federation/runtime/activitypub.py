"""What a node has that sends by ActivityPub; no other node imports this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import cached_property, partial
from typing import Final, Protocol

from db import Database
from federation.activitypub.actors import Actors
from federation.activitypub.application import Door, Node, inbox_of, serving_of
from federation.activitypub.follows import FollowHandlers, FollowTotals
from federation.activitypub.handlers import HANDLERS
from federation.activitypub.inbox import SHARED_INBOX, ActivitiesInbox
from federation.activitypub.inboxes import gone_among
from federation.activitypub.keys import ActorKeys
from federation.activitypub.outbound import Senders
from federation.activitypub.purge import ActivityPurge
from federation.activitypub.received import HANDLE, ReceivedJobs
from federation.activitypub.received_runner import ReceivedRunner
from federation.activitypub.refused import Asker, Refused, Why
from federation.activitypub.remote_actors import InstanceSigner, RemoteActors
from federation.activitypub.remote_keys import MOST_AT_ONCE, MOST_PER_ORIGIN, RemoteKeys
from federation.activitypub.serving import Serving
from federation.activitypub.signatures import SignatureKind
from federation.activitypub.wire import ActivityWire
from federation.base.meter import Meter
from federation.base.settings.settings import Settings
from federation.delivery.outbox.outbox import Outbox
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool, PoolLimits
from federation.node.limits import Limit, Windows, deliveries_limit, spent_on_keys, spent_on_new_servers
from federation.protocol.keys import KeyRing
from federation.servers.blacklist import Blacklist
from federation.servers.links import Links
from workers import Handler, Queue
from workers.clock import Clock

KEY_CONNECTIONS: Final = PoolLimits(
    connections=MOST_AT_ONCE, connections_per_server=MOST_PER_ORIGIN, idle_servers=MOST_AT_ONCE
)
"""Apart from those of deliveries: whoever sends to us says where keys are fetched."""


class OtherParts(Protocol):
    """What a node has in any case, of which these parts are made."""

    settings: Settings
    database: Database
    keys: KeyRing | None
    guard: AddressGuard
    client: FederationClient
    links: Links
    blacklist: Blacklist
    outbox: Outbox
    tasks_queue: Queue
    meter: Meter
    clock: Clock

    @property
    def own_client(self) -> FederationClient: ...
    @property
    def windows(self) -> Windows: ...
    @property
    def queues_join_database(self) -> bool: ...


class ActivityPub:
    """A node's actors, the keys by which they sign and are known, what owes their activities, and what sends them.

    `key_client` fetches keys of others; `windows` returns what counts who has it do so.

    What others send is handled by jobs in `tasks_queue`, which `joins` the database or does not. `outbox` returns what
    writes rows: it is made of the node's wires, one of which is this. Close it.

    Raises:
        ConfigurationError: the node has no URL or no keys of its own.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        database: Database,
        ring: KeyRing | None,
        links: Links,
        client: FederationClient,
        key_client: FederationClient,
        own_client: Callable[[], FederationClient],
        guard: AddressGuard,
        blacklist: Blacklist,
        outbox: Callable[[], Outbox],
        tasks_queue: Queue,
        joins: bool,
        windows: Callable[[], Windows],
        meter: Meter,
        clock: Clock,
    ) -> None:
        settings.require_identity()
        assert settings.better_auth_url is not None
        self._settings = settings
        self._own_url = settings.better_auth_url
        self._database = database
        self._blacklist = blacklist
        self._links = links
        self._windows = windows
        self._outbox = outbox
        self._clock = clock
        self._meter = meter
        bits = settings.federation_activitypub_key_bits
        self.actors = Actors(ring=ring, bits=bits, clock=clock, own_url=self._own_url)
        self.keys = ActorKeys(database, ring, clock)
        self.wire = ActivityWire(
            own_url=self._own_url,
            keys=self.keys,
            links=links,
            client=client,
            own_client=own_client,
            guard=guard,
            database=database,
            first_knock=SignatureKind(settings.federation_activitypub_first_knock.value),
            allow_http=settings.federation_activitypub_http,
            clock=clock,
            meter=meter,
        )
        self.purge = ActivityPurge(database)
        self._key_client = key_client
        self._follow_totals = FollowTotals(database)
        self.count_follows = self._follow_totals.count
        signer = InstanceSigner(
            own_url=self._own_url, database=database, actors=self.actors, keys=self.keys, clock=clock
        )
        self.remote_actors = RemoteActors(client, sign=signer)
        self.remote_keys = RemoteKeys(
            own_url=self._own_url,
            database=database,
            client=key_client,
            guard=guard,
            signer=signer,
            clock=clock,
            kept=settings.federation_activitypub_key_cache,
            allow_http=settings.federation_activitypub_http,
        )
        self.received = ReceivedJobs(tasks_queue, database=database, joins=joins, clock=clock)

    @cached_property
    def senders(self) -> Senders:
        """What owes activities."""
        return Senders(
            own_url=self._own_url,
            inserter=self._outbox().inserter,
            gone_among=gone_among,
            allow_http=self._settings.federation_activitypub_http,
            allowed_hostnames=self._settings.dev_allowed_hostnames,
            clock=self._clock,
        )

    @cached_property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers of jobs in the tasks' queue that are not the application's."""
        own = FollowHandlers(
            database=self._database,
            outbox=self._outbox(),
            senders=self.senders,
            blacklist=self._blacklist,
            remote=self.remote_actors,
            inboxes=self.wire.inboxes,
            handlers=HANDLERS,
            clock=self._clock,
        )
        runner = ReceivedRunner(
            database=self._database,
            begin=self._outbox().transaction,
            jobs=self.received,
            own=own,
            handlers=HANDLERS,
            clock=self._clock,
            meter=self._meter,
        )
        return {HANDLE: Handler(runner)}

    @cached_property
    def inbox(self) -> ActivitiesInbox:
        """What takes activities of others."""
        return ActivitiesInbox(
            own_url=self._own_url,
            database=self._database,
            keys=self.remote_keys,
            blacklist=self._blacklist,
            links=self._links,
            keep=self.received.keep,
            admit=partial(admit_fetch, self._windows),
            window=self._settings.federation_activitypub_window,
            clock=self._clock,
            meter=self._meter,
        )

    @cached_property
    def door(self) -> Door:
        """Who may come to an application that is mounted elsewhere, by the settings of a node's own port."""
        limit = deliveries_limit(self._settings.federation_inbound_per_client)
        return Door(
            proxies=self._settings.federation_trusted_proxies, admit=partial(admit_request, self._windows, limit)
        )

    def served_for(self, node: Node) -> tuple[Serving, ActivitiesInbox]:
        """Return what a node's own port answers with: of its actors, and of what others post to their inboxes."""
        return serving_of(node), inbox_of(node)

    async def close(self) -> None:
        """Stop reading."""
        async with AsyncExitStack() as stack:  # each step runs, whatever the others raise
            stack.push_async_callback(self.wire.close)
            stack.push_async_callback(self.keys.close)
            stack.push_async_callback(self._follow_totals.close)
            stack.push_async_callback(self._key_client.close)


async def admit_request(windows: Callable[[], Windows], limit: Limit, asker: Asker) -> None:
    """Count an activity that somebody brings; who is not known is always let in.

    Raises:
        Refused: 429, he has brought too many.
    """
    if asker.client is not None and not await windows().allows(f"{SHARED_INBOX}:{asker.client}", limit):
        raise _too_many(limit, "activities")


async def admit_fetch(windows: Callable[[], Windows], asker: Asker, is_known: bool) -> None:
    """Count a key that we fetch for somebody, from a server that is known or is not.

    Raises:
        Refused: 429, he has had us fetch too many.
    """
    if is_known:
        limit = await spent_on_keys(windows(), client=asker.client)
    else:
        limit = await spent_on_new_servers(windows(), client=asker.client, network=asker.network)
    if limit is not None:
        raise _too_many(limit, "keys")


def _too_many(limit: Limit, things: str) -> Refused:
    seconds = round(limit.window.total_seconds())
    told = f"More than {limit.requests} {things} in {seconds} seconds"
    return Refused(Why.LIMIT, 429, told, retry_seconds=seconds)


def activitypub_of(node: OtherParts, *, given: FederationClient | None) -> ActivityPub:
    """Make these parts of a node's others. *given* is the client that the node was made with, if it was."""
    return ActivityPub(
        node.settings,
        database=node.database,
        ring=node.keys,
        links=node.links,
        client=node.client,
        key_client=given or FederationClient(node.guard, ConnectionPool(node.guard, limits=KEY_CONNECTIONS)),
        own_client=lambda: node.own_client,
        guard=node.guard,
        blacklist=node.blacklist,
        outbox=lambda: node.outbox,
        tasks_queue=node.tasks_queue,
        joins=node.queues_join_database,
        windows=lambda: node.windows,
        meter=node.meter,
        clock=node.clock,
    )
