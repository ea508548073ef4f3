"""Links in the database: any process acts on them, each change is made once, and no change is no write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import Connection, Engine, event, select, update
from sqlmodel import col
from structlog.testing import capture_logs

from db import Database, LinkState, Server, ServerHealthEvent, ServerLink
from federation.sealed.outbound.wire import LOOK_TAKES
from federation.sealed.peers.registry import Registry
from federation.servers.link_rules import BUCKET, HEARD_INTERVAL, LONGEST_WAIT, MAX_REJECTIONS
from federation.servers.links import Links, closed_among
from workers.clock import ManualClock

URL = "https://b.example"


async def no_check(*_: object) -> None:
    """Nobody looks at a server but the test."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def make_links(database: Database, clock: ManualClock) -> AsyncIterator[Callable[[], Awaitable[Links]]]:
    """Links as another process has them: with a cache, a registry and a memory of their own."""
    made: list[tuple[Links, Registry]] = []

    async def make() -> Links:
        registry = Registry(database, schedule_health_check=no_check)
        made.append((Links(database, registry, clock=clock), registry))
        return made[-1][0]

    yield make
    for links, registry in made:
        await links.close()
        await registry.close()


@pytest.fixture
async def links(make_links: Callable[[], Awaitable[Links]]) -> Links:
    return await make_links()


@contextmanager
def counted_writes() -> Iterator[list[str]]:
    """Every statement on `server_links` that is no query."""
    seen: list[str] = []

    def note(_connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if "server_links" in statement and not statement.lstrip().upper().startswith("SELECT"):
            seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


async def take_down(links: Links, clock: ManualClock, code: str = "TIMEOUT") -> None:
    """By evidence over half a minute."""
    for _ in range(3):
        await links.unavailable(URL, code)
        clock.advance(BUCKET)


async def know(database: Database, clock: ManualClock) -> None:
    """The server is in the registry, and well."""
    now = clock.now()
    async with database.transaction() as session:
        session.add(
            Server(
                url=URL,
                public_key="p",
                encryption_public_key="e",
                last_seen=now,
                created_at=now,
                updated_at=now,
                is_healthy=True,
            )
        )


async def is_healthy(database: Database) -> bool:
    async with database.read() as session:
        return (await session.execute(select(col(Server.is_healthy)))).scalar_one()


async def test_a_server_nobody_told_of_is_up(links: Links, database: Database) -> None:
    """And looking at it writes nothing."""
    link = await links.view(URL)
    assert (link.state, link.acknowledged, link.next_probe_at) == (LinkState.UP, False, None)
    async with database.read() as session:
        assert (await session.execute(select(ServerLink))).all() == []


async def test_what_one_process_learned_another_knows(
    links: Links, make_links: Callable[[], Awaitable[Links]], clock: ManualClock
) -> None:
    """At once where it has not looked before; a restart forgets nothing."""
    await take_down(links, clock)
    link = await (await make_links()).view(URL)
    assert (link.state, link.reason, link.since) == (LinkState.DOWN, "TIMEOUT", clock.now() - BUCKET)


async def test_evidence_of_two_processes_adds_up(
    links: Links, make_links: Callable[[], Awaitable[Links]], clock: ManualClock
) -> None:
    """Each saw too little alone; failures in one interval are one, whoever saw them."""
    other = await make_links()
    await asyncio.gather(links.unavailable(URL, "TIMEOUT"), other.unavailable(URL, "TIMEOUT"))
    assert (await links.find(URL)).evidence == 1
    clock.advance(BUCKET)
    await other.unavailable(URL, "TIMEOUT")
    clock.advance(BUCKET)
    await links.unavailable(URL, "TIMEOUT")
    assert (await other.find(URL)).state is LinkState.DOWN


async def test_two_processes_that_learn_of_one_outage_make_one_change_of_it(
    links: Links, make_links: Callable[[], Awaitable[Links]], database: Database, clock: ManualClock
) -> None:
    """One line in the log, one event in the history of the server's health, one date."""
    await know(database, clock)
    others = [links, await make_links(), await make_links()]
    first = clock.now()
    with capture_logs() as logs:
        await asyncio.gather(*(each.exhausted(URL, "CONN_RESET", first_attempted_at=first) for each in others))
    changes = [line for line in logs if line["event"] == "link_changed"]
    assert [(line["wire"], line["was"], line["state"], line["reason"]) for line in changes] == [
        ("sealed", "up", "down", "CONN_RESET")
    ]
    async with database.read() as session:
        events = (await session.execute(select(ServerHealthEvent))).scalars().all()
    assert [(each.to_state.value, each.reason) for each in events] == [("unhealthy", "CONN_RESET")]


async def test_the_registry_follows_the_link(links: Links, database: Database, clock: ManualClock) -> None:
    """Down is not healthy, up is: that is what Node reads. Our history has the reasons that are none of its codes."""
    await know(database, clock)
    await take_down(links, clock, "HTTP_500")
    assert not await is_healthy(database)
    async with database.read() as session:
        assert (await session.execute(select(col(Server.unhealthy_reason)))).scalar_one() == "UNKNOWN"
        assert (await session.execute(select(col(ServerHealthEvent.reason)))).scalar_one() == "HTTP_500"
    await links.returned(URL, reason="probe")
    assert await is_healthy(database)


async def test_a_success_writes_only_where_there_is_something_to_forget(links: Links, clock: ManualClock) -> None:
    """The first acknowledgment is something, a failure since is, and the thousandth success is nothing."""
    with counted_writes() as writes:
        await links.succeeded(URL)
        assert writes
        writes.clear()
        for _ in range(10):
            await links.succeeded(URL)
            clock.advance(timedelta(hours=1))
        assert writes == []
        await links.unavailable(URL, "TIMEOUT")
        writes.clear()
        await links.succeeded(URL)
        assert writes
    assert (await links.find(URL)).evidence == 0


async def test_failures_write_once_in_an_interval(links: Links, clock: ManualClock) -> None:
    """However many deliveries a silent server fails; and nothing while it is known to be down."""
    with counted_writes() as writes:
        await links.unavailable(URL, "TIMEOUT")
        writes.clear()
        for _ in range(20):
            await links.unavailable(URL, "TIMEOUT")
        assert writes == []
        for _ in range(2):
            clock.advance(BUCKET)
            await links.unavailable(URL, "TIMEOUT")
        assert (await links.find(URL)).state is LinkState.DOWN
        writes.clear()
        for _ in range(20):
            clock.advance(BUCKET)
            await links.unavailable(URL, "TIMEOUT")
        assert writes == []


async def test_a_failure_during_a_release_is_never_taken_for_one_of_before(links: Links, clock: ManualClock) -> None:
    """Even in the interval in which this process noted one already: it is the first piece of evidence again."""
    await take_down(links, clock)
    await links.returned(URL, reason="probe")
    await links.unavailable(URL, "TIMEOUT")
    link = await links.find(URL)
    assert (link.state, link.evidence, link.release_start) == (LinkState.UP, 1, 1)


async def test_a_probe_is_taken_by_one(
    links: Links, make_links: Callable[[], Awaitable[Links]], clock: ManualClock
) -> None:
    """Of all processes that find it due; it comes again in half a minute should that one die."""
    await take_down(links, clock)
    everyone = [links, *[await make_links() for _ in range(4)]]
    assert [await each.due_for_probe(10) for each in everyone] == [[]] * 5
    clock.advance(timedelta(seconds=20))
    found = [await each.due_for_probe(10) for each in everyone]
    assert {tuple(link.server_url for link in each) for each in found} == {(URL,)}
    taken = await asyncio.gather(*(each.take_probe(due[0]) for each, due in zip(everyone, found, strict=True)))
    assert sorted(taken) == [False] * 4 + [True]
    assert [await each.due_for_probe(10) for each in everyone] == [[]] * 5
    clock.advance(timedelta(seconds=30))
    assert [link.server_url for link in await links.due_for_probe(10)] == [URL]


async def test_those_longest_due_are_looked_at_first(links: Links, database: Database, clock: ManualClock) -> None:
    """As many as asked for; one that is not due is not among them."""
    for number in (3, 1, 4, 2):
        url = f"https://s{number}.example"
        await links.exhausted(url, "TIMEOUT", first_attempted_at=clock.now())
        planned = {"next_probe_at": clock.now() + timedelta(minutes=number)}
        async with database.transaction() as session:
            await session.execute(update(ServerLink).where(col(ServerLink.server_url) == url).values(**planned))
    clock.advance(timedelta(minutes=3))
    assert [link.server_url for link in await links.due_for_probe(2)] == ["https://s1.example", "https://s2.example"]
    assert len(await links.due_for_probe(10)) == 3


async def test_a_clock_set_back_puts_off_neither_looks_nor_releases(links: Links, clock: ManualClock) -> None:
    """What it wrote while it was two days ahead is due at once, and then planned by the time that is right."""
    await take_down(links, clock)
    clock.advance(-timedelta(days=2))
    (link,) = await links.due_for_probe(10)
    assert await links.take_probe(link)
    await links.probe_failed(URL)
    assert await links.due_for_probe(10) == []
    clock.advance(timedelta(days=2))
    await links.returned(URL, reason="probe")
    clock.advance(-timedelta(days=2))
    assert [link.server_url for link in await links.due_for_release(10)] == [URL]


async def test_a_look_of_before_the_clock_was_set_back_is_forgotten(links: Links, clock: ManualClock) -> None:
    """Or refused deliveries would be tried again without an end until the clock is there once more."""
    assert await links.looked(URL, interval=timedelta(minutes=10), takes=LOOK_TAKES)
    clock.advance(-timedelta(days=2))
    assert await links.looked(URL, interval=timedelta(minutes=10), takes=LOOK_TAKES)
    assert (await links.find(URL)).looked_at == clock.now()


async def test_a_look_that_another_process_has_just_made_counts(links: Links, clock: ManualClock) -> None:
    """Its clock may be a little ahead, or this process may have read its own before it waited for the link."""
    assert await links.looked(URL, interval=timedelta(minutes=10), takes=LOOK_TAKES)
    clock.advance(-timedelta(seconds=1))
    assert not await links.looked(URL, interval=timedelta(minutes=10), takes=LOOK_TAKES)


async def test_a_look_whose_process_died_over_it_is_made_again_soon(links: Links, clock: ManualClock) -> None:
    """Otherwise what is refused in the next ten minutes would fail, though the server has other keys."""
    pause = timedelta(minutes=10)
    for ends in (False, True):
        clock.advance(pause)
        assert await links.looked(URL, interval=pause, takes=LOOK_TAKES)
        if ends:
            await links.look_ended(URL)
        clock.advance(LOOK_TAKES - timedelta(seconds=1))
        assert not await links.looked(URL, interval=pause, takes=LOOK_TAKES)
        clock.advance(timedelta(seconds=1))
        assert await links.looked(URL, interval=pause, takes=LOOK_TAKES) is not ends
        await links.look_ended(URL)


async def test_a_server_that_was_heard_of_is_looked_at_now_and_not_raised(links: Links, clock: ManualClock) -> None:
    """Once a minute at most."""
    await take_down(links, clock)
    for _ in range(2):  # it has just been taken down, or looked at, and this process does not count alone
        await links.probe_failed(URL)
        await links.probe_failed(URL)
        planned = (await links.find(URL)).next_probe_at
        clock.advance(HEARD_INTERVAL - timedelta(seconds=1))
        await links.look_soon(URL)
        assert (await links.find(URL)).next_probe_at == planned
        clock.advance(timedelta(seconds=1))
        await links.look_soon(URL)
        link = await links.find(URL)
        assert (link.state, link.next_probe_at) == (LinkState.DOWN, clock.now())
        assert await links.take_probe(link)


async def test_a_look_at_discover_is_one_for_all_processes_for_a_while(
    links: Links, make_links: Callable[[], Awaitable[Links]], clock: ManualClock
) -> None:
    """Of a thousand refusals in ten minutes one asks."""
    clock.advance(timedelta(hours=1))
    pause = timedelta(minutes=10)
    others = [links, await make_links(), await make_links()]
    looks = await asyncio.gather(
        *(each.looked(URL, interval=pause, takes=LOOK_TAKES) for each in others for _ in range(3))
    )
    assert sum(looks) == 1
    clock.advance(pause)
    assert await links.looked(URL, interval=pause, takes=LOOK_TAKES) is True


@pytest.mark.parametrize("ahead", [timedelta(minutes=1), timedelta(hours=6), timedelta(days=9)])
async def test_a_look_that_a_clock_that_was_ahead_planned_is_due(
    links: Links, clock: ManualClock, ahead: timedelta
) -> None:
    """However little it was ahead, and however long the server has been away."""
    clock.advance(ahead)
    await take_down(links, clock)
    await links.probe_failed(URL)
    clock.advance(-ahead)
    (link,) = await links.due_for_probe(10)
    assert link.since == clock.now()
    assert await links.take_probe(link)
    assert await links.due_for_probe(10) == []
    await links.probe_failed(URL)
    planned = (await links.find(URL)).next_probe_at
    assert planned is not None
    assert planned - clock.now() <= timedelta(minutes=2)


async def test_a_look_farther_off_than_any_rule_plans_is_due(
    links: Links, database: Database, clock: ManualClock
) -> None:
    """Also if nothing else in the row betrays the clock that planned it."""
    await take_down(links, clock)
    for planned, is_due in ((clock.now() + LONGEST_WAIT, False), (clock.now() + LONGEST_WAIT + BUCKET, True)):
        async with database.transaction() as session:
            await session.execute(update(ServerLink).values(next_probe_at=planned))
        assert bool(await links.due_for_probe(10)) is is_due


@pytest.mark.parametrize("ahead", [timedelta(minutes=1), timedelta(hours=6), timedelta(days=9)])
async def test_a_batch_that_a_clock_that_was_ahead_planned_is_due(
    links: Links, clock: ManualClock, ahead: timedelta
) -> None:
    """Unless its server rests until then."""
    clock.advance(ahead)
    await take_down(links, clock)
    await links.returned(URL, reason="probe")
    clock.advance(-ahead)
    assert [link.server_url for link in await links.due_for_release(10)] == [URL]
    await links.rests(URL, timedelta(hours=3))
    await links.release_held(URL)
    assert (await links.find(URL)).release_at is not None


async def test_rejections_of_all_processes_count_together(
    links: Links, make_links: Callable[[], Awaitable[Links]], database: Database, clock: ManualClock
) -> None:
    """A thousand in a row, and the server is one that refuses; nothing of it is lost by writing at once."""
    other = await make_links()
    await asyncio.gather(*(each.rejected(URL, "HTTP_403") for each in (links, other) for _ in range(5)))
    assert (await links.find(URL)).rejections == 10
    async with database.transaction() as session:
        await session.execute(update(ServerLink).values(rejections=MAX_REJECTIONS - 1))
    await other.rejected(URL, "HTTP_403")
    assert (await links.find(URL)).state is LinkState.REFUSING


async def test_an_operators_hold_lasts_until_the_operator_ends_it(links: Links, clock: ManualClock) -> None:
    """No success and no probe lifts it; the release sends what was held, whatever is known of the server."""
    await links.hold(URL)
    await links.succeeded(URL)
    await links.returned(URL, reason="probe")
    held = await links.find(URL)
    assert (held.operator_hold, held.is_open) == (True, False)
    await links.rests(URL, timedelta(hours=1))
    await links.exhausted(URL, "TIMEOUT", first_attempted_at=clock.now() + timedelta(hours=1))
    await links.release(URL)
    link = await links.find(URL)
    assert (link.state, link.operator_hold, link.rest_until) == (LinkState.UP, False, None)
    assert link.release_at == clock.now()


@pytest.mark.parametrize("event", ["raised", "acknowledged"])
async def test_a_link_that_an_operator_holds_is_not_due_for_a_release(
    links: Links, clock: ManualClock, event: str
) -> None:
    """However the server shows itself well: it would be looked at each second for nothing."""
    await take_down(links, clock)
    await links.hold(URL)
    await (links.returned(URL, reason="probe") if event == "raised" else links.succeeded(URL))
    assert await links.due_for_release(10) == []
    await links.release(URL)
    assert [link.server_url for link in await links.due_for_release(10)] == [URL]


async def test_a_release_is_begun_only_where_deliveries_may_be_sent(links: Links, clock: ManualClock) -> None:
    """And one that goes on keeps its date."""
    await links.release_held(URL)
    begun = (await links.find(URL)).release_at
    assert begun == clock.now()
    clock.advance(timedelta(seconds=5))
    await links.release_held(URL)
    assert (await links.find(URL)).release_at == begun
    await take_down(links, clock)
    await links.release_held(URL)
    assert (await links.find(URL)).release_at is None


async def test_those_to_whom_nothing_is_sent(links: Links, database: Database, clock: ManualClock) -> None:
    """Whatever closed the link; a pause is no closed link, and an unknown server has an open one."""
    await links.hold("https://held.example")
    await links.exhausted("https://down.example", "TIMEOUT", first_attempted_at=clock.now())
    await links.mismatched("https://mismatch.example")
    await links.rests("https://rests.example", None)
    urls = [f"https://{name}.example" for name in ("held", "down", "mismatch", "rests", "unknown")]
    closed = await database.transact(lambda connection: closed_among(connection, urls))
    assert closed == set(urls[:3])
