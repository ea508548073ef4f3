"""What applications call to owe activities, over the process's node; `federation.sync.activitypub` has the same calls.

The module of nodes is found by its name and not imported: nodes are made of this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial
from importlib import import_module
from typing import Final, Protocol, cast

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from federation.activitypub import follows
from federation.activitypub.activities import parse
from federation.activitypub.actors import Actor, Actors
from federation.activitypub.follows import Followers
from federation.activitypub.handlers import FollowDecision
from federation.activitypub.inboxes import GoneInbox, gone_since
from federation.activitypub.outbound import AUTO, OrderingKey, Recipient, Senders, Sent
from federation.base.errors import ConfigurationError
from federation.delivery.outbox.outbox import Outbox
from federation.servers.blacklist import Blacklist
from workers.clock import Clock

_NODES: Final = "federation.runtime.nodes"


class OwingParts(Protocol):
    """The parts of a node's ActivityPub by which activities are owed."""

    @property
    def senders(self) -> Senders: ...
    @property
    def actors(self) -> Actors: ...


class OwingNode(Protocol):
    """The parts of a node by which activities are owed."""

    outbox: Outbox
    blacklist: Blacklist
    clock: Clock

    @property
    def activitypub(self) -> OwingParts | None: ...


def parts_of(node: OwingNode) -> OwingParts:
    """Return the node's ActivityPub.

    Raises:
        ConfigurationError: it has none.
    """
    if node.activitypub is None:
        raise ConfigurationError(["FEDERATION_ACTIVITYPUB: not on; FEDERATION_ACTIVITYPUB=1 turns on this wire"])
    return node.activitypub


async def send(
    session: AsyncSession,
    activity: Mapping[str, object] | str | bytes,
    to: Iterable[Recipient] | Followers,
    *,
    prefer_shared_inbox: bool = True,
    exclude: Iterable[str] = (),
    ordering_key: OrderingKey = AUTO,
) -> Sent:
    """Owe an activity to its recipients from the moment `session` commits: one delivery for each inbox.

    The activity is a mapping, or its JSON, which is sent as it is. Its actor signs it, and must have a key here; see
    `add_actor`. Those who share an inbox get one delivery, unless `prefer_shared_inbox` is off. Recipients on this node
    or on a server of `exclude` get nothing, nor do those whose server is blacklisted or whose inbox is gone: `skipped`
    names them. Nothing is dialled. `to` may be `FOLLOWERS`: all whom its actor has accepted, see `on_follow`.

    Activities about one object arrive at an inbox in the order in which they were sent, each after the end of the one
    before. An `ordering_key` of your own names another order, and None switches it off.

    Raises:
        ValueError: it could never be delivered; the message names the member. Nothing is written then.
        TypeError: it is no `AsyncSession`, or a recipient is no `Recipient`.
        SQLAlchemyError: the blacklist was never read, and cannot be read now.
        ConfigurationError: this node has no ActivityPub.
    """
    node = _node()
    senders = parts_of(node).senders
    node.outbox.check_kind(session, "activitypub.send")
    if isinstance(to, Followers):
        to = await node.outbox.within(
            session, partial(follows.followers_of, actor=parse(activity).actor), "activitypub.send"
        )
    addressed = senders.addressed(
        activity, to, prefer_shared_inbox=prefer_shared_inbox, exclude=exclude, key=ordering_key
    )
    blacklisted = await node.blacklist.covered({*addressed.servers.values()})
    work = partial(senders.send, addressed=addressed, blacklisted=blacklisted, plan=node.outbox.plan)
    return await node.outbox.within(session, work, "activitypub.send")


async def add_actor(session: AsyncSession, actor_url: str, *, is_instance: bool = False) -> Actor:
    """Make an actor of this node with its keys, unless it is there already; see `Actors.add`.

    `is_instance`: it stands for the node and not for a user.
    """
    node = _node()
    work = partial(parts_of(node).actors.add, actor_url=actor_url, is_instance=is_instance)
    return await node.outbox.within(session, work, "activitypub.add_actor")


async def remove_actor(session: AsyncSession, actor_url: str) -> None:
    """Remove an actor. Others can verify what it signed for 30 days; see `Actors.remove`."""
    node = _node()
    work = partial(parts_of(node).actors.remove, actor_url=actor_url)
    await node.outbox.within(session, work, "activitypub.remove_actor")


async def follow_actor(session: AsyncSession, local: str, remote: Recipient) -> Sent:
    """Have an actor of this node follow one of another server, from the moment `session` commits.

    The follow is pending until the other accepts or rejects it. If nothing can be sent to that one, as `skipped` says,
    nothing is noted.

    Raises:
        ValueError, TypeError, SQLAlchemyError, ConfigurationError: as for `send`.
    """
    node = _node()
    parts_of(node)
    node.outbox.check_kind(session, "activitypub.follow_actor")
    following = follows.follow(local, remote.id)
    sent = await send(session, following, [remote], prefer_shared_inbox=False)
    if sent.delivery_ids:
        work = partial(follows.followed, following=following, remote=remote, now=node.clock.now())
        await node.outbox.within(session, work, "activitypub.follow_actor")
    return sent


async def unfollow_actor(session: AsyncSession, local: str, remote: str) -> Sent | None:
    """End what `follow_actor` began, and send the Undo. Return None if there is no such follow.

    Raises:
        ValueError, TypeError, SQLAlchemyError, ConfigurationError: as for `send`.
    """
    node = _node()
    parts_of(node)
    work = partial(follows.unfollow, local=local, remote=remote)
    owed = await node.outbox.within(session, work, "activitypub.unfollow_actor")
    return None if owed is None else await send(session, owed[0], [owed[1]], prefer_shared_inbox=False)


async def answer_follow(session: AsyncSession, local: str, remote: str, answer: FollowDecision | str) -> Sent | None:
    """Say to an actor of another server that it may follow one of this node, or not, or no more.

    Return None for `pending`, of which nobody is told.

    Raises:
        ValueError: that one does not want to follow; or there is no such answer. Or as for `send`.
        TypeError, SQLAlchemyError, ConfigurationError: as for `send`.
    """
    node = _node()
    parts_of(node)
    work = partial(follows.answered, local=local, remote=remote, answer=FollowDecision(answer), now=node.clock.now())
    owed = await node.outbox.within(session, work, "activitypub.answer_follow")
    return None if owed is None else await send(session, owed[0], [owed[1]], prefer_shared_inbox=False)


async def gone(session: AsyncSession, since: datetime) -> list[GoneInbox]:
    """Return the inboxes that were found to be no more since then, so that you can remove who had them."""
    node = _node()
    parts_of(node)
    return await node.outbox.within(session, partial(gone_within, since=since), "activitypub.gone")


def gone_within(session: Session, since: datetime) -> list[GoneInbox]:
    """Return what `gone` does."""
    return gone_since(session.connection(), since)


def _node() -> OwingNode:
    return cast(OwingNode, import_module(_NODES).get_federation())
