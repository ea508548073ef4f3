"""What each command prints, for people and for programs, and how it ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import TypeVar

import pytest
from sqlalchemy import select

from db import (
    Database,
    DeliveryAttempt,
    DeliveryJob,
    DeliveryState,
    HoldReason,
    Server,
    ServerScorecard,
)
from db.deliveries import AttemptOutcome
from federation.app import Federation
from federation.base.jobs import POST_JOB
from federation.base.settings import Settings
from tests.federation.admin.conftest import end
from tests.federation.cli.conftest import Command
from tests.federation.protocol.vectors import A, B

T = TypeVar("T")

PEER = "https://peer.example"
PAYLOAD = '{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"p"}}'
LISTINGS = [
    ["servers", "list"],
    ["deliveries", "list"],
    ["deliveries", "stats"],
    ["blacklist", "list"],
    ["queues", "stats"],
    ["workers", "list"],
    ["scheduler", "list"],
    ["db", "check"],
    ["keys", "show"],
]


def on_the_node(work: Callable[[Federation], Awaitable[T]]) -> T:
    """What happens elsewhere, while no command runs."""

    async def session() -> T:
        node = Federation(Settings.load())
        try:
            return await work(node)
        finally:
            await node.close()

    return asyncio.run(session())


async def know(node: Federation, *, reason: str | None = None) -> None:
    """The peer is registered; with a reason it is sick since two hours ago."""
    now = datetime.now(UTC)
    async with node.database.transaction() as session:
        session.add(
            Server(
                url=PEER,
                public_key=B.env["FEDERATION_PUBLIC_KEY"],
                encryption_public_key=B.env["FEDERATION_ENCRYPTION_PUBLIC_KEY"],
                last_seen=now - timedelta(hours=2),
                created_at=now - timedelta(days=9),
                updated_at=now - timedelta(hours=2),
                is_healthy=True,
            )
        )
    if reason is not None:
        await node.registry.mark_unhealthy(PEER, reason)


async def owe(node: Federation, number: int) -> list[str]:
    async with node.outbox.transaction() as session:
        return [
            await node.outbox.enqueue_delivery(session, POST_JOB, f"{PEER}/posts", PEER, PAYLOAD) for _ in range(number)
        ]


async def give_up(
    node: Federation,
    ids: list[str],
    code: str,
    *,
    state: DeliveryState = DeliveryState.FAILED,
    reason: HoldReason | None = None,
) -> None:
    """An attempt at each failed, and that was the last; or they are held."""
    for each in ids:
        await end(node, each, each, state=state, reason=reason, code=code, error="it \x1b[31mfailed")


async def put_on_hold(node: Federation, ids: list[str], reason: HoldReason = HoldReason.SERVER) -> None:
    await give_up(node, ids, "CONN_REFUSED", state=DeliveryState.HELD, reason=reason)


async def fall(node: Federation, code: str) -> None:
    """The link to the peer goes down."""
    await node.links.exhausted(PEER, code, first_attempted_at=datetime.now(UTC))


async def rows_of(node: Federation) -> dict[str, DeliveryJob]:
    async with node.database.read() as session:
        return {row.id: row for row in (await session.execute(select(DeliveryJob))).scalars()}


@pytest.mark.parametrize("arguments", LISTINGS, ids=" ".join)
def test_every_listing_prints_one_json_document(command: Command, arguments: list[str]) -> None:
    """Also when there is nothing to list; nothing else is on stdout."""
    done = command(*arguments, "--json")
    assert (done.status, done.stderr) == (0, "")
    assert isinstance(done.json, list | dict)


@pytest.mark.parametrize("arguments", LISTINGS, ids=" ".join)
def test_no_listing_shows_a_secret(command: Command, arguments: list[str]) -> None:
    """In neither form."""
    secrets = {value for name, value in A.env.items() if "PRIVATE" in name}
    for done in (command(*arguments), command(*arguments, "--json")):
        assert not any(secret in done.stdout + done.stderr for secret in secrets)


def test_private_keys_are_shown_on_request_alone(command: Command) -> None:
    assert command("keys", "show", "--private", "--json").json == A.env
    public = {name: value for name, value in A.env.items() if "PRIVATE" not in name}
    assert command("keys", "show", "--json").json == public


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
    assert "2 deliveries to it are on the way, the oldest made" in told
    assert "1 delivery to it failed for good in the last days: 1 CONN_REFUSED." in told
    assert "CONN_REFUSED (A_CODE_OF_ITS_OWN) after 12 ms" in told
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
    assert re.search(r"it is looked at in (30|2\d) s \(.*\), and once it is back everything held is sent.$", plan)
    assert "attempted" not in "".join(rest)
    document = command("why", PEER, "--json").json
    assert isinstance(document, dict)
    assert document["next_probe"] == {"at": document["link"]["next_probe_at"], "queued": False}


@pytest.mark.parametrize(
    ("happens", "told"),
    [
        (lambda node: node.links.hold(PEER), "held by an operator since"),
        (lambda node: node.links.rests(PEER, timedelta(hours=1)), "It asked for a pause until"),
        (lambda node: node.links.mismatched(PEER), "It shows another signing key than the registered one since"),
        (lambda node: fall(node, "HTTP_502"), "one delivery is sent to it to see if it takes it in"),
    ],
    ids=["operator", "rest", "mismatch", "canary"],
)
def test_why_tells_what_else_holds_deliveries(
    command: Command, happens: Callable[[Federation], Awaitable[object]], told: str
) -> None:
    """Also with nothing held yet: what comes will be."""
    on_the_node(know)
    on_the_node(happens)
    done = command("why", PEER)
    assert (done.status, told in done.stdout) == (1, True)


def test_why_is_content_with_a_healthy_server(command: Command) -> None:
    """Status 0, and since when."""
    on_the_node(know)
    done = command("why", PEER)
    assert (done.status, "It is healthy since" in done.stdout, "(9 d)" in done.stdout) == (0, True, True)
    assert done.stdout.splitlines()[1] == "  Deliveries to it are sent."


async def attempted(database: Database, delivery_id: str) -> None:
    async with database.transaction() as session:
        session.add(
            DeliveryAttempt(
                delivery_id=delivery_id,
                job_name=POST_JOB,
                server_url=PEER,
                attempt=5,
                started_at=datetime.now(UTC),
                duration_ms=12,
                outcome=AttemptOutcome.RETRYABLE,
                error_code="CONN_REFUSED",
                remote_code="A_CODE_OF_ITS_OWN",
            )
        )


def test_deliveries_are_shown_counted_retried_and_dropped(command: Command) -> None:
    """What other servers wrote reaches no terminal as it is."""
    ids = on_the_node(lambda node: owe(node, 3))
    on_the_node(lambda node: give_up(node, ids[:2], "TIMEOUT"))
    shown = command("deliveries", "show", ids[0])
    assert ("failed" in shown.stdout, "it  [31mfailed" in shown.stdout, "FEDERATE" in shown.stdout) == (
        True,
        True,
        False,
    )
    stats = command("deliveries", "stats", "--json").json
    assert isinstance(stats, dict)
    assert (stats["open"], stats["ready"], stats["failed"], stats["codes"]) == (1, 1, 2, {"TIMEOUT": 2})
    page = command("deliveries", "list", "--code", "TIMEOUT", "--limit", "1", "--json").json
    assert isinstance(page, dict)
    assert [each["id"] for each in page["deliveries"]] == [min(ids[:2])] == [page["after"]]

    assert "1 delivery is owed again" in command("deliveries", "retry", ids[0]).stdout
    assert command("deliveries", "drop", "--code", "TIMEOUT", "--yes").stdout == "1 delivery is dropped\n"
    assert command("deliveries", "show", ids[1]).status == 1
    assert command("deliveries", "drop", "--state", "open", "--all", "--yes", "--json").json == {
        "dropped": 2,
        "busy": 0,
    }
    assert command("deliveries", "drop", "--all", "--yes").status == 1


def test_held_and_expired_deliveries_are_listed_and_counted(command: Command) -> None:
    """With the reason, and how the last attempt failed."""
    ids = on_the_node(lambda node: owe(node, 3))
    on_the_node(lambda node: put_on_hold(node, ids[:1]))
    on_the_node(lambda node: put_on_hold(node, ids[1:2], HoldReason.OURS))
    listed = command("deliveries", "list", "--state", "held")
    assert (ids[0] in listed.stdout, ids[2] in listed.stdout) == (True, False)
    page = command("deliveries", "list", "--state", "open", "--json").json
    assert isinstance(page, dict)
    told = {each["id"]: (each["state"], each["held_reason"], each["error_code"]) for each in page["deliveries"]}
    assert told == {
        ids[0]: ("held", "server", "CONN_REFUSED"),
        ids[1]: ("held", "ours", "CONN_REFUSED"),
        ids[2]: ("ready", None, None),
    }
    shown = command("deliveries", "show", ids[0]).stdout
    assert re.search("held for +server", shown)
    stats = command("deliveries", "stats", "--json").json
    assert isinstance(stats, dict)
    assert (stats["open"], stats["held"], stats["held_servers"]) == (3, 2, 1)
    assert (stats["held_by_reason"], stats["servers"][0]["held"]) == ({"server": 1, "ours": 1}, 2)
    assert "held for 1 server\n" in command("deliveries", "stats").stdout
    assert command("deliveries", "list", "--state", "expired", "--json").json == {"deliveries": [], "after": None}


def test_an_operator_holds_deliveries_and_releases_them(command: Command) -> None:
    """New ones are held at once; after the release they are due, and the link is up."""
    assert "are held (0 owed now)" in command("deliveries", "hold", PEER).stdout
    (each,) = on_the_node(lambda node: owe(node, 1))
    assert on_the_node(rows_of)[each].held_reason is HoldReason.SERVER
    assert re.search("held by an operator +yes", command("servers", "show", PEER).stdout)
    assert command("deliveries", "release", PEER).stdout == "1 delivery is released\n"
    assert on_the_node(lambda node: node.releaser.tick()) == 1
    assert on_the_node(rows_of)[each].state is DeliveryState.READY


def test_everything_held_becomes_jobs_at_once(command: Command) -> None:
    """As an older version needs it: whatever holds them, but for those behind an older one, which follows it."""
    ids = on_the_node(lambda node: owe(node, 4))
    for each, reason in zip(ids, (HoldReason.SERVER, HoldReason.REST, HoldReason.OURS, HoldReason.ORDER), strict=True):
        on_the_node(lambda node, each=each, reason=reason: put_on_hold(node, [each], reason))  # type: ignore[misc] # now
    on_the_node(lambda node: fall(node, "TIMEOUT"))
    done = command("deliveries", "release", "--all", "--json")
    assert done.json == {"released": 3, "in_order": 1}
    rows = on_the_node(rows_of)
    assert [rows[each].state.value for each in ids] == ["ready", "ready", "ready", "held"]
    assert on_the_node(lambda node: queued(node, [f"{each}.1" for each in ids])) == [True, True, True, False]
    assert [command("deliveries", "release", *which).status for which in ([], [PEER, "--all"])] == [2, 2]


async def queued(node: Federation, ids: list[str]) -> list[bool]:
    await node.delivery_queue.start()
    return [job is not None for job in await node.delivery_queue.storage.status(ids)]


@pytest.mark.parametrize("verb", ["retry", "drop"])
def test_nothing_is_changed_in_bulk_unless_it_was_chosen(command: Command, verb: str) -> None:
    """Neither without a choice nor, for what destroys, without anybody to ask."""
    on_the_node(lambda node: owe(node, 1))
    assert command("deliveries", verb).status == 2
    assert command("deliveries", "drop", "--all").status == 1
    stats = command("deliveries", "stats", "--json").json
    assert isinstance(stats, dict)
    assert stats["open"] == 1


def test_the_blacklist_goes_out_and_comes_in(command: Command, node_environment: Mapping[str, str]) -> None:
    """A dry run changes nothing; a bad row stops it all, with its line, unless it may be skipped."""
    assert command("blacklist", "add", "evil.example", "--reason", "spam").status == 2
    assert command("blacklist", "add", "https://evil.example", "--reason", "spam", "--for", "soon").status == 2
    assert command("blacklist", "add", "https://evil.example", "--reason", "spam", "--for", "2d").status == 0
    assert command("blacklist", "check", "evil.example").status == 1
    assert command("blacklist", "export", "--output", "out.csv").status == 0
    with open("out.csv", "a", encoding="utf-8") as file:
        file.write("*.bad.example,spam,,\nnonsense,why,,\n")

    assert command("blacklist", "import", "out.csv", "--dry-run", "--skip-bad").status == 0
    refused = command("blacklist", "import", "out.csv")
    assert (refused.status, "wrong: line 4: " in refused.stdout) == (1, True)
    assert command("blacklist", "check", "x.bad.example").status == 0
    done = command("blacklist", "import", "out.csv", "--skip-bad")
    assert (done.status, "imported: 1 added, 0 changed, 1 as they were" in done.stdout) == (0, True)
    assert command("blacklist", "check", "x.bad.example").status == 1
    assert command("blacklist", "remove", "*.bad.example").status == 0
    assert command("blacklist", "remove", "*.bad.example").status == 1


def test_servers_are_listed_shown_and_forgotten(command: Command) -> None:
    """Forgetting asks first; who is not there is told with status 1."""
    on_the_node(lambda node: know(node, reason="TIMEOUT"))
    assert PEER in command("servers", "list", "--unhealthy").stdout
    assert PEER not in command("servers", "list", "--healthy").stdout
    assert "TIMEOUT" in command("servers", "show", "peer.example").stdout
    assert command("servers", "forget", PEER).status == 1
    assert command("servers", "forget", PEER, "--yes").status == 0
    for verb in (["show"], ["probe"], ["forget", "--yes"]):
        assert command("servers", *verb, PEER).status == 1


def test_servers_are_shown_with_their_link(command: Command) -> None:
    """Its state, cause, next probe and what is held; also of a server that nobody has discovered yet."""
    on_the_node(lambda node: fall(node, "TIMEOUT"))
    assert re.search("registry +not in it", command("servers", "show", PEER).stdout)
    on_the_node(know)
    (each,) = on_the_node(lambda node: owe(node, 1))
    *_, row = command("servers", "list").stdout.splitlines()
    assert (row.split()[1], row.split()[4:6]) == ("down", ["TIMEOUT", "1"])
    listed = command("servers", "list", "--json").json
    assert isinstance(listed, dict)
    link = listed["links"][PEER]
    assert (link["state"], link["held"], link["operator_hold"], each != "") == ("down", 1, False, True)
    assert command("servers", "set", PEER, "--profile", "original").status == 0
    shown = command("servers", "show", PEER, "--json").json
    assert isinstance(shown, dict)
    assert (shown["is_healthy"], shown["link"]["profile"]) == (True, "original")
    assert command("servers", "set", PEER, "--profile", "none").status == 0
    assert re.search("profile +-", command("servers", "show", PEER).stdout)


def test_servers_are_listed_with_the_scorecards_of_the_analytics(command: Command) -> None:
    """The score of seven days and the advice; neither where there are none. `why` has it all."""
    on_the_node(know)
    before = command("servers", "list", "--json").json
    on_the_node(lambda node: judge(node.database))
    *_, row = command("servers", "list").stdout.splitlines()
    listed, explained = command("servers", "list", "--json").json, command("why", PEER, "--json").json

    assert row.split()[-2:] == ["43", "watch"]
    assert isinstance(before, dict)
    assert isinstance(listed, dict)
    assert isinstance(explained, dict)
    card = listed["scorecards"][PEER]
    assert (card["score"], card["action"], card["as_of"]) == (43.2, "watch", "2026-01-02")
    assert (before["scorecards"], explained["scorecard"]) == ({}, card)


async def judge(database: Database) -> None:
    """The analytics have a scorecard of the peer's last week, and one of its last month."""
    async with database.transaction() as session:
        for window_days, score, action in ((7, 43.2, "watch"), (30, 99.0, "keep")):
            session.add(
                ServerScorecard(
                    server_url=PEER,
                    window_days=window_days,
                    as_of=date(2026, 1, 2),
                    generation=1,
                    attempts=10,
                    delivered=4,
                    score=score,
                    action=action,
                    reasons=["under 90 % delivered"],
                )
            )


def test_queues_are_paused_resumed_and_cleaned(command: Command) -> None:
    """By the short name or the whole one; an unknown one is told with those there are."""
    on_the_node(lambda node: owe(node, 1))
    assert command("queues", "pause", "delivery").status == 0
    assert on_the_node(claimed) == 0
    assert command("queues", "resume", "federation-delivery").status == 0
    assert on_the_node(claimed) == 1
    assert command("queues", "clean", "--yes", "--json").json == dict.fromkeys(
        ["federation-delivery", "federation-health-check", "federation-discovery", "federation-tasks"], 0
    )
    unknown = command("queues", "pause", "mail")
    assert (unknown.status, "federation-tasks" in unknown.stderr) == (2, True)


async def claimed(node: Federation) -> int:
    await node.delivery_queue.start()
    return len(await node.delivery_queue.storage.claim("w", leases={"*": timedelta(minutes=1)}, limit=10))


def test_recurring_work_runs_when_asked(command: Command) -> None:
    """And says how it went."""
    run = command("scheduler", "run", "purge", "--json").json
    assert isinstance(run, dict)
    assert (run["outcome"], run["detail"]["deliveries"]) == ("done", 0)
    assert " done " in command("scheduler", "list").stdout
    unknown = command("scheduler", "run", "nothing")
    assert (unknown.status, "outbox-sweep" in unknown.stderr) == (2, True)
