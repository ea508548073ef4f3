"""What open pages are told: read once for all of them, bounded for each, and never a reason for the others to wait."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
from starlette.types import Message

from tests.browser.serving import served
from tests.patience import PATIENCE_SECONDS, until
from tests.workers.dashboard.conftest import MakeSite
from workers.dashboard import feed as feeds
from workers.dashboard.access import Access
from workers.dashboard.feed import EventStream, Feed, FeedFull, Fragments, Parameters
from workers.dashboard.site import Site, SitePart
from workers.queue import Queue

SOON = timedelta(milliseconds=5)


class Source:
    """What a topic reads: how often, and with what it answers."""

    def __init__(self) -> None:
        self.readings: list[Parameters] = []
        self.answers: Callable[[], Fragments] = lambda: {"part": str(len(self.readings))}

    async def __call__(self, parameters: Parameters) -> Fragments:
        self.readings.append(parameters)
        return self.answers()


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
async def feed(source: Source) -> AsyncIterator[Feed]:
    opened = Feed(
        {"topic": source},
        tell=lambda error: f"{error}." if isinstance(error, OSError) else None,
        interval=SOON,
        most_listeners=3,
    )
    yield opened
    await opened.close()


async def test_one_reading_is_for_all_who_listen_to_the_same(feed: Feed, source: Source) -> None:
    """And another for whoever listens with other parameters."""
    async with (
        feed.listen("topic") as first,
        feed.listen("topic") as second,
        feed.listen("topic", (("a", "b"),)) as third,
    ):
        source.answers = lambda: {"part": "x"}
        assert [await each.take() for each in (first, second, third)] == [{"part": "x", "trouble": ""}] * 3
        assert source.readings[:2] == [(), (("a", "b"),)]


async def test_nothing_is_read_while_nobody_listens(feed: Feed, source: Source) -> None:
    """The reader ends with the last page, and begins again with the next."""
    async with feed.listen("topic") as listener:
        await listener.take()
    await until(lambda: feed._reading is not None and feed._reading.done())
    number = len(source.readings)
    async with feed.listen("topic") as listener:
        await listener.take()
    assert len(source.readings) > number


async def test_only_what_changed_is_told(feed: Feed, source: Source) -> None:
    """A page at rest costs nothing."""
    source.answers = lambda: {"same": "s", "other": "1" if len(source.readings) < 5 else "2"}
    async with feed.listen("topic") as listener:
        assert await listener.take() == {"same": "s", "other": "1", "trouble": ""}
        assert await listener.take() == {"other": "2"}


async def test_a_slow_page_is_told_the_newest_and_holds_no_more(feed: Feed, source: Source) -> None:
    """However long it takes nothing: steps in between are left out."""
    async with feed.listen("topic") as listener:
        await until(lambda: len(source.readings) > 20)
        assert len(listener.pending) == 2
        taken = await listener.take()
        assert taken is not None
        assert int(taken["part"]) > 15


async def test_what_cannot_be_read_is_told_and_goes_on_by_itself(feed: Feed, source: Source) -> None:
    """The database is away, and back."""

    def away() -> Fragments:
        raise OSError("the database is away")

    well = source.answers
    source.answers = away
    async with feed.listen("topic") as listener:
        assert await listener.take() == {"trouble": "the database is away."}
        source.answers = well
        told = await listener.take()
        assert told is not None
        assert told["trouble"] == ""


async def test_a_fault_of_one_topic_does_not_end_the_others(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and its pages say that they may be old."""

    async def broken(_parameters: Parameters) -> Fragments:
        raise KeyError("x")

    feed = Feed({"topic": source, "broken": broken}, tell=lambda _: None, interval=SOON)
    async with feed.listen("broken") as bad, feed.listen("topic") as good:
        told = await bad.take()
        assert told is not None
        assert "see the log" in told["trouble"]
        await good.take()
        assert await good.take() is not None
    assert "dashboard_topic_failed" in caplog.text
    await feed.close()


async def test_so_many_pages_may_be_open(feed: Feed) -> None:
    """One more is refused, until one of the others leaves."""
    async with feed.listen("topic"), feed.listen("topic"):
        async with feed.listen("topic"):
            with pytest.raises(FeedFull):
                async with feed.listen("topic"):
                    pass
        async with feed.listen("topic"):
            pass


async def test_a_long_reading_is_followed_by_a_longer_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that reading stays a small part of the time, whatever the database's size."""
    monkeypatch.setattr(feeds, "SHARE", 1_000_000)
    readings = []

    async def slow(_parameters: Parameters) -> Fragments:
        readings.append(await asyncio.to_thread(bool))
        return {"part": str(len(readings))}

    feed = Feed({"slow": slow}, tell=str, interval=SOON)
    async with feed.listen("slow"):
        await until(lambda: len(readings) == 2)  # the first is not counted: it does what is done once
        [topic] = feed._topics.values()
        await until(lambda: topic.due - asyncio.get_running_loop().time() > 1)
        assert len(readings) == 2
    await feed.close()


class Wire:
    """The other side of an answer: how much it takes, and when it leaves."""

    def __init__(self, takes: int = 1_000_000) -> None:
        self.taken: list[Message] = []
        self.left = asyncio.Event()
        self._takes = takes

    async def send(self, message: Message) -> None:
        if len(self.taken) >= self._takes:
            await asyncio.Event().wait()
        self.taken.append(message)

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def test_events_carry_the_fragments_in_one_line(feed: Feed, source: Source) -> None:
    """Whatever is in them: a line end of a fragment must not end the event."""
    source.answers = lambda: {"part": "a\n\ndata: {}\r\n\u2028b"}
    wire = Wire()
    async with asyncio.TaskGroup() as group:
        group.create_task(EventStream(feed.listen("topic"))({}, wire.receive, wire.send))
        await until(lambda: len(wire.taken) >= 3)
        wire.left.set()
    assert wire.taken[0]["status"] == 200
    event = wire.taken[2]["body"].decode()
    assert event.startswith("data: ")
    assert event.count("\n") == 2
    assert json.loads(event.removeprefix("data: ")) == {"part": "a\n\ndata: {}\r\n\u2028b", "trouble": ""}
    assert not feed._topics


async def test_a_browser_that_never_reads_is_dropped(feed: Feed) -> None:
    """Its place is free again, and the answer is over."""
    wire = Wire(takes=1)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await EventStream(feed.listen("topic"), patience=timedelta(milliseconds=20))({}, wire.receive, wire.send)
    assert not feed._topics


async def test_a_connection_that_is_never_read_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a real socket: what it does not take waits for nobody, and its page is dropped."""
    monkeypatch.setitem(EventStream.__init__.__kwdefaults__, "patience", timedelta(milliseconds=50))
    numbers = itertools.count()

    async def read(_parameters: Parameters) -> Fragments:
        return {"part": f"{next(numbers)}" + "x" * 1_000_000}

    part = SitePart(live={"much": lambda _templates: read})
    site = Site([part], title="much", access=Access(), teller=str, interval=SOON)
    async with served(site) as url:
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        with socket.socket() as browser:
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            browser.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(browser, (address.hostname, address.port))
            host = f"Host: {address.hostname}:{address.port}"
            await loop.sock_sendall(browser, f"GET /live?topic=much HTTP/1.1\r\n{host}\r\n\r\n".encode())
            assert (await loop.sock_recv(browser, 15)).startswith(b"HTTP/1.1 200")
            await until(lambda: not site.feed._topics)
        read_by_then = next(numbers)
    assert read_by_then > 1


async def test_streams_end_when_the_dashboard_stops(feed: Feed) -> None:
    """Otherwise it would wait for its open pages."""
    wire = Wire()
    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group:
        group.create_task(EventStream(feed.listen("topic"))({}, wire.receive, wire.send))
        await until(lambda: len(wire.taken) >= 3)
        feed.end_streams()
    assert wire.taken[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_one_stream_too_many_is_told_to_come_back(feed: Feed) -> None:
    """With a status, not with silence."""
    async with feed.listen("topic"), feed.listen("topic"), feed.listen("topic"):
        wire = Wire()
        await EventStream(feed.listen("topic"))({}, wire.receive, wire.send)
        assert wire.taken[0]["status"] == 503


async def test_the_topics_of_queues_show_what_the_pages_show(make_site: MakeSite, queue: Queue) -> None:
    """As it changes."""
    site = make_site(Access(), interval=SOON)
    async with (
        site.feed.listen("queues") as all_,
        site.feed.listen("queue", (("name", "mail"), ("state", "queued"))) as one,
    ):
        for listener, element in ((all_, "queues-live"), (one, "queue-live")):
            told = await listener.take()
            assert told is not None
            assert element in told
        await queue.enqueue(1)
        told = await all_.take()
        assert told is not None
        assert "queued</dt><dd>1</dd>" in told["queues-live"]
