"""The calls of `federation.activitypub` for synchronous code, without `await`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial

from federation.activitypub import follows
from federation.activitypub.activities import parse
from federation.activitypub.actors import Actor
from federation.activitypub.calls import gone_within, parts_of
from federation.activitypub.follows import Followers
from federation.activitypub.handlers import FollowDecision
from federation.activitypub.inboxes import GoneInbox
from federation.activitypub.outbound import AUTO, OrderingKey, Recipient, Sent
from federation.sync.process import Caller, plain_node
from workers.background import background

__all__ = ["add_actor", "answer_follow", "follow_actor", "gone", "remove_actor", "send", "unfollow_actor"]


def send(
    session: Caller,
    activity: Mapping[str, object] | str | bytes,
    to: Iterable[Recipient] | Followers,
    *,
    prefer_shared_inbox: bool = True,
    exclude: Iterable[str] = (),
    ordering_key: OrderingKey = AUTO,
) -> Sent:
    """Owe an activity to its recipients from the moment `session` commits; see `federation.activitypub.send`."""
    plain = plain_node()
    senders = parts_of(plain.node).senders
    plain.outbox.check_kind(session, "activitypub.send")
    if isinstance(to, Followers):
        to = plain.outbox.within(
            session, partial(follows.followers_of, actor=parse(activity).actor), "activitypub.send"
        )
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


def follow_actor(session: Caller, local: str, remote: Recipient) -> Sent:
    """Have an actor of this node follow one of another server; see `federation.activitypub.follow_actor`."""
    plain = plain_node()
    parts_of(plain.node)
    plain.outbox.check_kind(session, "activitypub.follow_actor")
    following = follows.follow(local, remote.id)
    sent = send(session, following, [remote], prefer_shared_inbox=False)
    if sent.delivery_ids:
        work = partial(follows.followed, following=following, remote=remote, now=plain.node.clock.now())
        plain.outbox.within(session, work, "activitypub.follow_actor")
    return sent


def unfollow_actor(session: Caller, local: str, remote: str) -> Sent | None:
    """End what `follow_actor` began, and send the Undo. Return None if there is no such follow."""
    plain = plain_node()
    parts_of(plain.node)
    work = partial(follows.unfollow, local=local, remote=remote)
    owed = plain.outbox.within(session, work, "activitypub.unfollow_actor")
    return None if owed is None else send(session, owed[0], [owed[1]], prefer_shared_inbox=False)


def answer_follow(session: Caller, local: str, remote: str, answer: FollowDecision | str) -> Sent | None:
    """Say to an actor of another server that it may follow one of this node; see `activitypub.answer_follow`."""
    plain = plain_node()
    parts_of(plain.node)
    work = partial(
        follows.answered, local=local, remote=remote, answer=FollowDecision(answer), now=plain.node.clock.now()
    )
    owed = plain.outbox.within(session, work, "activitypub.answer_follow")
    return None if owed is None else send(session, owed[0], [owed[1]], prefer_shared_inbox=False)


def gone(session: Caller, since: datetime) -> list[GoneInbox]:
    """Return the inboxes that were found to be no more since then."""
    plain = plain_node()
    parts_of(plain.node)
    return plain.outbox.within(session, partial(gone_within, since=since), "activitypub.gone")
