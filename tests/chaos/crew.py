"""The children of a round, and all that is done to them."""

from __future__ import annotations

import contextlib
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.chaos import ledger
from tests.chaos.children import NEVER, Order
from tests.chaos.findings import Findings
from tests.chaos.nursery import Nursery
from tests.chaos.places import Place

LEASE_SECONDS: Final = 0.5
PRODUCERS: Final = 2
CONSUMERS: Final = 3
QUEUE: Final = "chaos:../é"


@dataclass(slots=True)
class Child:
    """One process; `paused_until` when it shall go on, if it is stopped."""

    pid: int
    order: Order
    nursery: Nursery
    paused_until: float | None = None


class Crew:
    """The children of a round."""

    def __init__(self, place: Place, findings: Findings, nurseries: list[Nursery], directory: Path) -> None:
        self._place = place
        self._findings = findings
        self._nurseries = nurseries
        self._directory = directory
        self._chance = random.Random(f"{findings.seed} crew")
        self._born = 0
        self._unacknowledged: list[str] = []
        self.children: list[Child] = []

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self.children]

    @property
    def ledgers(self) -> list[Path]:
        return sorted(self._directory.glob("*.ledger"))

    def spawn(self, role: str, *, batches: int = NEVER) -> Child:
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
            lease=LEASE_SECONDS,
            batches=batches,
            again=tuple(again),
        )
        nursery = self._nurseries[self._born % len(self._nurseries)]
        child = Child(nursery.spawn(order), order, nursery)
        self.children.append(child)
        if nursery.clock_skew:
            self._findings.did["children with a clock an hour off"] += 1
        return child

    def complete(self) -> None:
        """There are as many producers and consumers at work as there should be."""
        for role, number in (("produce", PRODUCERS), ("consume", CONSUMERS)):
            for _ in range(number - sum(child.order.role == role for child in self._working())):
                self.spawn(role)

    def kill(self, child: Child) -> None:
        """`kill -9`, and a note of what the child was about to be told."""
        self.children.remove(child)
        status = child.nursery.kill(child.pid)
        self._findings.did[f"kills of {child.order.role}rs"] += 1
        if status != -signal.SIGKILL:
            self._findings.violations.append(f"{child.order.name} had ended by itself, with status {status}")
        if child.order.role == "produce":
            self._unacknowledged += _unacknowledged(child.order)

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

    def _any_consumer(self) -> Child:
        return self._chance.choice([child for child in self._working() if child.order.role == "consume"])

    def _working(self) -> list[Child]:
        """All but those that are stopped."""
        return [child for child in self.children if child.paused_until is None]

    def wake(self) -> None:
        """Those that were stopped for long enough go on."""
        for child in self.children:
            if child.paused_until is not None and child.paused_until <= time.monotonic():
                self._wake(child)

    def _wake(self, child: Child) -> None:
        child.paused_until = None
        child.nursery.signal(child.pid, signal.SIGCONT)

    def end(self, child: Child) -> None:
        """It was asked to end, if it does not do so by itself, and has."""
        self.children.remove(child)
        if child.order.batches == NEVER:
            child.nursery.signal(child.pid, signal.SIGTERM)
        if status := child.nursery.wait(child.pid):
            self._findings.violations.append(f"{child.order.name} ended with status {status}")


def _unacknowledged(order: Order) -> list[str]:
    """What the producer sent, or was to send again, and heard nothing of."""
    waiting = list(order.again)
    for line in ledger.lines(Path(order.ledger)):
        if line["what"] == "intended":
            waiting = line["ids"]
        elif line["what"] == "acknowledged":
            waiting = []
    return waiting


TORN = "are void: torn: a write that did not come to its end, and nobody was told of"
"""What a writer that was killed, or had no room, leaves in a journal; whoever reads it next says so."""


@contextlib.contextmanager
def crew_of(place: Place, findings: Findings) -> Iterator[Crew]:
    """A crew without children yet; in the end all of them are gone."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fd-chaos-")))
        log = directory / "log"
        nurseries = []
        for clock_skew in place.skews:
            nurseries.append(Nursery(log, clock_skew=clock_skew))
            stack.callback(nurseries[-1].close)
        yield Crew(place, findings, nurseries, directory)
        told = [line for line in log.read_text(errors="replace").splitlines() if not line.endswith(TORN)]
        if text := "\n".join(told).strip():
            findings.violations.append(f"children wrote to stderr:\n{text[-3000:]}")
