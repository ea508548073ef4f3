"""The inbound side of a node: its endpoints, and the checks in front of them.

Nothing in a request is believed before a signature or a fetch of our own confirms it. Requests are handled without the
framework's dependency and validation machinery: every bound and every error here is part of the wire protocol.
"""

from __future__ import annotations

from fastapi import FastAPI

from db import Database
from federation.base.meter import NO_METER, Meter
from federation.base.settings.reach import gaps
from federation.http.gates import FederationFetch
from federation.http.guard import AddressGuard
from federation.node.admission import (
    DELIVERIES,
    DISCOVER_PER_CLIENT,
    RELAY_PER_CLIENT,
    ROTATION_PER_CLIENT,
    PerClient,
    PerNetwork,
    PerOrigin,
    PerRelayingOrigin,
    ProxyAdmission,
    too_large_to_relay,
)
from federation.node.blacklist import BlacklistGate
from federation.node.callback import Callback
from federation.node.clients import Clients
from federation.node.discover import MAX_DISCOVER_REQUEST_BYTES, Discover
from federation.node.follows import FOLLOWS_PATH, FollowsInbox
from federation.node.forwarding import Forwarder
from federation.node.front import Front
from federation.node.heavy import HeavyWork
from federation.node.inbox import Inbox
from federation.node.key_check import KeyCheck
from federation.node.limits import Limit, Windows
from federation.node.monitoring import MonitoringRoutes
from federation.node.posts import POSTS_PATH, PostsInbox
from federation.node.proxy import ProxyEndpoint
from federation.node.registration import Registration
from federation.node.rotation import RotationConfirm, RotationStart
from federation.node.standing import ClientStanding
from federation.node.targeted import TargetedInbox
from federation.protocol.activities import DELIVERY_MEMBERS, MAX_REQUEST_BYTES
from federation.protocol.keys import KeyRing
from federation.protocol.relaying import MAX_RELAYED_BYTES, RELAY_PATH, ProxyRequest, TargetedRequest
from federation.protocol.rotation import ROTATE_CONFIRM_PATH, ROTATE_INIT_PATH
from federation.protocol.skimming import members_of
from federation.sealed.peers.claims import Claims
from federation.sealed.peers.discovery import DiscoverServer
from federation.sealed.peers.own_identity import OwnIdentity
from federation.sealed.peers.registry import Registry
from federation.servers.links import Links


def create_node_app(
    *,
    own_url: str,
    keys: KeyRing,
    database: Database,
    registry: Registry,
    links: Links,
    fetch: FederationFetch,
    guard: AddressGuard,
    discovery: DiscoverServer,
    windows: Windows,
    clients: Clients,
    per_client: Limit = DELIVERIES,
    per_origin: Limit = DELIVERIES,
    standing: ClientStanding | None = None,
    meter: Meter = NO_METER,
    monitoring: MonitoringRoutes | None = None,
) -> FastAPI:
    """Create an ASGI application that serves as *own_url*, in canonical form.

    It opens and closes nothing that it is given.

    *fetch* and *discovery* should send through the same *guard*. *per_client* and *per_origin* limit follows and posts;
    *standing* turns away clients whose requests are refused again and again. Where `user`, `posts` or `blocks` is
    missing, or a column of them, follows and posts are refused with its name.
    """
    gate = BlacklistGate(registry)
    heavy = HeavyWork()
    front = Front(
        gate=gate,
        gaps=lambda: gaps(database),
        clients=clients,
        standing=standing or ClientStanding(),
        heavy=heavy,
        meter=meter,
    )
    inbox = Inbox(
        keys=keys,
        registry=registry,
        gate=gate,
        heard=links.look_soon,
        per_origin=PerOrigin(per_origin, windows=windows),
        heavy=heavy,
    )
    follows = FollowsInbox(inbox=inbox, database=database, registry=registry)
    posts = PostsInbox(own_url=own_url, inbox=inbox, database=database)

    identity = OwnIdentity(keys, database)
    callback = Callback(fetch)
    discover = Discover(
        own_url=own_url,
        identity=identity,
        database=database,
        registration=Registration(
            own_url=own_url,
            identity=identity,
            registry=registry,
            claims=Claims(own_url=own_url, ring=keys, registry=registry, fetch=fetch),
            heard=links.look_soon,
            callback=callback,
            guard=guard,
            admit_new=PerNetwork(windows=windows),
        ),
        key_check=KeyCheck(keys=keys, database=database, callback=callback, guard=guard, gate=gate),
    )

    rotation_start = RotationStart(keys=keys, database=database, windows=windows)
    rotation_confirm = RotationConfirm(keys=keys, database=database, registry=registry, heard=links.look_now)
    forwarder = Forwarder(
        own_url=own_url,
        inbox=inbox,
        registry=registry,
        discover=discovery,
        fetch=fetch,
        admit=PerRelayingOrigin(windows=windows),
    )
    targeted = TargetedInbox(own_url=own_url, inbox=inbox, follows=follows, posts=posts)
    proxy = ProxyEndpoint(forwarder=forwarder, targeted=targeted)
    discover_admission = PerClient(DISCOVER_PER_CLIENT, clients=clients, windows=windows)
    relay_admission = ProxyAdmission(per_client=PerClient(RELAY_PER_CLIENT, clients=clients, windows=windows))
    delivery_admission = PerClient(per_client, clients=clients, windows=windows)

    # The framework's documentation pages load scripts from elsewhere, and would not describe the wire protocol.
    app = FastAPI(title="Federation node", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_route("/discover", front.endpoint(discover.show, max_bytes=0), methods=["GET"])
    app.add_route(
        "/discover",
        front.endpoint(discover.answer, max_bytes=MAX_DISCOVER_REQUEST_BYTES, admit=discover_admission),
        methods=["POST"],
    )
    rotation_admission = PerClient(ROTATION_PER_CLIENT, clients=clients, windows=windows)
    for path, rotation in ((ROTATE_INIT_PATH, rotation_start), (ROTATE_CONFIRM_PATH, rotation_confirm)):
        endpoint = front.endpoint(rotation, max_bytes=MAX_DISCOVER_REQUEST_BYTES, admit=rotation_admission)
        app.add_route(path, endpoint, methods=["POST"])
    for path, deliveries in ((FOLLOWS_PATH, follows), (POSTS_PATH, posts)):
        endpoint = front.endpoint(
            deliveries,
            max_bytes=MAX_REQUEST_BYTES,
            admit=delivery_admission,
            reads=DELIVERY_MEMBERS,
            vouch=inbox.vouch,
            counts=True,
            proves=True,
        )
        app.add_route(path, endpoint, methods=["POST"])
    endpoint = front.endpoint(
        proxy,
        max_bytes=MAX_RELAYED_BYTES,
        admit=relay_admission,
        too_large=too_large_to_relay,
        reads=members_of(ProxyRequest) | members_of(TargetedRequest),
        vouch=inbox.vouch,
        counts=True,
    )
    app.add_route(RELAY_PATH, endpoint, methods=["POST"])
    if monitoring is not None:
        monitoring.add_to(app)
    return app
