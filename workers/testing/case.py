"""A conformance case: what it shows, which guarantees it belongs to, and what it needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import signature
from typing import Final, TypeAlias

from workers.testing.harness import Harness

CaseFunction: TypeAlias = Callable[..., Awaitable[None]]
"""Takes what its parameters name: the `harness`, an open `storage`, and an `other` client of the same queue."""

GUARANTEES: Final[dict[int, str]] = {
    1: "no acknowledged enqueue is lost",
    2: "one enqueue per id and generation, and per deduplication key, whatever the race",
    3: "one live claim per job; an old token has no effect",
    4: "attempts are counted at the claim: a job that kills its worker ends as failed",
    5: "a crashed worker's jobs come back, in batches, under a backlog, by any number of reapers",
    6: "completion, result, expiry and continuation are one step; results expire one by one",
    7: "cancelled means never run; waiters are told at once",
    8: "no result and an empty result are told apart",
    9: "ids and worker ids are any text up to 512 bytes",
    10: "payloads are bytes from end to end",
    11: "a restarted server needs nobody's help",
    12: "nothing grows without bound",
    13: "an idle worker does not spin",
    14: "queues share nothing, and closing one never disturbs another",
    15: "jobs run by priority, due time and age; of one ordering key one at a time",
    16: "a delayed or retried job runs when it is due, and not before",
    17: "a claim brings what it asks for: of its names, up to its limit, with all a worker needs",
    18: "a lease that is renewed holds; one that ran out holds until the job is recovered",
    19: "no wake-up is lost: a worker asleep gets a job as soon as it can be claimed",
    20: "subscribers hear every change of a job in order, and can read it then",
    21: "what is read is true: states, times, errors, progress, counts, listings, workers",
    22: "an operator's verb changes the jobs it is for, and no others, and its answer is true",
    23: "a batch is answered element by element, in order; a lost one never stops its neighbours",
    24: "what is extreme works; what is impossible or unsupported is refused and changes nothing",
    25: "a job that follows others runs when the last has ended, or fails when one did not complete; it can read"
    " what they gave until it has ended",
    26: "a failed job can be read whole: payload, error, and each failed attempt with its worker and times",
    27: "as many jobs start in a time, and run at once, as a limit lets, and no more; fair keys take turns",
    28: "what recurs ticks once from each revision, and its jobs are enqueued in that step",
}
"""What the cases show, in the words of the table in `workers/README.md`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Something that a storage may declare away in its capabilities, or that a harness may lack."""

    what: str
    met: Callable[[Harness], bool]
    declared: bool = True
    """Whether the storage declares it in its capabilities; otherwise it is the harness that lacks it."""


def _capability(name: str) -> Need:
    """Make the need of what a storage declares by the field of this name."""
    return Need(what=name, met=lambda harness: getattr(harness.capabilities, name) is not False)


ANY_ID: Final = _capability("any_id")
ATOMIC_CONTINUATION: Final = _capability("atomic_continuation")
BOUNDED_RECOVERY: Final = _capability("bounded_recovery")
FLOWS: Final = _capability("flows")
CRONS: Final = _capability("crons")
CRON_ROWS: Final = _capability("cron_rows")
LIMIT_KEYS: Final = _capability("limit_keys")
NAME_FILTER: Final = _capability("name_filter")
ORDERING_KEYS: Final = _capability("ordering_keys")
OUTSIDE_ENDINGS: Final = _capability("outside_endings")
URGENT_PRIORITIES: Final = _capability("urgent_priorities")
OUTSIDE_CONTINUATIONS: Final = _capability("outside_continuations")
ORDERED_LISTING: Final = _capability("ordered_listing")
FAREWELLS: Final = _capability("farewells")
HELD_WAKE_UPS: Final = _capability("held_wake_ups")
RESULTS_TOLD: Final = _capability("results_told")
PRIORITY_ORDER: Final = _capability("priority_order")
LOST_ATTEMPTS_NOTED: Final = _capability("lost_attempts_noted")
FRESH_RETRIES: Final = _capability("fresh_retries")
RESULT_TTL_UPDATES: Final = _capability("result_ttl_updates")
DEDUPLICATION: Final = _capability("deduplication")
DEPENDENCIES: Final = _capability("dependencies")
DEPENDENCIES_ACROSS: Final = _capability("dependencies_across_queues")
DURABLE: Final = _capability("durable")
RETENTION_PER_JOB: Final = _capability("retention_per_job")
WORKS_WHEN_FULL: Final = _capability("works_when_full")
RESTARTS: Final = Need(what="a server that can be restarted", met=lambda harness: harness.restarts, declared=False)
CUTS: Final = Need(what="connections that can be cut", met=lambda harness: harness.cuts, declared=False)
FILLS: Final = Need(what="a server that can be full", met=lambda harness: harness.fills, declared=False)
FREEZES: Final = Need(what="a server that can be frozen", met=lambda harness: harness.freezes, declared=False)
SWALLOWS: Final = Need(what="connections that can go silent", met=lambda harness: harness.swallows, declared=False)
MEASURES: Final = Need(what="a measure of what is stored", met=lambda harness: harness.measures, declared=False)
MOVES_TIME: Final = Need(what="a clock the harness can move", met=lambda harness: harness.moves_time, declared=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One promise of the storage contract, as a function that fails if the promise is broken."""

    verb: str
    name: str
    promise: str
    guarantees: tuple[int, ...]
    needs: tuple[Need, ...]
    function: CaseFunction

    def __post_init__(self) -> None:
        """Refuse a case that no line of the certificate would report.

        Raises:
            ValueError: it belongs to no guarantee, or to one that does not exist, or takes what no case is given.
        """
        if not self.guarantees:
            raise ValueError(f"{self.id} stands for no guarantee; give the number of one, or add one to GUARANTEES")
        unknown = set(self.guarantees) - set(GUARANTEES)
        if unknown:
            raise ValueError(f"{self.id}: no such guarantees: {sorted(unknown)}")
        if strange := set(signature(self.function).parameters) - GIVEN:
            raise ValueError(f"{self.id}: a case is given {', '.join(sorted(GIVEN))}, not {', '.join(sorted(strange))}")

    @property
    def id(self) -> str:
        return f"{self.verb}.{self.name}"

    def missing(self, harness: Harness) -> tuple[Need, ...]:
        """Return the needs of this case that are not met; the case applies when there are none."""
        return tuple(need for need in self.needs if not need.met(harness))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of running a case: kept, or what it needs is missing. A broken promise raises instead."""

    case: Case
    missing: tuple[Need, ...] = ()

    @property
    def declared(self) -> str | None:
        """What is missing, in words; None when the promise was kept."""
        return ", ".join(need.what for need in self.missing) or None


REGISTRY: Final[list[Case]] = []
GIVEN: Final = frozenset({"harness", "storage", "other"})


def case(*, guarantees: tuple[int, ...], needs: tuple[Need, ...] = ()) -> Callable[[CaseFunction], CaseFunction]:
    """Register the function as a case of the suite: its docstring is the promise, its module's name the verb.

    Raises:
        ValueError: it belongs to no guarantee, or has no docstring.
    """

    def register(function: CaseFunction) -> CaseFunction:
        if not function.__doc__:
            raise ValueError(f"{function.__qualname__} needs a docstring: the promise it shows")
        REGISTRY.append(
            Case(
                verb=function.__module__.rpartition(".")[2],
                name=function.__qualname__,
                promise=function.__doc__.strip(),
                guarantees=guarantees,
                needs=needs,
                function=function,
            )
        )
        return function

    return register


async def run(case: Case, harness: Harness) -> Verdict:
    """Run the case, unless what it needs is declared away.

    Raises:
        AssertionError: the storage broke the promise.
    """
    missing = case.missing(harness)
    if not missing:
        await case.function(**await _given(case, harness))
    return Verdict(case=case, missing=missing)


async def _given(case: Case, harness: Harness) -> dict[str, object]:
    given: dict[str, object] = {"harness": harness}
    wanted = signature(case.function).parameters
    if "storage" in wanted or "other" in wanted:
        given["storage"] = storage = await harness.open()
        if "other" in wanted:
            given["other"] = await harness.open(storage.queue)
    return {name: given[name] for name in wanted}
