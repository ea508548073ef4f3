"""What one process asked of a storage and was answered: a file of lines that survives the process.

All times are seconds of the monotonic clock, which is one for all processes of a machine and knows no skew. A line is
appended by one `write`, which `kill -9` does not cut in half; should it be cut all the same, the line does not count.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from workers.jobs import Claim, Completed, Failed, Released, Renewal, Settlement, SettleOutcome
from workers.storage.abilities import Exchange, ExchangesJobs
from workers.storage.base import Storage
from workers.testing.stand_in import StandIn

now = time.monotonic


class Ledger:
    """One process's lines."""

    def __init__(self, path: str | Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, **values: object) -> None:
        """The line is in the file."""
        os.write(self._descriptor, json.dumps({"what": what, **values}).encode() + b"\n")


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines written so far; none if there is no such ledger yet."""
    if path.exists():
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        yield from map(json.loads, whole.splitlines())


class RecordedStorage(StandIn):
    """A storage whose claims, renewals and settlements are in a ledger before anybody acts on the answer."""

    def __init__(self, storage: Storage, ledger: Ledger) -> None:
        super().__init__(storage)
        self._ledger = ledger

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return self._settle_and_claim if name == "settle_and_claim" else value  # which not every storage can

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        asked = now()
        claims = await self._storage.claim(worker_id, leases=leases, limit=limit)
        self._claimed(claims, asked)
        return claims

    async def renew(self, claims: Sequence[Claim]) -> Renewal:
        asked = now()
        renewal = await self._storage.renew(claims)
        kept = [claim.token for claim in claims if claim.token not in renewal.lost]
        self._ledger.write("renewed", asked=asked, tokens=kept)
        return renewal

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
        self._settling(settlements)
        outcomes = await self._storage.settle(settlements)
        self._settled(settlements, outcomes)
        return outcomes

    async def _settle_and_claim(self, settlements: Sequence[Settlement], *arguments: Any, **options: Any) -> Exchange:
        asked = now()
        self._settling(settlements)
        assert isinstance(self._storage, ExchangesJobs)
        turn = await self._storage.settle_and_claim(settlements, *arguments, **options)
        self._claimed(turn.claims or (), asked)
        self._settled(settlements, turn.outcomes)
        return turn

    def _claimed(self, claims: Sequence[Claim], asked: float) -> None:
        if claims:
            found = [(one.job_id, one.token, one.attempt, one.lease.total_seconds()) for one in claims]
            self._ledger.write("claimed", asked=asked, answered=now(), claims=found)

    def _settling(self, settlements: Sequence[Settlement]) -> None:
        released = [one.claim.token for one in settlements if isinstance(one, Released)]
        tokens = [one.claim.token for one in settlements]
        self._ledger.write("settling", asked=now(), tokens=tokens, released=released)

    def _settled(self, settlements: Sequence[Settlement], outcomes: Sequence[SettleOutcome]) -> None:
        told = [
            (one.claim.token, isinstance(one, Completed | Failed), outcome.status, outcome.reason)
            for one, outcome in zip(settlements, outcomes, strict=True)
        ]
        self._ledger.write("settled", outcomes=told)
