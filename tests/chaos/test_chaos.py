"""A short round of chaos on each storage that survives its processes; `scripts/chaos` runs long ones."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import ledger
from tests.chaos.children import Order
from tests.chaos.nursery import Nursery
from tests.chaos.places import HOUR, PLACES, Place, prepare
from tests.chaos.round import run_round
from tests.patience import eventually
from workers.jobs import Completed, NewJob
from workers.storage.base import Storage
from workers.storage.urls import open_storage

LEASES = {"*": timedelta(minutes=1)}

ALWAYS = {"kills of producers", "kills of consumers", "pauses past the lease", "stops of consumers"}
REDIS = {"server restarted", "server killed", "scripts flushed", "connections cut", "listeners cut"}
FAULTS = {
    "redis": REDIS,
    "bull": REDIS,
    "postgres": {"server restarted", "server crashed", "connections cut", "listeners cut"},
    "sqlite": {"disk full"},
    "file": {"disk full"},
}
"""What even a short round does."""

Line = dict[str, Any]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("storage", PLACES)
async def test_promises_outlive_processes_servers_and_disks(
    storage: str, full: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Producers and consumers are killed, paused and cut off at random, and nothing that was promised is broken."""
    findings = await run_round(storage, kills=80 if full else 12, seed="short")
    with capsys.disabled():
        for note in findings.notes:
            print(f"\n############ {storage}: {note}")
    assert findings.violations == []
    assert findings.endings["completed"] > 20
    assert findings.did.keys() >= {*ALWAYS, *FAULTS[storage]}
    assert 0 not in {findings.did.get(what, 1) for what in ("ticks", "claims under a limit")}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with PLACES[request.param](random.Random(1)) as place:
        yield place


@pytest.fixture
async def storage(place: Place) -> AsyncIterator[Storage]:
    await prepare(place.url)
    storage = open_storage(place.url)
    await storage.connect()
    yield storage
    await storage.disconnect()


@pytest.fixture
def nursery(place: Place, tmp_path: Path) -> Iterator[Nursery]:
    """Its children's clocks are an hour off where that must not matter."""
    nursery = Nursery(tmp_path / "log", clock_skew=place.skews[-1])
    yield nursery
    nursery.close()


def order(place: Place, storage: Storage, tmp_path: Path, role: str, **details: Any) -> Order:
    path = tmp_path / f"{role}.ledger"
    return Order(
        role=role, name=role, url=place.url, queue=storage.queue, seed="", ledger=str(path), lease=0.15, **details
    )


async def line(order: Order, what: str) -> Line:
    """The first such line of the child's ledger, as soon as it is there."""

    async def look() -> list[Line]:
        return [found for found in ledger.lines(Path(order.ledger)) if found["what"] == what]

    return (await eventually(look, bool))[0]


async def test_a_stopped_process_comes_too_late(
    place: Place, storage: Storage, nursery: Nursery, tmp_path: Path
) -> None:
    """A process stopped past its lease blocks nobody; when it goes on, its settlement changes nothing."""
    await storage.enqueue([NewJob(id="a", name="work", payload=b"{}")])
    held = order(place, storage, tmp_path, "hold")
    pid = nursery.spawn(held)
    await line(held, "claimed")
    nursery.signal(pid, signal.SIGSTOP)
    await eventually(lambda: storage.recover(10), lambda recovery: recovery.requeued)
    [claim] = await storage.claim("another", leases=LEASES, limit=1)
    assert claim.attempt == 2
    await storage.settle([Completed(claim=claim, result=b'"in time"')])
    nursery.signal(pid, signal.SIGCONT)
    nursery.signal(pid, signal.SIGTERM)
    assert nursery.wait(pid) == 0
    assert (await line(held, "settled"))["outcomes"] == [[claim_token(held), True, "lost", "already_completed"]]
    outcome = await storage.result("a")
    assert outcome is not None
    assert outcome.result == b'"in time"'


def claim_token(order: Order) -> str:
    """The token of the one claim in the ledger."""
    [[[_, token, _, _]]] = [found["claims"] for found in ledger.lines(Path(order.ledger)) if found["what"] == "claimed"]
    assert isinstance(token, str)
    return token


async def test_the_clocks_of_children_are_wrong(tmp_path: Path) -> None:
    """A nursery with a skewed clock has children whose wall clocks are off by as much."""
    nursery = Nursery(tmp_path / "log", clock_skew=-HOUR)
    born = Order(
        role="produce", name="p", url="memory://", queue="q", seed="", ledger=str(tmp_path / "l"), lease=1, batches=0
    )
    assert nursery.wait(nursery.spawn(born)) == 0
    nursery.close()
    began = await line(born, "began")
    assert began["wall_clock"] - began["at"] == pytest.approx(time.time() - time.monotonic() - HOUR, abs=60)
