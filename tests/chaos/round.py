"""One round of chaos: kills and faults from a seed, then peace, then a verdict.

The seed decides who is killed and what breaks, and what the jobs are; when that hits them is up to the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.chaos import ledger
from tests.chaos.children import NEVER, Order
from tests.chaos.nursery import Nursery
from tests.chaos.places import PLACES, Place, prepare
from tests.chaos.verdict import Books, Ending, judge
from workers import JobState, StorageUnavailable
from workers.storage.base import Storage
from workers.storage.urls import open_storage

LEASE_SECONDS: Final = 0.5
PRODUCERS: Final = 2
CONSUMERS: Final = 3
GAP_SECONDS: Final = 0.06
"""Between two kills, on average: a child lives five times as long."""
PAUSE_EVERY: Final = 8
"""Kills from one pause of a consumer to the next."""
STOP_EVERY: Final = 12
"""Kills from one consumer that is asked to stop to the next."""
KILLS_PER_FAULT: Final = 40
"""From one fault of a kind to the next, on average; a shorter round has each once."""
LAST_BATCHES: Final = 10
PEACE_SECONDS: Final = 120.0
"""How long the last consumers may take for all that is left; a lost wake-up would cost them an hour."""
QUEUE: Final = "chaos:../é"


@dataclass
class Findings:
    """What a round did, and what it found."""

    storage: str
    seed: str
    did: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Child:
    pid: int
    order: Order
    nursery: Nursery
    paused_until: float | None = None


class _Crew:
    """The children of a round."""

    def __init__(self, place: Place, findings: Findings, nurseries: list[Nursery], directory: Path) -> None:
        self._place = place
        self._findings = findings
        self._nurseries = nurseries
        self._directory = directory
        self._chance = random.Random(f"{findings.seed} crew")
        self._born = 0
        self._unacknowledged: list[str] = []
        self.children: list[_Child] = []

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self.children]

    @property
    def ledgers(self) -> list[Path]:
        return sorted(self._directory.glob("*.ledger"))

    def spawn(self, role: str, *, batches: int = NEVER, lease: float = LEASE_SECONDS) -> _Child:
        """A child at work, its clock as wrong as any may be."""
        again: list[str] = []
        if role == "produce":
            again, self._unacknowledged = self._unacknowledged, []
        self._born += 1
        name = f"{role}-{self._born}"
        order = Order(
            role=role,
            name=name,
            url=self._place.url,
            queue=QUEUE,
            seed=self._findings.seed,
            ledger=str(self._directory / f"{self._born:05}.ledger"),
            lease=lease,
            batches=batches,
            again=tuple(again),
        )
        nursery = self._nurseries[self._born % len(self._nurseries)]
        child = _Child(nursery.spawn(order), order, nursery)
        self.children.append(child)
        if nursery.clock_skew:
            self._findings.did["children with a clock an hour off"] += 1
        return child

    def complete(self) -> None:
        """There are as many producers and consumers at work as there should be."""
        for role, number in (("produce", PRODUCERS), ("consume", CONSUMERS)):
            for _ in range(number - sum(child.order.role == role for child in self._working())):
                self.spawn(role)

    def kill(self, child: _Child) -> None:
        """`kill -9`, and a note of what the child was about to be told."""
        self.children.remove(child)
        status = child.nursery.kill(child.pid)
        self._findings.did[f"kills of {child.order.role}rs"] += 1
        if status != -signal.SIGKILL:
            self._findings.violations.append(f"{child.order.name} had ended by itself, with status {status}")
        if child.order.role == "produce":
            self._unacknowledged += _unacknowledged(Path(child.order.ledger))

    def kill_any(self) -> None:
        """One that is not stopped: those shall go on, and find that their jobs were taken."""
        self.kill(self._chance.choice(self._working()))

    def stop_any(self) -> None:
        """Some consumer is asked to stop, and has given back what it was at."""
        stopping = self._any_consumer()
        for child in self.children:
            self._wake(child)  # it may hold a lock that the other needs
        self.end(stopping)
        self._findings.did["stops of consumers"] += 1

    def pause_any(self) -> None:
        """Some consumer is stopped, until after its leases."""
        child = self._any_consumer()
        child.paused_until = time.monotonic() + LEASE_SECONDS * self._chance.uniform(1.5, 2.5)
        child.nursery.signal(child.pid, signal.SIGSTOP)
        self._findings.did["pauses past the lease"] += 1

    def _any_consumer(self) -> _Child:
        return self._chance.choice([child for child in self._working() if child.order.role == "consume"])

    def _working(self) -> list[_Child]:
        """All but those that are stopped."""
        return [child for child in self.children if child.paused_until is None]

    def wake(self) -> None:
        """Those that were stopped for long enough go on."""
        for child in self.children:
            if child.paused_until is not None and child.paused_until <= time.monotonic():
                self._wake(child)

    def _wake(self, child: _Child) -> None:
        child.paused_until = None
        child.nursery.signal(child.pid, signal.SIGCONT)

    def end(self, child: _Child) -> None:
        """It was asked to end, if it does not do so by itself, and has."""
        self.children.remove(child)
        if child.order.batches == NEVER:
            child.nursery.signal(child.pid, signal.SIGTERM)
        if status := child.nursery.wait(child.pid):
            self._findings.violations.append(f"{child.order.name} ended with status {status}")


def _unacknowledged(path: Path) -> list[str]:
    """What the ledger's writer sent and heard nothing of."""
    waiting: list[str] = []
    for line in ledger.lines(path):
        if line["what"] == "intended":
            waiting = line["ids"]
        elif line["what"] == "acknowledged":
            waiting = []
    return waiting


@contextlib.contextmanager
def _crew(place: Place, findings: Findings) -> Iterator[_Crew]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fd-chaos-")))
        log = directory / "log"
        nurseries = []
        for clock_skew in place.skews:
            nurseries.append(Nursery(log, clock_skew=clock_skew))
            stack.callback(nurseries[-1].close)
        yield _Crew(place, findings, nurseries, directory)
        if text := log.read_text(errors="replace").strip():
            findings.violations.append(f"children wrote to stderr:\n{text[-3000:]}")


async def run_round(storage: str, *, kills: int, seed: str) -> Findings:
    """That many kills, every fault of the place among them, then peace; what came of it."""
    findings = Findings(storage, seed)
    with PLACES[storage]() as place:
        await prepare(place.url)
        with _crew(place, findings) as crew:
            await _wreak_havoc(place, crew, findings, kills)
            await _make_peace(place, crew, findings)
            await _pass_judgement(place, crew, findings)
        findings.violations += place.check()
        findings.notes += place.notes
    return findings


def _schedule(chance: random.Random, faults: Iterable[str], kills: int) -> dict[int, str]:
    """After which kills which faults happen: each of them, in any order, again and again."""
    names = sorted(faults) * max(1, kills // KILLS_PER_FAULT)
    chance.shuffle(names)
    return {kills * (number + 1) // (len(names) + 1): name for number, name in enumerate(names)}


async def _wreak_havoc(place: Place, crew: _Crew, findings: Findings, kills: int) -> None:
    chance = random.Random(f"{findings.seed} havoc")
    faults = _schedule(chance, place.faults, kills)
    for number in range(kills):
        crew.complete()
        await asyncio.sleep(min(chance.expovariate(1 / GAP_SECONDS), 5 * GAP_SECONDS))
        if name := faults.get(number):
            place.faults[name](crew.pids)
            findings.did[name] += 1
        if number % PAUSE_EVERY == PAUSE_EVERY // 2:
            crew.pause_any()
        if number % STOP_EVERY == STOP_EVERY // 2:
            crew.stop_any()
        crew.wake()
        crew.kill_any()
    for child in list(crew.children):
        crew.kill(child)


async def _make_peace(place: Place, crew: _Crew, findings: Findings) -> None:
    """Consumers nobody kills end what is left, and what a last producer adds; and again after they went deaf."""
    storage = open_storage(place.url, queue=QUEUE)
    await storage.connect()
    try:
        for _ in range(CONSUMERS):
            crew.spawn("consume")
        for silence in (None, place.silence) if place.silence else (None,):
            if silence is not None:
                silence(crew.pids)
                findings.did["listeners cut"] += 1
            crew.end(crew.spawn("produce", batches=LAST_BATCHES))
            if not await _nothing_left(storage):
                counts = {state.value: number for state, number in (await storage.counts()).items()}
                findings.violations.append(f"after {PEACE_SECONDS:g} s of peace there was work left: {counts}")
                return
        for child in list(crew.children):
            crew.end(child)
    finally:
        await storage.disconnect()


async def _nothing_left(storage: Storage) -> bool:
    deadline = time.monotonic() + PEACE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(StorageUnavailable):
            counts = await storage.counts()
            if sum(counts.values()) == counts[JobState.COMPLETED] + counts[JobState.FAILED]:
                return True
        await asyncio.sleep(0.05)
    return False


async def _pass_judgement(place: Place, crew: _Crew, findings: Findings) -> None:
    books = Books(findings.seed)
    for path in crew.ledgers:
        books.read(ledger.lines(path))
    storage = open_storage(place.url, queue=QUEUE)
    await storage.connect()
    try:
        endings = await _endings(storage, sorted(books.intended))
        findings.violations += judge(books, endings, await storage.counts())
    finally:
        await storage.disconnect()
    findings.endings.update(ending.kind for ending in endings.values())
    findings.did["jobs acknowledged"] = len(books.acknowledged)
    findings.did["jobs sent again"] = len(books.repeated)
    findings.did["claims"] = len(books.claims)
    findings.did["settlements refused"] = sum("lost" in claim.told for claim in books.claims.values())
    findings.did["releases"] = sum(claim.released for claim in books.claims.values())
    findings.did["times unavailable"] = books.troubles


async def _endings(storage: Storage, ids: list[str]) -> dict[str, Ending]:
    endings = {}
    for start in range(0, len(ids), 200):
        some = ids[start : start + 200]
        statuses = await storage.status(some)
        outcomes = await asyncio.gather(*map(storage.result, some))
        for job_id, status, outcome in zip(some, statuses, outcomes, strict=True):
            endings[job_id] = Ending(status=status, outcome=outcome)
    return endings
