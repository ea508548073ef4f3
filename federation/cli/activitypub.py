"""`federation activitypub`."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from federation.cli.lists import print_list
from federation.cli.options import MOST_ROWS, AsJson, Columns, Limit, Wide, Yes, duration, group
from federation.cli.orders import order
from federation.cli.output import confirm, print_json, print_lines, print_table
from federation.cli.problems import NOT_FOUND, fail
from federation.cli.session import with_node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from federation.activitypub.inboxes import GoneInbox
    from federation.admin.follows import FollowPage, FollowRow
    from federation.runtime.composition import Federation

app = group("ActivityPub: this node's actors, their keys and follows, what others sent, and inboxes that are gone.")
actors_app = group("Actors of this node: list, add, remove.")
keys_app = group("Keys of this node's actors: list, rotate.")
received_app = group("Activities that others sent: list, retry.")
app.add_typer(actors_app, name="actors")
app.add_typer(keys_app, name="keys")
app.add_typer(received_app, name="received")

ActorUrl: TypeAlias = Annotated[
    str, typer.Argument(metavar="ACTOR", help="Its URL, as https://a.example/users/alice.", show_default=False)
]
AfterActor: TypeAlias = Annotated[str | None, typer.Option("--after", metavar="ACTOR", help="Go on after this actor.")]


class HandlingState(StrEnum):
    """What has become of an activity that somebody sent."""

    NEW = "new"
    DONE = "done"
    FAILED = "failed"


class FollowWay(StrEnum):
    """Who follows whom."""

    FOLLOWER = "follower"
    FOLLOWING = "following"


class FollowedSays(StrEnum):
    """What the one who is followed has said."""

    PENDING = "pending"
    ACCEPTED = "accepted"
    REJECTED = "rejected"


@actors_app.command("list")
def list_actors(limit: Limit = 100, after: AfterActor = None, as_json: AsJson = False) -> None:
    """List actors by URL, those that were removed, too."""
    from federation.admin import activitypub

    page = with_node(lambda node: activitypub.list_actors(_on(node), limit=limit, after=after))
    if as_json:
        print_json(page)
        return
    print_table(
        ("ACTOR", "KEY", "INSTANCE", "MADE", "REMOVED"),
        ((each.id, each.key_id, each.is_instance, each.created_at, each.removed_at) for each in page.actors),
    )
    _tell_more(page.after)


@actors_app.command("add")
def add_actor(
    actor: ActorUrl,
    instance: Annotated[bool, typer.Option("--instance", help="It stands for the node and not for a user.")] = False,
    as_json: AsJson = False,
) -> None:
    """Add an actor, with a key of its own. One that is there stays as it is; one that was removed is there again."""
    from federation.admin import activitypub

    asked = order("activitypub actors add", actor=actor, instance=instance)
    try:
        added = with_node(lambda node: activitypub.add_actor(node, actor, is_instance=instance, order=asked))
    except ValueError as error:
        fail(str(error))
    if as_json:
        print_json(added)
    else:
        print_lines([f"{added.id} signs with {added.key_id}"])


@actors_app.command("remove")
def remove_actor(actor: ActorUrl, yes: Yes = False, as_json: AsJson = False) -> None:
    """Remove an actor. What it signed can be verified for 30 days; then it is gone for good."""
    from federation.admin import activitypub

    confirm(f"Remove the actor {actor}?", yes=yes)
    asked = order("activitypub actors remove", actor=actor)
    if not with_node(lambda node: activitypub.remove_actor(node, actor, order=asked)):
        fail(f"{actor} is no actor of this node", status=NOT_FOUND)
    if as_json:
        print_json({"actor": actor})
    else:
        print_lines([f"{actor} is removed; it is shown for 30 days more, so that others can verify the news"])


@keys_app.command("list")
def list_keys(limit: Limit = 100, after: AfterActor = None, as_json: AsJson = False) -> None:
    """List the keys of actors, without the keys. `opens`: this node's own keys open them, so that they can sign."""
    from federation.admin import activitypub

    page = with_node(lambda node: activitypub.list_keys(_on(node), limit=limit, after=after))
    if as_json:
        print_json(page)
        return
    print_table(
        ("KEY", "STATE", "OPENS", "FROM", "RETIRED"),
        ((each.key_id, each.state, each.opens, each.use_from, each.retired_at) for each in page.keys),
    )
    _tell_more(page.after)


@keys_app.command("rotate")
def rotate(actor: ActorUrl, as_json: AsJson = False) -> None:
    """Give an actor another key. In ten minutes it takes the place of the present one."""
    from federation.activitypub.keys import NoActorKey
    from federation.admin import activitypub

    asked = order("activitypub keys rotate", actor=actor)
    try:
        rotated = with_node(lambda node: activitypub.rotate(node, actor, order=asked))
    except NoActorKey as error:
        fail(str(error), status=NOT_FOUND)
    if as_json:
        print_json(rotated)
    else:
        print_lines([f"{rotated.id} will sign with {rotated.key_id}, ten minutes after the rotation began"])


@received_app.command("list")
def list_received(
    state: Annotated[
        HandlingState | None, typer.Option("--state", help="Only those. Without it: those that are new or failed.")
    ] = None,
    actor: Annotated[str | None, typer.Option("--actor", metavar="ACTOR", help="Only what this actor sent.")] = None,
    limit: Limit = 100,
    after: Annotated[
        int | None, typer.Option("--after", metavar="NUMBER", help="Go on after this one.", min=0, max=MOST_ROWS)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List activities that others sent, in the order of arrival, without their texts."""
    from db import ReceivedState
    from federation.admin import received

    states = received.OPEN if state is None else (ReceivedState(state.value),)
    page = with_node(lambda node: received.list_received(node, limit=limit, states=states, actor=actor, after=after))
    if as_json:
        print_json(page)
        return
    print_table(
        ("NUMBER", "STATE", "TYPE", "ATTEMPTS", "RECEIVED", "ACTOR", "ACTIVITY", "ERROR"),
        (
            (
                *(each.number, each.state, each.type, each.attempts, each.received_at, each.actor),
                *(each.activity_id, each.last_error),
            )
            for each in page.activities
        ),
    )
    _tell_more(None if page.after is None else str(page.after))


@received_app.command("retry")
def retry_received(
    numbers: Annotated[
        list[int] | None,
        typer.Argument(metavar="[NUMBER]...", help="Only these.", min=0, max=MOST_ROWS, show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every one that failed, or waits for its next attempt.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Have activities that failed handled again, up to five times more; and now what waits for its next attempt."""
    from federation.admin import received

    if bool(numbers) == everything:
        raise typer.BadParameter("give numbers, as `list` shows them, or --all")
    asked = order("activitypub received retry", numbers=numbers, all=everything)
    done = with_node(lambda node: received.retry(node, numbers or None, order=asked))
    is_none = not done.retried and not done.hurried
    if as_json:
        print_json(done)
    else:
        left = ["`federation activitypub received list` has those that failed, or wait"]
        print_lines(["; ".join([*done.sentences(), *(left if is_none and not everything else [])])])
    if is_none:
        raise typer.Exit(NOT_FOUND)


@app.command("follows")
def list_follows(
    actor: Annotated[
        str | None, typer.Option("--actor", metavar="ACTOR", help="Only those of this actor of ours.")
    ] = None,
    server: Annotated[
        str | None, typer.Option("--server", metavar="URL", help="Only those with actors of this server.")
    ] = None,
    direction: Annotated[
        FollowWay | None,
        typer.Option("--direction", help="Follower: who follows ours. Following: whom ours follow."),
    ] = None,
    state: Annotated[FollowedSays | None, typer.Option("--state", help="Only those.")] = None,
    limit: Limit = 100,
    after: Annotated[
        str | None, typer.Option("--after", metavar="FOLLOW", help="Go on after this one, as a list names its last.")
    ] = None,
    wide: Wide = False,
    columns: Columns = None,
    as_json: AsJson = False,
) -> None:
    """List who follows this node's actors, and whom these follow. AGE is since when it is so.

    OURS is the actor of this node, without the node's own URL.
    """
    from db import FollowDirection, FollowState
    from federation.admin import follows
    from federation.admin.scans import CursorError
    from federation.admin.servers.servers import server_url

    name = server_url(server) if server else None

    async def look(node: Federation) -> tuple[FollowPage, str]:
        page = await follows.list_follows(
            node,
            limit=limit,
            actor=actor,
            direction=None if direction is None else FollowDirection(direction.value),
            state=None if state is None else FollowState(state.value),
            server_url=name,
            after=after,
        )
        return page, node.own_url or ""

    try:
        page, own_url = with_node(look)
    except CursorError as error:
        raise typer.BadParameter(str(error), param_hint="--after") from None
    except follows.NoSuchActor as error:
        fail(str(error), status=NOT_FOUND)
    if as_json:
        print_json(page)
        return
    now = datetime.now(UTC)
    print_list(
        ("OURS", "DIRECTION", "STATE", "AGE", "OTHER", "SINCE", "ACTOR", "INBOX", "SHARED INBOX", "FOLLOW"),
        (_cells(each, own_url, now) for each in page.follows),
        few=("OURS", "DIRECTION", "STATE", "AGE", "OTHER"),
        wide=wide,
        chosen=columns,
    )
    _tell_more(None if page.after is None else shlex.quote(page.after))


def _cells(follow: FollowRow, own_url: str, now: datetime) -> Sequence[object]:
    from federation.admin.words import ago

    return (
        *(follow.local_actor.removeprefix(own_url), follow.direction, follow.state, ago(now - follow.since)),
        *(follow.remote_actor, follow.since, follow.local_actor, follow.inbox, follow.shared_inbox, follow.follow_id),
    )


@app.command("gone")
def gone(
    since: Annotated[
        str, typer.Option("--since", metavar="DURATION", callback=duration, help="Of the last 12h, 7d, …")
    ] = "30d",
    as_json: AsJson = False,
) -> None:
    """List the inboxes of others that were found to be no more. Who had them can be removed from the followers."""
    from federation.admin import inboxes
    from federation.base.settings.types import parse_duration

    begin = datetime.now(UTC) - parse_duration(since)

    async def look(node: Federation) -> Sequence[GoneInbox]:
        return await inboxes.gone(_on(node).database, begin)

    found = with_node(look)
    if as_json:
        print_json({"inboxes": found})
    else:
        print_table(("INBOX", "GONE SINCE", "BY"), ((each.url, each.gone_at, each.code) for each in found))


def _tell_more(after: str | None) -> None:
    if after:
        print_lines([f"more: --after {after}"])


def _on(node: Federation) -> Federation:
    """Return the node, if it has ActivityPub.

    Raises:
        ConfigurationError: it is off.
    """
    from federation.activitypub.calls import parts_of

    parts_of(node)
    return node
