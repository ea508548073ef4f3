"""One round of chaos: kills and faults from a seed, then peace, then a verdict.

The seed decides who is killed and what breaks, and what the jobs are; when that hits them is up to the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Final

from tests.chaos import demands, ledger
from tests.chaos.crew import CONSUMERS, QUEUE, Crew, crew_of
from tests.chaos.findings import Findings
from tests.chaos.places import PLACES, Place, prepare
from tests.chaos.ticks import Ticks
from tests.chaos.verdict import Books, Ending, judge, limited
from tests.patience import LONG_PATIENCE_SECONDS
from workers import StorageUnavailable
from workers.storage.abilities import KeepsCrons, KeepsLimits
from workers.storage.base import Storage
from workers.storage.urls import open_storage

GAP_SECONDS: Final = 0.06
"""Between two kills, on average: a child lives five times as long."""
PAUSE_EVERY: Final = 8
"""Kills from one pause of a consumer to the next."""
STOP_EVERY: Final = 12
"""Kills from one consumer that is asked to stop to the next."""
KILLS_PER_FAULT: Final = 40
"""From one fault of a kind to the next, on average; a shorter round has each once."""
LAST_BATCHES: Final = 10
PEACE_SECONDS: Final = LONG_PATIENCE_SECONDS
"""How long the last consumers may take for all that is left; a lost wake-up would cost them an hour."""


async def run_round(storage: str, *, kills: int, seed: str) -> Findings:
    """That many kills, every fault of the place among them, then peace; what came of it."""
    findings = Findings(storage, seed)
    with PLACES[storage](random.Random(f"{seed} place")) as place:
        await prepare(place.url)
        ticks = await _lay_down_rules(place)
        with crew_of(place, findings) as crew:
            await _wreak_havoc(place, crew, findings, kills)
            ticked = await _make_peace(place, crew, findings, ticks)
            await _pass_judgement(place, crew, findings, ticked)
        findings.violations += place.check()
        findings.notes += place.notes
    return findings


async def _lay_down_rules(place: Place) -> Ticks | None:
    """Limits are declared and something recurs, where the storage can."""
    async with _opened(place) as storage:
        if storage.capabilities.limit_keys:
            assert isinstance(storage, KeepsLimits)
            await storage.declare_limits(demands.LIMITS)
        return await Ticks.begin(storage) if isinstance(storage, KeepsCrons) else None


@contextlib.asynccontextmanager
async def _opened(place: Place) -> AsyncIterator[Storage]:
    storage = open_storage(place.url, queue=QUEUE)
    await storage.connect()
    try:
        yield storage
    finally:
        await storage.disconnect()


def _schedule(chance: random.Random, faults: Iterable[str], kills: int) -> dict[int, str]:
    """After which kills which faults happen: each of them, in any order, again and again."""
    names = sorted(faults) * max(1, kills // KILLS_PER_FAULT)
    chance.shuffle(names)
    return {kills * (number + 1) // (len(names) + 1): name for number, name in enumerate(names)}


async def _wreak_havoc(place: Place, crew: Crew, findings: Findings, kills: int) -> None:
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


async def _make_peace(place: Place, crew: Crew, findings: Findings, ticks: Ticks | None) -> dict[str, float]:
    """Consumers nobody kills end what is left, and what a last producer adds; and again after they went deaf.

    Returns the ticks that there had to be until then.
    """
    async with _opened(place) as storage:
        for _ in range(CONSUMERS):
            crew.spawn("consume")
        ticked = {} if ticks is None else await ticks.end(storage)
        await _work_off(storage, crew, findings)
        if place.silence is not None:
            place.silence(crew.pids)
            findings.did["listeners cut"] += 1
            await _work_off(storage, crew, findings)
        for child in list(crew.children):
            crew.end(child)
    return ticked


async def _work_off(storage: Storage, crew: Crew, findings: Findings) -> None:
    crew.end(crew.spawn("produce", batches=LAST_BATCHES))
    if not await _nothing_left(storage):
        counts = {state.value: number for state, number in (await storage.counts()).items()}
        findings.violations.append(f"after {PEACE_SECONDS:g} s of peace there was work left: {counts}")


async def _nothing_left(storage: Storage) -> bool:
    deadline = time.monotonic() + PEACE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(StorageUnavailable):
            counts = await storage.counts()
            if not any(number for state, number in counts.items() if not state.is_final):
                return True
        await asyncio.sleep(0.05)
    return False


async def _pass_judgement(place: Place, crew: Crew, findings: Findings, ticked: Mapping[str, float]) -> None:
    async with _opened(place) as storage:
        capabilities = storage.capabilities
        books = Books(
            findings.seed,
            ordered=capabilities.ordering_keys,
            followed=capabilities.dependencies,
            limited=capabilities.limit_keys,
        )
        for path in crew.ledgers:
            books.read(ledger.lines(path))
        books.expect_ticks(ticked)
        endings = await _endings(storage, sorted(books.intended))
        findings.violations += judge(books, endings, await storage.counts())
    if capabilities.crons and capabilities.cron_rows:
        findings.did["ticks"] = len(ticked)
    if capabilities.limit_keys:
        findings.did["claims under a limit"] = sum(map(len, limited(books).values()))
    findings.endings.update(ending.kind for ending in endings.values())
    findings.did["jobs acknowledged"] = len(books.acknowledged.difference(ticked))
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
