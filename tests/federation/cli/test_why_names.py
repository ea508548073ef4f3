"""`federation why` of servers that moved, and of names that nobody here knows."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from sqlalchemy import insert, update
from sqlmodel import col

from db import Server, ServerLink
from federation.runtime.composition import Federation
from tests.federation.cli.conftest import Command
from tests.federation.cli.elsewhere import PEER, fall, know, on_the_node, owe, put_on_hold

NEW = "https://new.example"
FORGET, DISCOVER = f"`federation servers forget {PEER}`", f"`federation servers discover {NEW}`"


async def register(node: Federation, *urls: str) -> None:
    """They are registered, each with keys of its own."""
    now = datetime.now(UTC)
    rows = [
        {
            "url": url,
            "public_key": f"signing {url}",
            "encryption_public_key": f"sealing {url}",
            "last_seen": now,
            "created_at": now,
            "updated_at": now,
            "is_healthy": True,
        }
        for url in urls
    ]
    async with node.database.transaction() as session:
        await session.execute(insert(Server), rows)


async def redirect(node: Federation) -> None:
    """The peer answers with a redirect to the new name until its link is down."""
    await fall(node, "HTTP_308")
    moved = update(ServerLink).where(col(ServerLink.server_url) == PEER).values(moved_to=NEW)
    async with node.database.transaction() as session:
        await session.execute(moved)


def test_why_tells_where_a_server_moved_and_what_to_do(command: Command) -> None:
    """The new name is discovered; what is held for the old one goes nowhere else, and can be dropped."""
    on_the_node(know)
    ids = on_the_node(lambda node: owe(node, 2))
    on_the_node(redirect)
    on_the_node(lambda node: put_on_hold(node, ids))

    done = command("why", PEER)

    _, _, _, moved, new, held, *_ = done.stdout.splitlines()
    assert moved == f"  Its last redirect led to {NEW}."
    assert new.startswith(f"  If this server has moved there, {DISCOVER} registers it under that name.")
    assert new.endswith(
        f"If that says that a key is registered for another, {FORGET} comes first, which ends the follows."
    )
    assert held.startswith(f"  What is owed to {PEER} goes to no other name: ")
    assert f"`federation deliveries drop --server {PEER}`" in held
    assert command("deliveries", "drop", "--server", PEER, "--yes").status == 0
    assert "goes to no other name" not in command("why", PEER).stdout
    document = command("why", PEER, "--json").json
    assert isinstance(document, dict)
    assert document["move"] == {"to": NEW, "registered": False, "claims_keys": False}
    assert document["link"]["moved_to"] == NEW


def test_why_says_to_forget_the_old_name_of_a_server_that_shows_its_keys_elsewhere(command: Command) -> None:
    """Keys are registered once: the old name has to go before the new one can come."""
    on_the_node(know)
    on_the_node(redirect)
    on_the_node(claim)

    told = command("why", PEER).stdout

    assert f"shows a key of this one: {FORGET}, which ends the follows that name it, and then {DISCOVER}" in told
    assert command("servers", "forget", PEER, "--yes").status == 0
    told = command("why", PEER).stdout
    assert f"Its last redirect led to {NEW}." in told
    assert "servers forget" not in told


async def claim(node: Federation) -> None:
    """The new name shows a key of the peer."""
    values = {"claimed_by": NEW, "claimed_at": datetime.now(UTC), "claim_proved": True}
    async with node.database.transaction() as session:
        await session.execute(update(Server).where(col(Server.url) == PEER).values(**values))


@pytest.mark.parametrize("is_registered", [True, False])
def test_why_tells_that_the_new_name_is_registered(command: Command, *, is_registered: bool) -> None:
    """Then it need not be discovered, and the old one may be forgotten if it is still there."""
    if is_registered:
        on_the_node(know)
    on_the_node(redirect)
    on_the_node(lambda node: register(node, NEW))

    told = command("why", PEER).stdout

    assert "A server is registered under that name" in told
    assert (FORGET in told, DISCOVER in told) == (is_registered, False)


def test_a_server_that_is_back_has_not_moved(command: Command) -> None:
    """A redirect of long ago is not told."""
    on_the_node(know)
    on_the_node(redirect)
    on_the_node(lambda node: node.links.returned(PEER, reason="probe"))
    assert NEW not in command("why", PEER).stdout


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("peer.example", ["http://peer.example", "https://peer.example:8443"]),
        ("peer.example:8453", ["http://peer.example", "https://peer.example:8443"]),
        ("example", ["https://social.other.example", "http://peer.example", "https://peer.example:8443"]),
        ("other.example", ["https://social.other.example"]),
        ("www.social.other.example", ["https://social.other.example"]),
        ("peer", ["http://peer.example", "https://peer.example:8443"]),
        ("https://peer.exmaple", ["http://peer.example", "https://peer.example:8443"]),
        ("https:/peer.example", ["http://peer.example", "https://peer.example:8443"]),
        ("htps//peer.example", ["http://peer.example", "https://peer.example:8443"]),
        ("PEER_EXAMPLE", ["http://peer.example", "https://peer.example:8443"]),
        ("nothing.like.it", []),
        ("127.0.0.1:8451", ["http://127.0.0.1:8452"]),
        ("[::1]", ["http://[::1]:8452"]),
    ],
)
def test_a_name_that_nobody_knows_is_told_with_what_may_be_meant(
    command: Command, typed: str, meant: list[str]
) -> None:
    """Status 1, and not a word of deliveries that are sent."""
    known = ["http://127.0.0.1:8452", "http://[::1]:8452", "http://peer.example", "https://peer.example:8443"]
    on_the_node(lambda node: register(node, *known, "https://social.other.example"))

    done = command("why", typed)
    document = command("why", typed, "--json").json

    assert done.status == 1
    name, said, *question, discover = done.stdout.splitlines()
    assert said == "  Nobody here knows it: it is not in the registry, and no delivery to it is owed or on record."
    assert discover.endswith(
        f"`federation servers discover {name}` asks it who it is, as a first delivery by sealed would."
    )
    assert isinstance(document, dict)
    assert (document["known"], set(document["meant"])) == (False, set(meant))
    assert all(url in question[0] for url in meant) if meant else not question


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("htps://peer.exmaple", True),
        ("https:peer.example", True),
        ("https://somebody@peer.example", True),
        ("peer.example/ a", True),
        ("peer,example", True),
        ("://", False),
        ("%", False),
        ("\udcff", False),
        ("\x1b[31m", False),
        ("x" * 100_000, False),
    ],
)
def test_what_is_no_url_is_refused_with_what_may_be_meant(command: Command, typed: str, *, meant: bool) -> None:
    """Status 2, as wrong usage."""
    on_the_node(know)

    done, document = command("why", typed), command("why", typed, "--json").json

    assert (done.status, f"Is {PEER} meant?" in done.stderr, done.stdout) == (2, meant, "")
    assert isinstance(document, dict)
    assert (document["error"]["kind"], document["error"]["details"]) == ("usage", [f"Is {PEER} meant?"] * meant)


def test_a_name_is_known_by_anything_on_record(command: Command) -> None:
    """A link, a delivery, or a rule, though the registry has nothing; this node itself is known, too."""
    on_the_node(lambda node: owe(node, 1))
    on_the_node(lambda node: node.links.hold(NEW))
    command("blacklist", "add", "*.evil.example", "--reason", "spam")
    for url in (PEER, NEW, "https://a.evil.example"):
        document = command("why", url, "--json").json
        assert isinstance(document, dict)
        assert (document["known"], document["meant"]) == (True, [])
    assert command("why", "https://a.example").stdout.splitlines()[1:] == ["  It is this node itself."]
