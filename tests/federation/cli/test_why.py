"""`federation why`: what stands in the way of deliveries to a server, and what happens next."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update
from sqlmodel import col

from db import (
    AttemptNote,
    Database,
    DeliveryAttempt,
    DeliveryJob,
    Server,
)
from db.deliveries import AttemptOutcome
from federation.admin.servers.ways import Way
from federation.base.queues.job_data import POST_JOB
from federation.base.settings.settings import OLD_KEY_VARIABLES
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from federation.servers.link_rules import Link
from tests.federation.cli.conftest import Command
from tests.federation.cli.elsewhere import PEER, at_work, fall, give_up, know, on_the_node, owe, put_on_hold


def test_why_tells_what_stands_in_the_way(command: Command) -> None:
    """State, since when, next probe, blacklist rule, backlog and last attempts; status 1."""
    on_the_node(lambda node: know(node, reason="CONN_REFUSED"))
    ids = on_the_node(lambda node: owe(node, 3))
    on_the_node(lambda node: give_up(node, ids[:1], "CONN_REFUSED"))
    command("blacklist", "add", "*.peer.example", "--reason", "spam")
    on_the_node(lambda node: attempted(node.database, ids[0]))

    done = command("why", "peer.example")

    assert done.status == 1
    told = done.stdout
    assert "It is blacklisted by *.peer.example for good: spam." in told
    assert "It is unhealthy since" in told
    assert "because of CONN_REFUSED: nothing listens on its port" in told
    assert re.search("0 probes have failed so far; the next one is in [45] min", told)
    assert "2 deliveries to it are to be sent, the oldest made" in told
    assert "Nothing is sent: no process that delivers runs" in told
    assert "1 delivery to it failed for good in the last days: 1 CONN_REFUSED." in told
    assert "CONN_REFUSED (A_CODE_OF_ITS_OWN) after 12 ms, and given up." in told
    document = command("why", PEER, "--json").json
    assert isinstance(document, dict)
    assert document["next_probe"]["queued"] is True
    assert [rule["rule"] for rule in document["rules"]] == ["*.peer.example"]


def test_why_begins_with_the_link_and_what_is_held(command: Command) -> None:
    """Two sentences: state, since, cause; how many are held, since when, what happens next and when."""
    on_the_node(know)
    ids = on_the_node(lambda node: owe(node, 2))
    on_the_node(lambda node: fall(node, "CONN_REFUSED"))
    on_the_node(lambda node: put_on_hold(node, ids))

    done = command("why", PEER)

    assert done.status == 1
    _, state, plan, *rest = done.stdout.splitlines()
    assert re.match(r"  It is down since .* \(.*\), because of CONN_REFUSED: nothing listens on its port; ", state)
    assert re.match("  2 deliveries are held for it, the oldest made .* ago and given up in (7 d|6 d 23 h) .* at", plan)
    assert re.search(
        r"one delivery is sent to it in (30|2\d) s \(.*\), to see if it takes it, and then the others.$", plan
    )
    assert "attempted" not in "".join(rest)
    assert re.fullmatch(r"  It is unhealthy since \S+ \S+ UTC \([^)]+\)\.", rest[0])
    document = command("why", PEER, "--json").json
    assert isinstance(document, dict)
    assert document["next_probe"] == {"at": document["link"]["next_probe_at"], "queued": False}


@pytest.mark.parametrize(
    ("happens", "told"),
    [
        (lambda node: node.links.hold(PEER), "held by an operator since"),
        (lambda node: node.links.rests(PEER, timedelta(hours=1)), "It asked for a pause until"),
        (lambda node: node.links.mismatched(PEER), "It shows another signing key than the registered one since"),
        (lambda node: fall(node, "HTTP_502"), "it is looked at in"),
    ],
    ids=["operator", "rest", "mismatch", "down"],
)
def test_why_tells_what_else_holds_deliveries(
    command: Command, happens: Callable[[Federation], Awaitable[object]], told: str
) -> None:
    """Also with nothing held yet: what comes will be."""
    on_the_node(know)
    on_the_node(happens)
    done = command("why", PEER)
    assert (done.status, told in done.stdout) == (1, True)


def test_a_release_with_nothing_left_to_release_keeps_nothing_back() -> None:
    """Until it has ended; what comes meanwhile goes out."""
    now = datetime.now(UTC)
    link = Link(server_url=PEER, since=now, release_at=now + timedelta(seconds=1))
    way = Way(wire=link.wire, link=link, held=0, oldest_held=None)
    assert list(way.sentences(now, max_age=None))[1] == "Nothing is held for it; new deliveries go out at once."


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        ("HTTP_502", "something answers there, but not as the server should"),
        ("HTTP_308", "it redirects, and redirects are not followed"),
        ("FOREIGN_ANSWER", "something answers there that is not the server"),
        ("DISCOVERY", "it could not be asked who it is"),
        ("UNKNOWN", "the connection failed in a way we have no name for"),
    ],
)
def test_why_gives_the_true_reason_once(command: Command, code: str, meaning: str) -> None:
    """The registry has `UNKNOWN` for what Node has no code for: that is no second reason."""
    on_the_node(know)
    on_the_node(lambda node: fall(node, code))

    told = command("why", PEER).stdout

    assert f"because of {code}: {meaning}; deliveries to it are held." in told
    assert (told.count("because of"), told.count("It is unhealthy since")) == (1, 1)


def test_why_says_when_no_reason_is_on_record(command: Command) -> None:
    """As where another implementation wrote none."""
    on_the_node(know)
    on_the_node(lambda node: node.registry.mark_unhealthy(PEER, "UNKNOWN"))

    done = command("why", PEER)

    assert (done.status, "because of" in done.stdout, "It is unhealthy since" in done.stdout) == (1, False, True)


def test_why_says_what_to_do_about_a_mismatch(command: Command) -> None:
    """Its operator brings the new key; or the old one is lost."""
    on_the_node(know)
    on_the_node(lambda node: node.links.mismatched(PEER))

    told = command("why", PEER).stdout

    assert "once it shows the registered key, or has proved the new one (`federation keys rotate` there)" in told
    assert f"`federation servers forget {PEER}`" in told


def test_why_tells_who_does_not_know_our_new_keys(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, and the command that asks again; deliveries go on, so nothing is in the way."""
    on_the_node(know)
    for name, value in zip(OLD_KEY_VARIABLES, generate_own_keys().to_env().values(), strict=True):
        monkeypatch.setenv(name, value)
    assert f"was not asked to take the new ones: `federation keys rotate --only {PEER}`" in command("why", PEER).stdout
    on_the_node(lambda node: node.registry.note_not_rotated(PEER, "NOT_SUPPORTED"))

    done = command("why", PEER)

    assert done.status == 0
    assert "NOT_SUPPORTED: it runs something that cannot change keys, and goes on knowing the old ones." in done.stdout
    document = command("why", PEER, "--json").json
    assert isinstance(document, dict)
    assert document["knows"] == "old"


def test_why_tells_of_keys_that_are_not_here(command: Command) -> None:
    """Nothing can be signed for it: a finding."""
    on_the_node(know)
    on_the_node(lambda node: node.registry.note_knows(PEER, "another"))

    done = command("why", PEER)

    assert (done.status, "It knows this node by keys that are not set here" in done.stdout) == (1, True)


def test_why_tells_of_a_server_that_refuses_our_signature(command: Command) -> None:
    """By the last attempt, and what its operator has to do."""
    on_the_node(know)
    on_the_node(lambda node: attempted(node.database, "one", code="INVALID_SIGNATURE"))
    assert "It refuses our signature, so it knows this node by other keys" in command("why", PEER).stdout
    on_the_node(lambda node: attempted(node.database, "two"))
    assert "It refuses our signature" not in command("why", PEER).stdout


def test_why_is_content_with_a_healthy_server(command: Command) -> None:
    """Status 0, and since when."""
    on_the_node(know)
    done = command("why", PEER)
    assert (done.status, "It is healthy since" in done.stdout, "(9 d)" in done.stdout) == (0, True, True)
    assert done.stdout.splitlines()[1] == "  Deliveries to it are sent."


def test_a_server_was_seen_when_it_last_took_a_delivery(command: Command) -> None:
    """The registry is told of it only when its health changes."""
    on_the_node(know)
    assert "last seen 2 h" in command("why", PEER).stdout
    [delivery] = on_the_node(lambda node: owe(node, 1))
    on_the_node(at_work)
    on_the_node(lambda node: attempted(node.database, delivery, code=None))
    told = command("why", PEER).stdout
    assert re.search(r"last seen [0-9]+ s ago", told)
    assert "Deliveries to it are sent." in told


async def attempted(database: Database, delivery_id: str, *, code: str | None = "A_CODE_OF_ITS_OWN") -> None:
    """By the code it failed; with none it was delivered."""
    async with database.transaction() as session:
        session.add(
            DeliveryAttempt(
                delivery_id=delivery_id,
                job_name=POST_JOB,
                server_url=PEER,
                attempt=5,
                started_at=datetime.now(UTC),
                duration_ms=12,
                outcome=AttemptOutcome.RETRYABLE if code else AttemptOutcome.DELIVERED,
                error_code="CONN_REFUSED" if code else None,
                remote_code=code,
                note=AttemptNote.GIVEN_UP,
            )
        )


RIVAL = "https://rival.example"


async def claimed(node: Federation, *, proved: bool) -> None:
    """The rival shows one of the peer's keys."""
    async with node.database.transaction() as session:
        claim = {"claimed_by": RIVAL, "claimed_at": datetime.now(UTC), "claim_proved": proved}
        await session.execute(update(Server).where(col(Server.url) == PEER).values(**claim))


@pytest.mark.parametrize(
    ("proved", "told", "verdict"),
    [(True, "and can open what is sealed to it", "warning"), (False, "and did not prove to hold it", "note")],
)
def test_who_else_claims_a_key_is_told(command: Command, *, proved: bool, told: str, verdict: str) -> None:
    """At either of the two servers, and by doctor, with the command that ends it."""
    on_the_node(know)
    on_the_node(lambda node: claimed(node, proved=proved))

    at_peer, at_rival = command("why", PEER), command("why", RIVAL)
    document = command("doctor", "--json").json

    sentence = f"{RIVAL} shows a key with which {PEER} is registered, {told}"
    assert sentence in at_peer.stdout
    assert sentence in at_rival.stdout
    assert (at_peer.status, at_rival.status) == (int(proved), 1)
    assert isinstance(document, dict)
    [finding] = [each for each in document["findings"] if each["check"] == "claims"]
    assert (finding["verdict"], sentence in finding["found"]) == (verdict, True)
    assert (f"federation servers forget {PEER}" in finding["advice"]) is proved


def test_why_tells_of_deliveries_by_a_wire_that_is_gone(command: Command) -> None:
    """Nothing sends them, whatever the link of another wire says."""

    async def rename(node: Federation) -> None:
        async with node.database.transaction() as session:
            await session.execute(update(DeliveryJob).where(col(DeliveryJob.id) == ids[0]).values(wire="gone"))

    ids = on_the_node(lambda node: owe(node, 2))
    on_the_node(lambda node: put_on_hold(node, ids))
    on_the_node(rename)

    assert "1 delivery to it waits for the wire 'gone', which this node does not have." in command("why", PEER).stdout
    document = command("why", PEER, "--json").json
    assert isinstance(document, dict)
    assert document["unknown_wires"] == {"gone": 1}
