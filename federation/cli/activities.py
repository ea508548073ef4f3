"""`federation follow`, `post` and `received`: what a node without an application is good for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

import typer

from federation.cli.options import AsJson, Limit, ServerUrl
from federation.cli.orders import order
from federation.cli.output import print_json, print_lines, print_table
from federation.cli.problems import NOT_FOUND, fail
from federation.cli.servers import MOST_TO_WAIT
from federation.cli.session import with_database, with_node

if TYPE_CHECKING:
    from pydantic import JsonValue

    from federation.runtime.composition import Federation

T = TypeVar("T")

LocalUser: TypeAlias = Annotated[str, typer.Option("--as", metavar="ID", help="Our user who does it.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("follow")(follow)
    app.command("post")(post)
    app.command("received")(received)


def follow(
    user_id: Annotated[str, typer.Argument(metavar="ID", help="Who is followed, as bob.", show_default=False)],
    url: ServerUrl,
    user: LocalUser,
    as_json: AsJson = False,
) -> None:
    """Follow a user of another server.

    The follow counts once that server has accepted it; from then on its posts come here.
    """
    from federation.admin import activities
    from federation.admin.servers.servers import server_url

    name = server_url(url)
    asked = order("follow", server_url=name, id=user_id, **{"as": user})
    requested = _done(
        lambda node: activities.follow(
            node, follower_id=user, following_id=user_id, server_url=name, patience=MOST_TO_WAIT, order=asked
        )
    )
    if as_json:
        print_json(requested)
    else:
        told = f"`federation deliveries show {requested.delivery_id}` tells what becomes of it"
        print_lines([f"{user} asks to follow {user_id} of {name}; {told}"])


def post(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What it says.", show_default=False)],
    user: LocalUser,
    private: Annotated[bool, typer.Option("--private", help="Say that it is for followers alone.")] = False,
    as_json: AsJson = False,
) -> None:
    """Publish a post for the servers of whoever follows its author, or is followed by them.

    `users add --posts-to` says which of the two.
    """
    from federation.admin import activities
    from federation.admin.words import counted

    asked = order("post", private=private, **{"as": user})
    if not text:
        fail("a post must say something: its text is empty")
    content = [{"type": "text", "value": text}]
    published = _done(
        lambda node: activities.publish(node, author_id=user, content=content, is_private=private, order=asked)
    )
    if as_json:
        print_json(published)
        return
    owed = len(published.delivery_ids)
    whom = f"owed to {counted(owed, 'server')}" if owed else "no server is to have it"
    print_lines([f"published as {published.post_id}; {whom}"])


def received(
    limit: Limit = 20,
    after: Annotated[str | None, typer.Option("--after", metavar="ID", help="Go on after this post.")] = None,
    as_json: AsJson = False,
) -> None:
    """List posts that came from other servers, the latest first."""
    from federation.admin import activities

    try:
        page = with_database(lambda database: activities.received(database, limit=limit, after=after))
    except activities.NoSuchPost as error:
        fail(f"{error}; begin without --after", status=NOT_FOUND)
    if as_json:
        print_json(page)
        return
    rows = ((each.received_at, each.author_id, each.server_url, _told(each.content)) for each in page.posts)
    print_table(("RECEIVED", "AUTHOR", "SERVER", "POST"), rows)
    if page.after:
        print_lines([f"more: --after {page.after}"])


def _done(work: Callable[[Federation], Awaitable[T]]) -> T:
    """Do it on this directory's node, or say why not."""
    from federation.http.errors import OutboundError
    from federation.sealed.outbound.activities import ServerRefused, UnknownUser
    from federation.sealed.peers.discovery import DiscoveryError

    try:
        return with_node(work)
    except TimeoutError:
        fail(f"that server did not answer within {MOST_TO_WAIT} s; nothing was written", status=NOT_FOUND)
    except (UnknownUser, ServerRefused, DiscoveryError, OutboundError) as error:
        fail(str(error), status=NOT_FOUND)
    except ValueError as error:
        fail(str(error))


def _told(content: Sequence[JsonValue]) -> str:
    return " ".join(_block(each) for each in content if isinstance(each, Mapping))


def _block(block: Mapping[str, JsonValue]) -> str:
    """Return a text as it is, and of anything else its kind and where it is."""
    return str(block["value"]) if "value" in block else f"[{block.get('type')}: {block.get('url')}]"
