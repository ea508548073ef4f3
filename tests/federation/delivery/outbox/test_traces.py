"""Traces from whoever owes a delivery to each of its attempts."""

from __future__ import annotations

import sys

import pytest
from opentelemetry import trace
from opentelemetry.trace import format_span_id, format_trace_id
from sqlalchemy import select
from sqlmodel import col
from structlog.testing import capture_logs

from db import DeliveryJob
from federation.runtime.composition import Federation
from federation.runtime.workers import FederationWorkers
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.outbox.conftest import Place
from tests.federation.delivery.outbox.test_fanout import fan_out
from tests.federation.test_node_workers import owe, until_logged
from tests.misbehaving import respond
from tests.peer import Peer, acquaint
from tests.workers.test_tracing import Traces, linked
from tests.workers.test_tracing import place as place_of
from workers.metadata import TRACEPARENT, decode_meta


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    """What this process records, as one does that was begun by `opentelemetry-instrument`."""
    found = Traces()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", found.provider)
    return found


@pytest.mark.spread("queue_settings")
async def test_every_attempt_is_linked_to_whoever_owed_the_delivery(
    make_settings: MakeSettings, queue_settings: dict[str, object], peer: Peer, traces: Traces
) -> None:
    """Through the row and the queue, wherever that is; the last of them as the first."""
    settings = make_settings(federation_delivery_attempts=2, federation_delivery_backoff="1ms", **queue_settings)
    federation = Federation(settings)
    await acquaint(federation, peer)
    peer.server.default = respond(410)
    workers = FederationWorkers(federation)
    with capture_logs() as logs:
        workers.start()
        with traces.tracer.start_as_current_span("request") as request:
            await owe(federation, peer)
        await until_logged(logs, "worker_failed")
    await workers.stop()
    await federation.close()
    attempts = traces.named("process federation-delivery")
    context = request.get_span_context()
    assert [linked(each) for each in attempts] == [[(context.trace_id, context.span_id)]] * 2
    assert {each.parent for each in attempts} == {None}
    assert len({place_of(each) for each in attempts}) == 2


async def test_a_fan_out_notes_it_in_each_row(place: Place, traces: Traces) -> None:
    """And no row has one outside of a span."""
    with traces.tracer.start_as_current_span("request") as request:
        async with place.outbox.transaction() as session:
            await fan_out(place, session, 3)
    async with place.outbox.transaction() as session:
        await fan_out(place, session, 2)
    async with place.database.read() as session:
        noted = list((await session.execute(select(col(DeliveryJob.trace)).order_by(DeliveryJob.id))).scalars())
    context = request.get_span_context()
    header = f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{context.trace_flags:02x}"
    assert [decode_meta(each) if each else None for each in noted] == [{TRACEPARENT: header}] * 3 + [None] * 2


async def test_a_process_without_opentelemetry_notes_nothing(
    place: Place, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not even load it."""
    with traces.tracer.start_as_current_span("request"):
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
        async with place.outbox.transaction() as session:
            await fan_out(place, session, 1)
    async with place.database.read() as session:
        assert (await session.execute(select(col(DeliveryJob.trace)))).scalar_one() is None
    assert "opentelemetry.trace" not in sys.modules
