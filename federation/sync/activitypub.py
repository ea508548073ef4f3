"""The calls of `federation.activitypub` for synchronous code, without `await`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial

from federation.activitypub.actors import Actor
from federation.activitypub.calls import gone_within, parts_of
from federation.activitypub.inboxes import GoneInbox
from federation.activitypub.outbound import AUTO, OrderingKey, Recipient, Sent
from federation.sync.process import Caller, plain_node
from workers.background import background


def send(
    session: Caller,
    activity: Mapping[str, object] | str | bytes,
    to: Iterable[Recipient],
    *,
    prefer_shared_inbox: bool = True,
    exclude: Iterable[str] = (),
    ordering_key: OrderingKey = AUTO,
) -> Sent:
    """Owe an activity to its recipients from the moment `session` commits; see `federation.activitypub.send`."""
    plain = plain_node()
    senders = parts_of(plain.node).senders
    plain.outbox.check_kind(session, "activitypub.send")
    addressed = senders.addressed(
        activity, to, prefer_shared_inbox=prefer_shared_inbox, exclude=exclude, key=ordering_key
    )
    blacklisted = background.run(lambda: plain.node.blacklist.covered({*addressed.servers.values()}))
    work = partial(senders.send, addressed=addressed, blacklisted=blacklisted, plan=plain.outbox.plan)
    return plain.outbox.within(session, work, "activitypub.send")


def add_actor(session: Caller, actor_url: str, *, is_instance: bool = False) -> Actor:
    """Make an actor of this node with its keys, unless it is there already; see `Actors.add`."""
    plain = plain_node()
    work = partial(parts_of(plain.node).actors.add, actor_url=actor_url, is_instance=is_instance)
    return plain.outbox.within(session, work, "activitypub.add_actor")


def remove_actor(session: Caller, actor_url: str) -> None:
    """Remove an actor. Others can verify what it signed for 30 days; see `Actors.remove`."""
    plain = plain_node()
    work = partial(parts_of(plain.node).actors.remove, actor_url=actor_url)
    plain.outbox.within(session, work, "activitypub.remove_actor")


def gone(session: Caller, since: datetime) -> list[GoneInbox]:
    """Return the inboxes that were found to be no more since then."""
    plain = plain_node()
    parts_of(plain.node)
    return plain.outbox.within(session, partial(gone_within, since=since), "activitypub.gone")
