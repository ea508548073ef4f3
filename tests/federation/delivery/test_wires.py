"""What the engine makes of wires: of one that it does not know, and of those that have a bug."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, ProgrammingError, SQLAlchemyError
from structlog.testing import capture_logs

from db import DeliveryJob, DeliveryState, HoldReason, LinkState, new_id
from federation.base.settings.settings import Settings
from federation.delivery import wire as module
from federation.delivery.error_codes import FailureClass
from federation.delivery.errors import Held, PermanentFailure, RetryableFailure, Superseded
from federation.delivery.wire import Effect, Fragment, Sending, Wire
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from federation.monitoring.prometheus import ProcessMetrics
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import Site
from tests.federation.monitoring.test_prometheus import samples
from tests.misbehaving import respond
from tests.peer import Peer, acquaint
from tests.plain_wire import PLAIN_JOB, PLAIN_PATH, PlainWire


@asynccontextmanager
async def node(
    settings: Settings,
    ssl_context: ssl.SSLContext,
    make: Callable[[Federation], Wire],
    *,
    metrics: ProcessMetrics | None = None,
) -> AsyncIterator[Site]:
    """A node that sends jobs of one name by that wire, and its worker."""
    guard = AddressGuard(settings.dev_allowed_hostnames)
    client = FederationClient(guard, ConnectionPool(guard, ssl_context=ssl_context))
    federation = Federation(settings, client=client, metrics=metrics, wires=lambda node: [make(node)])
    try:
        async with Site(federation) as site:
            site.processor = federation.delivery_processor
            yield site
    finally:
        await federation.close()


async def owe(site: Site, peer: Peer, *, ordering_key: str | None = None) -> str:
    """Something is owed to the peer by the other wire; the delivery's id."""
    outbox, payload = site.federation.outbox, f'{{"id":"{new_id()}"}}'
    async with outbox.transaction() as session:
        return await outbox.enqueue_delivery(
            session, PLAIN_JOB, f"{peer.url}/inbox", peer.url, payload, ordering_key=ordering_key
        )


async def test_a_wire_refuses_what_it_could_never_deliver(settings: Settings, ssl_context: ssl.SSLContext) -> None:
    """By its own rule, before anything is written; jobs of other names go by that of the sealed wire."""
    async with node(settings, ssl_context, lambda node: PlainWire(node.fetch)) as site:
        outbox = site.federation.outbox
        async with outbox.transaction() as session:
            with pytest.raises(ValueError, match="id is missing"):
                await outbox.enqueue_delivery(session, PLAIN_JOB, "https://b.example/i", "https://b.example", "{}")
            with pytest.raises(ValueError, match="method is missing"):
                await outbox.enqueue_delivery(session, "any", "https://b.example/i", "https://b.example", '{"id":"1"}')


async def test_two_wires_that_claim_one_name_are_refused_at_start(settings: Settings) -> None:
    with pytest.raises(ValueError, match=f"two wires claim jobs named '{PLAIN_JOB}'"):
        Federation(settings, wires=lambda node: [PlainWire(node.fetch), PlainWire(node.fetch)])


class Idle(PlainWire):
    """A wire that claims no jobs."""

    job_names = ()


class Namesake(PlainWire):
    """A wire with the name of the one that has all other jobs."""

    name = "sealed"


@pytest.mark.parametrize(("wire", "problem"), [(Idle, "claims no jobs"), (Namesake, "two wires are called 'sealed'")])
def test_a_wire_that_could_not_be_told_from_another_is_refused_at_start(
    settings: Settings, wire: type[PlainWire], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        Federation(settings, wires=lambda node: [wire(node.fetch)])


class Broken(PlainWire):
    """A wire with a bug."""

    def __init__(self, node: Federation, error: BaseException) -> None:
        super().__init__(node.fetch)
        self._error = error

    async def send(self, sending: Sending) -> Effect | None:
        sending.seen.answered = True
        raise self._error


BUGS: Sequence[BaseException] = (
    LookupError("a bug"),
    ExceptionGroup("two", [ValueError("one"), ValueError("two")]),
    asyncio.CancelledError(),
    PermanentFailure("UNHEARD_OF", "a code that nobody gave a class"),
    RetryableFailure("UNHEARD_OF", "a code that nobody gave a class"),
    Held("delivery", HoldReason.SERVER),
    Superseded("delivery"),
    ProgrammingError("SELECT * FROM nothing", {}, ValueError("no such table")),
    IntegrityError("INSERT INTO something", {}, ValueError("not unique")),
)


@pytest.mark.parametrize("error", BUGS, ids=lambda error: type(error).__name__)
async def test_a_wire_with_a_bug_has_its_deliveries_held_as_ours(
    settings: Settings,
    ssl_context: ssl.SSLContext,
    peer: Peer,
    error: BaseException,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Never lost, and never taken for the server's fault; the log has the class of what it raised."""
    async with node(settings, ssl_context, lambda node: Broken(node, error)) as site:
        fate = await site.outcome(await owe(site, peer))
        link = await site.federation.links.find(peer.url)

    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.HELD, HoldReason.OURS)
    assert set(fate.codes) == {"INTERNAL"}
    assert (link.state, link.evidence, link.rejections) == (LinkState.UP, 0, 0)
    unusual = (asyncio.CancelledError, PermanentFailure, RetryableFailure, SQLAlchemyError)
    assert ("BrokenWire" if isinstance(error, unusual) else type(error).__name__) in "".join(capfd.readouterr())


async def test_a_server_that_fails_one_wire_is_sent_what_goes_by_another(
    settings: Settings, ssl_context: ssl.SSLContext, peer: Peer
) -> None:
    """Each has a link of its own, which holds, sends ahead and releases what goes by it. An operator holds both."""
    async with node(settings, ssl_context, lambda node: PlainWire(node.fetch)) as site:
        federation = site.federation
        plain = federation.links.of("plain")
        await acquaint(federation, peer)
        peer.server.routes[PLAIN_PATH] = respond(202)
        await plain.exhausted(peer.url, "TIMEOUT", first_attempted_at=federation.clock.now())

        held = await owe(site, peer)
        sent = await site.outcome(await site.owe_post(peer))

        assert (await plain.find(peer.url)).state is LinkState.DOWN
        assert (await federation.links.find(peer.url)).state is LinkState.UP
        assert sent.row is None
        async with federation.database.read() as session:
            row = await session.get_one(DeliveryJob, held)
        assert (row.state, row.held_reason, row.wire) == (DeliveryState.HELD, HoldReason.SERVER, "plain")
        assert not await federation.releaser.send_canary(peer.url)
        assert await federation.releaser.send_canary(peer.url, "plain")
        assert (await site.outcome(f"{held}.1", row=held)).row is None
        assert (await plain.find(peer.url)).state is LinkState.UP

        await federation.links.hold(peer.url)
        for links in (federation.links, plain, federation.links.of("unheard of")):
            assert (await links.find(peer.url)).operator_hold
        await federation.links.release(peer.url)
        assert not (await plain.find(peer.url)).operator_hold


async def test_an_operators_hold_lasts_for_a_wire_that_got_through_before_it_was_known(federation: Federation) -> None:
    """The first delivery by it that arrives makes its link; and so does whatever else is told of it."""
    await federation.links.hold("https://b.example")
    for wire in ("first", "second"):
        links = federation.links.of(wire)
        if wire == "first":
            await links._first_successes.ask("https://b.example")
        else:
            await links.unavailable("https://b.example", "TIMEOUT")
        assert (await links.find("https://b.example")).operator_hold


async def test_a_process_that_does_not_know_a_wire_leaves_its_deliveries_alone(
    settings: Settings, ssl_context: ssl.SSLContext, peer: Peer
) -> None:
    """An older version beside a newer one, or after it: to the sealed wire each of them would be no activity at all."""
    async with node(settings, ssl_context, lambda node: PlainWire(node.fetch)) as site:
        delivery = await owe(site, peer)
        site.processor = Site(site.federation).processor
        fate = await site.outcome(delivery)

    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason, fate.row.attempts) == (DeliveryState.HELD, HoldReason.OURS, 0)
    assert fate.log == []


class Hanging(PlainWire):
    """A wire that forgot to limit how long it waits."""

    async def send(self, sending: Sending) -> Effect | None:
        await asyncio.Event().wait()
        return None


async def test_a_wire_that_never_answers_keeps_its_slot_for_minutes_and_no_longer(
    settings: Settings, ssl_context: ssl.SSLContext, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_ANSWER", timedelta(seconds=0.05))
    async with node(settings, ssl_context, lambda node: Hanging(node.fetch)) as site:
        fate = await site.outcome(await owe(site, peer))

    assert fate.row is not None
    assert (fate.row.held_reason, set(fate.codes)) == (HoldReason.OURS, {"INTERNAL"})


class Nameless(PlainWire):
    """A wire that breaks off over the names of servers."""

    async def name_of(self, server_url: str) -> str:
        raise LookupError("a bug")

    async def send(self, sending: Sending) -> Effect | None:
        return None


async def test_a_wire_that_knows_no_names_delivers_by_those_it_is_given(
    settings: Settings, ssl_context: ssl.SSLContext, peer: Peer
) -> None:
    async with node(settings, ssl_context, lambda node: Nameless(node.fetch)) as site:
        fate = await site.outcome(await owe(site, peer))

    assert (fate.row, fate.codes) == (None, [None])


class CannotTell(PlainWire):
    """A wire that breaks off when it is asked whether a refusal may end."""

    async def send(self, sending: Sending) -> Effect | None:
        raise RetryableFailure("HTTP_403", "refused", failure_class=FailureClass.REJECTED)

    async def may_recover(self, sending: Sending, code: str) -> bool:
        raise LookupError("a bug")


@dataclass(frozen=True, slots=True)
class Unwritten:
    """An effect that cannot be written."""

    fragment: ClassVar[Fragment | None] = None

    name: str

    @classmethod
    def apply(cls, connection: Connection, effects: Sequence[Unwritten], /) -> Sequence[bool]:
        raise LookupError("a bug")

    def log_missed(self, *, delivery_id: str) -> None:
        """It is never missed."""


class Effectless(PlainWire):
    """A wire whose acknowledgments cannot be written down."""

    async def send(self, sending: Sending) -> Effect | None:
        return Unwritten(sending.delivery_id)


@pytest.mark.parametrize("wire", [CannotTell, Effectless])
async def test_a_bug_beside_the_sending_holds_the_delivery_too(
    settings: Settings, ssl_context: ssl.SSLContext, peer: Peer, wire: type[PlainWire]
) -> None:
    """What other attempts of the moment write is written: the ledger tries each apart. None is told as delivered."""
    async with node(settings, ssl_context, lambda node: wire(node.fetch)) as site:
        with capture_logs() as logs:
            fate = await site.outcome(await owe(site, peer))
        link = await site.federation.links.find(peer.url)

    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.HELD, HoldReason.OURS)
    assert (link.state, link.rejections) == (LinkState.UP, 0)
    told = [entry["code"] for entry in logs if entry["event"] == "delivery_attempt"]
    assert told == fate.codes


class Knocking(PlainWire):
    """A wire that has signatures, and names what it sends."""

    async def send(self, sending: Sending) -> Effect | None:
        seen = sending.seen
        seen.activity_id, seen.knocks = f"https://a.example/{sending.target_url[-1]}", 2
        if sending.is_repeat:
            seen.signature = "rfc9421"
            return None
        raise RetryableFailure("HTTP_503", "away")


async def test_what_a_wire_tells_of_an_attempt_is_on_record(
    make_settings: MakeSettings, database_url: str, ssl_context: ssl.SSLContext, peer: Peer
) -> None:
    """In the attempt log, of failures and arrivals; in the log, and among the metrics, where there is such a thing."""
    settings, metrics = make_settings(database_url=database_url), ProcessMetrics()
    async with node(settings, ssl_context, lambda node: Knocking(node.fetch), metrics=metrics) as site:
        await acquaint(site.federation, peer)
        with capture_logs() as logs:
            fate = await site.outcome(await owe(site, peer))
            await site.outcome(await site.owe_post(peer))

    assert [attempt.activity_id for attempt in fate.log] == ["https://a.example/x"] * 2
    lines = [entry for entry in logs if entry["event"] == "delivery_attempt"]
    told = [{name: line.get(name, "-") for name in ("activity", "signature", "knocks")} for line in lines]
    assert told == [
        {"activity": "https://a.example/x", "signature": "-", "knocks": 2},
        {"activity": "https://a.example/x", "signature": "rfc9421", "knocks": 2},
        {"activity": "-", "signature": "-", "knocks": "-"},
    ]
    assert samples(metrics, "federation_second_knocks_total") == {("none",): 1, ("rfc9421",): 1}


class GivesUp(PlainWire):
    """A wire that ends a job at once over a server that could not judge its delivery."""

    async def send(self, sending: Sending) -> Effect | None:
        raise PermanentFailure("HTTP_500", "away", failure_class=FailureClass.UNAVAILABLE)


async def test_a_server_is_not_away_because_a_wire_gives_up_at_its_first_failure(
    settings: Settings, ssl_context: ssl.SSLContext, peer: Peer
) -> None:
    """Its delivery waits for the next sweep. What takes the link down is evidence over time."""
    async with node(settings, ssl_context, lambda node: GivesUp(node.fetch)) as site:
        fate = await site.outcome(await owe(site, peer))
        link = await site.federation.links.of("plain").find(peer.url)
        swept = await site.federation.held_sweeper.sweep()

    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.HELD, HoldReason.SERVER)
    assert (link.state, link.evidence) == (LinkState.UP, 1)
    assert swept["servers_to_release"] == 1
