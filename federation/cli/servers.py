"""`federation servers` and `federation why`."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from federation.cli.lists import print_list
from federation.cli.options import AsJson, Columns, Limit, ServerUrl, Wide, Yes, group
from federation.cli.orders import order
from federation.cli.output import confirm, print_json, print_lines, print_table
from federation.cli.problems import NOT_FOUND, fail
from federation.cli.session import with_database, with_node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from db import Database
    from federation.admin.servers.servers import LinkRow, Scorecard, ServerPage, ServerRow
    from federation.runtime.composition import Federation
    from federation.sealed.peers.registry import KnownServer

Reason: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="The server: https://peer.example, or peer.example. Or an inbox, an actor or an activity.",
        show_default=False,
    ),
]

_ACCOUNT: Final = re.compile(r"(acct:|@)?[^@/:]+@[^@/]+")
"""As users of ActivityPub write who they are: `@bob@b.example`."""
MOST_TO_WAIT: Final = 8
"""Seconds to wait for a server while somebody waits for us; with start and end this is less than ten."""

app = group("The servers we know: list, show, probe, set, forget, …")


class ProfileChoice(StrEnum):
    """The implementation that a server runs."""

    ORIGINAL = "original"
    NONE = "none"


@app.command("list")
def list_servers(
    healthy: Annotated[
        bool | None, typer.Option("--healthy/--unhealthy", help="Only those; without either, all.")
    ] = None,
    limit: Limit = 100,
    after: Annotated[str | None, typer.Option("--after", metavar="URL", help="Go on after this URL.")] = None,
    wide: Wide = False,
    columns: Columns = None,
    as_json: AsJson = False,
) -> None:
    """List servers, by URL. Those that need no registry are known by their links, and have no health."""
    from federation.admin.servers import servers

    async def look(database: Database) -> tuple[ServerPage, dict[str, LinkRow], dict[str, Scorecard]]:
        page = await servers.list_servers(database, healthy=healthy, limit=limit, after=after)
        return page, await servers.links(database, page.urls), await servers.scorecards(database, page.urls)

    page, links, cards = with_database(look)
    if as_json:
        told = {"servers": page.servers, "others": page.others, "after": page.after}
        print_json({**told, "links": links, "scorecards": cards})
        return
    names = ("URL", "LINK", "SINCE", "REASON", "HELD", "NEXT PROBE", "WIRE", "LAST SEEN", "SCORE", "ADVICE")
    registered = {each.url: each for each in page.servers}
    rows = (
        (
            url,
            *_link(links[url], registered[url].unhealthy_reason if url in registered else None),
            links[url].held,
            links[url].next_probe_at,
            links[url].wire,
            registered[url].last_seen if url in registered else None,
            *_advice(cards.get(url)),
        )
        for url in page.urls
    )
    print_list(names, rows, few=("URL", "LINK", "HELD", "SCORE", "REASON"), wide=wide, chosen=columns)
    if page.after:
        print_lines([f"more: --after {page.after}"])


def _link(link: LinkRow, unhealthy_reason: str | None) -> tuple[str, datetime | None, str | None]:
    """Return the link's state in a word, since when, and why.

    For a link that is up, the reason is why the registry has the server as unhealthy.
    """
    if link.operator_hold:
        return "on hold", link.since, "OPERATOR"
    if link.rest_until is not None and link.state.value == "up":
        return "resting", link.since, link.reason
    return link.state.value, link.since, link.reason or unhealthy_reason


def _is_mapped(unhealthy_reason: str | None, link: LinkRow) -> bool:
    """Tell whether the registry has `UNKNOWN` because the original does not know the link's reason."""
    return unhealthy_reason == "UNKNOWN" and link.reason is not None


def _advice(card: Scorecard | None) -> tuple[int | None, str | None]:
    if card is None:
        return None, None
    return None if card.score is None else round(card.score), card.action


@app.command("show")
def show(url: ServerUrl, as_json: AsJson = False) -> None:
    """Show one server: its link, keys, health, and when we saw it."""
    from federation.admin.servers import servers

    name = servers.server_url(url)

    async def look(database: Database) -> tuple[ServerRow | None, LinkRow, Sequence[LinkRow]]:
        link, by_wire = await servers.links(database, [name]), await servers.links_by_wire(database, [name])
        return await servers.show(database, name), link[name], by_wire[name]

    server, link, links = with_database(look)
    if server is None and link.since is None and not link.held:
        fail(f"{name} is not in the registry", status=NOT_FOUND)
    if as_json:
        print_json({"url": name, **(asdict(server) if server else {}), "link": link, "links": links})
        return
    rows = [row for each in links for row in _rows_of(each, of_several=len(links) > 1)]
    if server is None:
        rows.append(("registry", "not in it"))
    else:
        rows += [
            ("healthy", server.is_healthy),
            ("unhealthy because", None if _is_mapped(server.unhealthy_reason, link) else server.unhealthy_reason),
            ("failed probes", server.health_check_attempts),
            ("last seen", server.last_seen),
            ("known since", server.created_at),
            ("signing key", server.public_key),
            ("encryption key", server.encryption_public_key),
        ]
    print_table(("", name), rows)


def _rows_of(link: LinkRow, *, of_several: bool) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [
        ("link", link.state),
        ("since", link.since),
        ("reason", link.reason),
        ("held by an operator", link.operator_hold),
        ("held deliveries", link.held),
        ("next probe", link.next_probe_at),
        ("rests until", link.rest_until),
        ("through relays", link.relayed),
        ("profile", link.profile),
    ]
    rows += [("signature", link.signature)] if link.signature else []
    return [(f"by {link.wire}: {name}", value) for name, value in rows] if of_several else rows


@app.command("discover")
def discover(url: ServerUrl, as_json: AsJson = False) -> None:
    """Ask a server who it is, and register it here."""
    import asyncio  # here: it has a part of its own in the time that help takes

    from federation.admin.servers import servers
    from federation.http.errors import OutboundError
    from federation.sealed.peers.discovery import DiscoveryError

    name = servers.server_url(url)

    async def ask(federation: Federation) -> KnownServer:
        async with asyncio.timeout(MOST_TO_WAIT):
            return await servers.discover(federation, name, order=order("servers discover", server_url=name))

    try:
        server = with_node(ask)
    except TimeoutError:
        fail(f"{name} did not answer within {MOST_TO_WAIT} s", status=NOT_FOUND)
    except (DiscoveryError, OutboundError) as error:
        fail(str(error), status=NOT_FOUND)
    if as_json:
        print_json(server)
    else:
        print_lines([f"{server.url} is registered; its signing key is {server.public_key}"])


@app.command("probe")
def probe(url: ServerUrl, as_json: AsJson = False) -> None:
    """Look now whether a server is well.

    If it is, it counts as healthy again, and what is held for it goes out; if a delivery has to get through first, one
    is sent now. Exit status 1 if the server is not well.
    """
    from federation.admin.servers import servers

    name = servers.server_url(url)

    async def look(federation: Federation) -> str | None:
        server = await servers.show(federation.database, name)
        if server is None:
            fail(f"{name} is not in the registry; `federation servers discover {name}` registers it", status=NOT_FOUND)
        return await servers.probe(federation, server, order=order("servers probe", server_url=name))

    problem = with_node(look)
    if as_json:
        print_json({"url": name, "well": problem is None, "problem": problem})
    else:
        print_lines([f"{name} is well" if problem is None else f"{name} is not well: {problem}"])
    if problem is not None:
        raise typer.Exit(NOT_FOUND)


@app.command("set")
def set_profile(
    url: ServerUrl,
    profile: Annotated[ProfileChoice, typer.Option("--profile", help="The implementation it runs; none: not known.")],
    as_json: AsJson = False,
) -> None:
    """Say what a server is known to run."""
    from federation.admin.servers import servers

    name = servers.server_url(url)
    known = None if profile is ProfileChoice.NONE else profile.value
    asked = order("servers set", server_url=name, profile=profile.value)
    with_node(lambda federation: servers.set_profile(federation, name, known, order=asked))
    if as_json:
        print_json({"url": name, "profile": known})
    else:
        print_lines([f"{name} is known to run {known}" if known else f"it is not known what {name} runs"])


@app.command("accept-key")
def accept_key(url: ServerUrl, as_json: AsJson = False) -> None:
    """Say that a server's registered keys are its own.

    The analytics then stop reporting them as shared, changed or not shown, and no longer advise a review for that, nor
    for what was signed with other keys until then. Ask its operator first.
    """
    from federation.admin.servers import servers

    name = servers.server_url(url)
    asked = order("servers accept-key", server_url=name)
    if not with_database(lambda database: servers.accept_key(database, name, order=asked)):
        fail(f"{name} is not in the registry", status=NOT_FOUND)
    if as_json:
        print_json({"url": name})
    else:
        print_lines([f"the keys of {name} are accepted; the next run of the analytics heeds it"])


@app.command("forget")
def forget(url: ServerUrl, yes: Yes = False, as_json: AsJson = False) -> None:
    """Forget a server, with its follows.

    It is discovered anew when something is to be delivered to it, or when it introduces itself. To keep it away,
    blacklist it instead.
    """
    from federation.admin.servers import servers
    from federation.admin.words import counted

    name = servers.server_url(url)
    follows = with_database(lambda database: servers.count_follows(database, name))
    told = counted(follows, "follow")
    confirm(f"Forget {name}, and {told} with it?", yes=yes)
    asked = order("servers forget", server_url=name)
    if not with_database(lambda database: servers.forget(database, name, order=asked)):
        fail(f"{name} is not in the registry", status=NOT_FOUND)
    if as_json:
        print_json({"url": name, "follows": follows})
    else:
        print_lines([f"{name} is forgotten, and {told} with it"])


def why(url: Reason, as_json: AsJson = False) -> None:
    """Say why a server gets its deliveries or not, or where an activity went.

    Shows the link's state, its reason and since when; what is held, and what happens next; backlog; last attempts;
    blacklist rule. Of an inbox also whether it is gone; of an activity its deliveries by state, and what they wait for;
    of one that somebody else sent whether it was handled; of an actor of this node its keys, followers and what is owed
    in its name. Of a name that nobody here knows it says so, and which may have been meant. Exit status 1 if something
    stands in the way, or the name is not known.
    """
    from federation.admin.servers import misnamed, servers
    from federation.protocol.errors import UrlError

    try:
        name = servers.server_url(url)
    except UrlError as error:
        near = with_database(lambda database: misnamed.meant(database, url))
        wrong = f"{url} is an account; give the URL of its actor" if _ACCOUNT.fullmatch(url) else str(error)
        fail(wrong, *([misnamed.question(near)] if near else []))
    answer = with_node(lambda federation: _explained(federation, name, url))
    if as_json:
        print_json(answer.told)
    else:
        print_lines([answer.title, *(f"  {sentence}" for sentence in answer.sentences)])
    if answer.in_the_way:
        raise typer.Exit(NOT_FOUND)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What is told, to programs and to people, and whether something stands in the way."""

    told: object
    title: str
    sentences: Sequence[str]
    in_the_way: bool


async def _explained(federation: Federation, server_url: str, typed: str) -> _Answer:
    """Explain what the typed text names: an activity, an actor of this node, or else a server."""
    from federation.admin.activitypub import own_actor
    from federation.admin.named import named
    from federation.admin.received import arrivals
    from federation.admin.sent_activities import whereabouts
    from federation.admin.servers.servers import whole_url
    from federation.admin.why import explain

    url = whole_url(typed)
    if (found := await whereabouts(federation, url)) is not None:
        return _Answer(told=found, title=url, sentences=[*found.sentences()], in_the_way=not found.activity.arrived)
    if (came := await arrivals(federation.database, url)) is not None:
        return _Answer(told=came, title=url, sentences=[*came.sentences()], in_the_way=not came.are_done)
    if (actor := await own_actor(federation, url)) is not None:
        return _Answer(told=actor, title=url, sentences=[*actor.sentences()], in_the_way=not actor.is_well)
    is_ours = server_url == federation.own_url
    if is_ours and (nothing := await named(federation.database, url, own_url=server_url)) is not None:
        return _Answer(told=nothing, title=url, sentences=[*nothing.sentences()], in_the_way=True)
    why = await explain(federation, server_url, typed=typed)
    return _Answer(told=why, title=server_url, sentences=[*why.sentences()], in_the_way=why.in_the_way)
