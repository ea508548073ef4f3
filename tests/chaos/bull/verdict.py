"""Judges a round by the runs that the ledgers tell, and by what is in the queue in the end.

- *Nothing is lost:* every job is completed, with its own result, and is in no other list or set.
- *One run at a time:* no run of a job begins while another one goes on. A run goes on until its handler ended, or its
  process was killed. Bull cannot keep that when its process is held up for so long that the lock lapses; such runs are
  told apart from the others, and counted.
- *Failures are counted:* no job has failed more often than its data asks for, but for failures that Bull forgets. Its
  worker reads a job, and takes the lock afterwards (1.1 only if the job is still active). If the job fails between the
  two, in whatever process, the worker's run knows nothing of that, and when it fails writes down one more than it knew.

A run that nobody asked for (neither the first, nor after a failure, nor after a kill) does no harm by itself, and is
counted: Bull's own failures are three steps, between which other workers may meddle.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

SETTLING_SECONDS = 2.0
"""A process that was killed so soon after a run's end may not have told the queue of it."""


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of a job; `ended` is None if its process was killed, at `killed`, before."""

    job_id: str
    kind: str
    began: float
    killed: float | None
    lapses: Sequence[tuple[float, float]] = ()
    """When its process was held up for too long to renew locks."""
    ended: float | None = None
    failed: bool = False
    forgotten: int = 0
    """How many failures that were written down it knew nothing of when it failed, and wrote over."""

    def __str__(self) -> str:
        how = "cut short" if self.ended is None else "failed" if self.failed else "completed"
        return f"{self.kind} {self.began:.3f} to {self.until:.3f} {how}"

    @property
    def until(self) -> float:
        """When it was over for certain."""
        return self.ended if self.ended is not None else self.killed or float("inf")

    @property
    def may_be_untold(self) -> bool:
        """Whether its process may have died before the queue knew of its end."""
        return self.killed is not None and self.until > self.killed - SETTLING_SECONDS

    @property
    def lapsed(self) -> bool:
        """Whether its lock may have lapsed while it went on."""
        return any(begin < self.until and end > self.began for begin, end in self.lapses)


@dataclass(slots=True)
class Verdict:
    """What is wrong, and what is only worth telling."""

    violations: list[str] = field(default_factory=list)
    runs: int = 0
    failed_runs: int = 0
    cut_short: int = 0
    forgotten: int = 0
    unasked: list[str] = field(default_factory=list)
    lapsed: list[str] = field(default_factory=list)

    def tell(self) -> None:
        """Print what is wrong, and what is only worth telling, a line each."""
        for kind, texts in (("UNASKED", self.unasked), ("LAPSED", self.lapsed), ("VIOLATION", self.violations)):
            for text in texts:
                say(f"{kind} {text}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def runs_of(kind: str, lines: Iterable[Mapping[str, Any]], killed: float | None) -> Iterator[Run]:
    """The runs in one process's ledger."""
    written = list(lines)
    lapses = [(line["at"] - line["seconds"], line["at"]) for line in written if line["what"] == "late"]
    live: dict[str, list[Run]] = defaultdict(list)
    for line in written:
        if line["what"] == "began":
            run = Run(job_id=line["id"], kind=kind, began=line["at"], killed=killed, lapses=lapses)
            live[run.job_id].append(run)
            yield run
        elif line["what"] in ("completed", "failed"):
            run = live[line["id"]].pop(0)
            run.ended, run.failed = line["at"], line["what"] == "failed"
            run.forgotten = max(0, line["written"] - line["made"]) if run.failed and "written" in line else 0


def judge(runs: Iterable[Run], failures: Mapping[str, int], found: Mapping[str, Mapping[str, str | None]]) -> Verdict:
    """`failures` says how often each job was to fail, `found` where each is in the end and what is wrong with it."""
    verdict = Verdict()
    by_job: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_job[run.job_id].append(run)
    for job_id, planned in failures.items():
        mine = sorted(by_job[job_id], key=lambda run: run.began)
        verdict.violations += _wrong_place(job_id, found[job_id])
        failed = sum(run.failed for run in mine)
        told = sum(run.failed and not run.may_be_untold for run in mine)
        # One that wrote over others and is not counted, as it may be untold, came in place of one of them.
        forgotten = sum(run.forgotten - run.may_be_untold for run in mine if run.forgotten)
        if told > planned + forgotten:
            verdict.violations.append(f"{job_id}: failed {told} times of {planned}")
        if not any(run.ended is not None and not run.failed for run in mine):
            verdict.violations.append(f"{job_id}: no run of it ended well")
        verdict.runs += len(mine)
        verdict.failed_runs += failed
        verdict.forgotten += forgotten
        verdict.cut_short += sum(run.ended is None for run in mine)
        asked = 1 + failed + sum(run.may_be_untold and not run.failed for run in mine)
        if len(mine) > asked:
            verdict.unasked.append(f"{job_id}: {len(mine) - asked} of {', '.join(map(str, mine))}")
        _tell_overlaps(job_id, mine, verdict)
    return verdict


def _wrong_place(job_id: str, found: Mapping[str, str | None]) -> Iterator[str]:
    if found["where"] != "completed":
        yield f"{job_id}: is in {found['where'] or 'no list: it is lost'}"
    elif found["result"] != found["wanted"]:
        yield f"{job_id}: its result is {found['result']!r}, not {found['wanted']!r}"


def _tell_overlaps(job_id: str, runs: list[Run], verdict: Verdict) -> None:
    for one, other in combinations(runs, 2):
        if other.began < one.until:
            text = f"{job_id}: began in {other.kind} at {other.began:.3f}, while running in {one.kind} since "
            text += f"{one.began:.3f} until {one.until:.3f}"
            (verdict.lapsed if one.lapsed and one.kind == "node" else verdict.violations).append(text)
