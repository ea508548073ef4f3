"""The inbound side of a node: its endpoints, and the checks in front of them.

Nothing in a request is believed before a signature or a fetch of our own confirms it. Requests are handled without the
framework's dependency and validation machinery: every bound and every error here is part of the wire protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import FastAPI

from db import Database
from federation.base.meter import NO_METER, Meter
from federation.base.settings.reach import gaps
from federation.http.client import FederationFetch
from federation.http.guard import AddressGuard
from federation.node.admission import (
    DELIVERIES,
    DISCOVER_PER_CLIENT,
    RELAY_PER_CLIENT,
    ROTATION_PER_CLIENT,
    BlacklistGate,
    NewServers,
    PerClient,
    PerOrigin,
    PerRelayingOrigin,
    ProxyAdmission,
    too_large_to_relay,
)
from federation.node.callback import Callback
from federation.node.clients import Clients, ClientStanding
from federation.node.discover import MAX_DISCOVER_REQUEST_BYTES, Discover, KeyCheck
from federation.node.follows import FOLLOWS_PATH, FollowsInbox
from federation.node.forwarding import Forwarder
from federation.node.front import Front
from federation.node.heavy import HeavyWork
from federation.node.inbox import Inbox
from federation.node.limits import Limit, Windows
from federation.node.monitoring import MonitoringRoutes
from federation.node.posts import POSTS_PATH, PostsInbox
from federation.node.proxy import ProxyEndpoint, TargetedInbox
from federation.node.registration import Registration
from federation.node.rotation import RotationConfirm, RotationStart
from federation.protocol.activities import DELIVERY_MEMBERS, MAX_REQUEST_BYTES
from federation.protocol.keys import KeyRing
from federation.protocol.relaying import MAX_RELAYED_BYTES, RELAY_PATH, ProxyRequest, TargetedRequest
from federation.protocol.rotation import ROTATE_CONFIRM_PATH, ROTATE_INIT_PATH
from federation.protocol.skimming import members_of
from federation.sealed.peers.claims import Claims
from federation.sealed.peers.discovery import Discovery
from federation.sealed.peers.own_identity import OwnIdentity
from federation.sealed.peers.registry import Registry
from federation.servers.links import Links

if TYPE_CHECKING:
    from federation.activitypub.inbox import ActivitiesInbox
    from federation.activitypub.serving import Serving


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """What an inbound side that serves as *own_url*, in canonical form, is made of. It opens and closes none of them.

    *fetch* and *discovery* should send through the same *guard*. *per_client* and *per_origin* limit follows and posts;
    *standing* turns away clients whose requests are refused again and again. *activitypub* answers, and
    takes activities, where there is no endpoint.
    """

    own_url: str
    keys: KeyRing
    database: Database
    registry: Registry
    links: Links
    fetch: FederationFetch
    guard: AddressGuard
    discovery: Discovery
    windows: Windows
    clients: Clients
    per_client: Limit = DELIVERIES
    per_origin: Limit = DELIVERIES
    standing: ClientStanding = field(default_factory=ClientStanding)
    meter: Meter = NO_METER
    monitoring: MonitoringRoutes | None = None
    activitypub: tuple[Serving, ActivitiesInbox] | None = None


def create_node_app(node: NodeParts) -> FastAPI:
    """Create an ASGI application of these parts.

    Where `user`, `posts` or `blocks` is missing, or a column of them, follows and posts are refused with its name.
    """
    gate, heavy = BlacklistGate(node.registry), HeavyWork()
    front = Front(
        gate=gate,
        gaps=lambda: gaps(node.database),
        clients=node.clients,
        standing=node.standing,
        heavy=heavy,
        meter=node.meter,
    )
    inbox = Inbox(
        keys=node.keys,
        registry=node.registry,
        gate=gate,
        heard=node.links.look_soon,
        per_origin=PerOrigin(node.per_origin, windows=node.windows),
        heavy=heavy,
    )
    # The framework's documentation pages load scripts from elsewhere, and would not describe the wire protocol.
    app = FastAPI(title="Federation node", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    admit_new = NewServers(windows=node.windows)
    _add_discovery(app, node, front, gate, admit_new)
    _add_rotation(app, node, front)
    _add_deliveries(app, node, front, inbox, admit_new)
    if node.monitoring is not None:
        node.monitoring.add_to(app)
    if node.activitypub is not None:
        _add_actors(app, node, front, *node.activitypub)
    return app


def _add_actors(app: FastAPI, node: NodeParts, front: Front, actors: Serving, inbox: ActivitiesInbox) -> None:
    """Let actors be found, and take activities, where there is no endpoint.

    They are no route: one for every path would answer also where an endpoint refuses a method.
    """
    from federation.activitypub.application import ActorsApp  # here: no other node has a use for it
    from federation.activitypub.inbox import SHARED_INBOX
    from federation.node.activities import ActivitiesEndpoint, InboxesFirst

    admit = PerClient(node.per_client, clients=node.clients, windows=node.windows, path=SHARED_INBOX)
    endpoint = ActivitiesEndpoint(inbox, admit=admit).on(front)
    app.router.default = InboxesFirst(endpoint, ActorsApp(lambda: actors, lambda: inbox))


def _per_client(node: NodeParts, limit: Limit) -> PerClient:
    return PerClient(limit, clients=node.clients, windows=node.windows)


def _add_discovery(app: FastAPI, node: NodeParts, front: Front, gate: BlacklistGate, admit_new: NewServers) -> None:
    identity, callback = OwnIdentity(node.keys, node.database), Callback(node.fetch)
    discover = Discover(
        own_url=node.own_url,
        identity=identity,
        database=node.database,
        registration=Registration(
            own_url=node.own_url,
            identity=identity,
            registry=node.registry,
            claims=Claims(own_url=node.own_url, ring=node.keys, registry=node.registry, fetch=node.fetch),
            heard=node.links.look_soon,
            callback=callback,
            guard=node.guard,
            admit_new=admit_new,
        ),
        key_check=KeyCheck(keys=node.keys, database=node.database, callback=callback, guard=node.guard, gate=gate),
    )
    admit = _per_client(node, DISCOVER_PER_CLIENT)
    answer = front.endpoint(discover.answer, max_bytes=MAX_DISCOVER_REQUEST_BYTES, admit=admit)
    app.add_route("/discover", front.endpoint(discover.show, max_bytes=0), methods=["GET"])
    app.add_route("/discover", answer, methods=["POST"])


def _add_rotation(app: FastAPI, node: NodeParts, front: Front) -> None:
    start = RotationStart(keys=node.keys, database=node.database, windows=node.windows)
    confirm = RotationConfirm(keys=node.keys, database=node.database, registry=node.registry, heard=node.links.look_now)
    admit = _per_client(node, ROTATION_PER_CLIENT)
    for path, rotation in ((ROTATE_INIT_PATH, start), (ROTATE_CONFIRM_PATH, confirm)):
        endpoint = front.endpoint(rotation, max_bytes=MAX_DISCOVER_REQUEST_BYTES, admit=admit)
        app.add_route(path, endpoint, methods=["POST"])


def _add_deliveries(app: FastAPI, node: NodeParts, front: Front, inbox: Inbox, admit_new: NewServers) -> None:
    """Add what servers send to us, and what they send through us."""
    follows = FollowsInbox(inbox=inbox, database=node.database, registry=node.registry)
    posts = PostsInbox(own_url=node.own_url, inbox=inbox, database=node.database)
    admit = _per_client(node, node.per_client)
    for path, deliveries in ((FOLLOWS_PATH, follows), (POSTS_PATH, posts)):
        endpoint = front.endpoint(
            deliveries,
            max_bytes=MAX_REQUEST_BYTES,
            admit=admit,
            reads=DELIVERY_MEMBERS,
            vouch=inbox.vouch,
            counts=True,
            proves=True,
        )
        app.add_route(path, endpoint, methods=["POST"])
    forwarder = Forwarder(
        own_url=node.own_url,
        inbox=inbox,
        registry=node.registry,
        discover=node.discovery.for_a_relay,
        fetch=node.fetch,
        admit=PerRelayingOrigin(windows=node.windows),
        admit_new=admit_new,
    )
    targeted = TargetedInbox(own_url=node.own_url, inbox=inbox, follows=follows, posts=posts)
    endpoint = front.endpoint(
        ProxyEndpoint(forwarder=forwarder, targeted=targeted),
        max_bytes=MAX_RELAYED_BYTES,
        admit=ProxyAdmission(per_client=_per_client(node, RELAY_PER_CLIENT)),
        too_large=too_large_to_relay,
        reads=members_of(ProxyRequest) | members_of(TargetedRequest),
        vouch=inbox.vouch,
        counts=True,
    )
    app.add_route(RELAY_PATH, endpoint, methods=["POST"])
