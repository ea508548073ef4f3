"""Runs of the whole suite on one storage, and the guarantees that they show, as text and as JSON."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeAlias

from workers.testing.case import CUTS, GUARANTEES, RESTARTS, Case, run
from workers.testing.cases import all_cases
from workers.testing.harness import Harness, HarnessFailed

OpenHarness: TypeAlias = Callable[[], Harness]

LONGEST_CASE: Final = timedelta(seconds=60)
"""How long a case may take before it counts as broken; cases that pass take a second or two."""

_HERE: Final = Path(__file__).parent


class Finding(StrEnum):
    """What the suite found out about a case, or about all cases of a guarantee; the worst comes last."""

    KEPT = "kept"
    PARTLY_SHOWN = "partly shown"
    """Of a guarantee: some of its cases are kept, the others could not run, or were not chosen."""
    NOT_SHOWN = "not shown"
    """The harness cannot do what the case needs, for example restart the server."""
    LIMIT = "limit"
    """The storage declares in its capabilities that it does not keep this."""
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """The finding of one case; `detail` names the limits, what the harness lacks, or the assertion that failed."""

    case: Case
    finding: Finding
    detail: str = ""
    avoidable: bool = False
    """Whether it is not shown only because nobody said how to restart the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The findings of every case on one storage.

    The storage is certified if the whole suite was tried, nothing is broken, and nothing about restarts is left unshown
    that could have been shown. Limits are no hindrance, nor is what no harness of this kind can show: `not_shown`.
    """

    results: Sequence[CaseResult]

    @property
    def certified(self) -> bool:
        """Whether this is a certificate; see the class."""
        return not (self.broken or self.avoidable or self.not_tried)

    @property
    def avoidable(self) -> int:
        """How many cases did not run only because nobody said how to restart the server."""
        return sum(result.avoidable for result in self.results)

    @property
    def not_tried(self) -> int:
        """How many cases of the suite were not chosen."""
        return len(self._not_tried())

    def _not_tried(self) -> list[Case]:
        tried = {result.case.id for result in self.results}
        return [case for case in all_cases() if case.id not in tried]

    @property
    def broken(self) -> tuple[CaseResult, ...]:
        """The cases that failed."""
        return self._with(Finding.BROKEN)

    @property
    def not_shown(self) -> tuple[CaseResult, ...]:
        """The cases that could not run, because the harness lacks what they need."""
        return self._with(Finding.NOT_SHOWN)

    def _with(self, finding: Finding) -> tuple[CaseResult, ...]:
        return tuple(result for result in self.results if result.finding is finding)

    def of(self, guarantee: int) -> tuple[CaseResult, ...]:
        """Return the results of the cases behind a guarantee."""
        return tuple(result for result in self.results if guarantee in result.case.guarantees)

    def finding(self, guarantee: int) -> Finding:
        """Return the worst finding of a guarantee's cases; it is kept only if every one of them ran."""
        found = {result.finding for result in self.of(guarantee)}
        for worst in (Finding.BROKEN, Finding.LIMIT):
            if worst in found:
                return worst
        if Finding.KEPT not in found:
            return Finding.NOT_SHOWN
        every_one = len(found) == 1 and not any(guarantee in case.guarantees for case in self._not_tried())
        return Finding.KEPT if every_one else Finding.PARTLY_SHOWN


async def certify(open_harness: OpenHarness, cases: Iterable[Case] | None = None, *, at_once: int = 1) -> Certificate:
    """Run every case (default: the whole suite) on a harness of its own, `at_once` of them side by side.

    A case that fails by an assertion, by any other exception, or by not ending within a minute is broken.

    Raises:
        HarnessFailed: the harness could not do what it declares; nothing is certified.
        RuntimeError: Python runs without assertions (`-O`): nothing could fail.
    """
    if not __debug__:
        raise RuntimeError("the cases are made of assertions, which `python -O` leaves out; run without it")
    slots = asyncio.Semaphore(at_once)

    async def tried(case: Case) -> CaseResult:
        async with slots:
            return await _result(case, open_harness)

    chosen = all_cases() if cases is None else tuple(cases)
    return Certificate(results=await asyncio.gather(*(tried(case) for case in chosen)))


async def _result(case: Case, open_harness: OpenHarness) -> CaseResult:
    try:
        async with asyncio.timeout(LONGEST_CASE.total_seconds()) as limit, open_harness() as harness:
            verdict = await run(case, harness)
    except HarnessFailed:
        raise
    except Exception as error:
        what = f"it did not end within {LONGEST_CASE}" if limit.expired() else _told(error)
        return CaseResult(case=case, finding=Finding.BROKEN, detail=what)
    if verdict.declared is None:
        return CaseResult(case=case, finding=Finding.KEPT)
    return CaseResult(
        case=case,
        finding=Finding.LIMIT if any(need.declared for need in verdict.missing) else Finding.NOT_SHOWN,
        detail=verdict.declared,
        avoidable=harness.restartable and any(need in (RESTARTS, CUTS) for need in verdict.missing),
    )


def _told(error: BaseException) -> str:
    """Return the assertion that failed with its line in the suite, and what the error says beside it."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(_HERE)
    ]
    frame = frames[-1]
    said = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    return " ".join(f"{Path(frame.filename).name}:{frame.lineno}: {frame.line} {said}".split())


_WIDTH: Final = max(map(len, GUARANTEES.values()))
_FINDING: Final = max(map(len, Finding))


def table(certificate: Certificate) -> str:
    """Return one line per guarantee.

    Below the lines it says what is declared or could not be shown, and why each broken case is broken.
    """
    lines = [f"{'':>2}  {'guarantee':<{_WIDTH}}  {'finding':<{_FINDING}}  cases"]
    for number, text in GUARANTEES.items():
        finding = certificate.finding(number)
        lines.append(f"{number:>2}  {text:<{_WIDTH}}  {finding.value:<{_FINDING}}  {_count(certificate, number)}")
    lines += _reasons(certificate, Finding.LIMIT, "limit: the storage declares that it does not keep")
    lines += _reasons(certificate, Finding.NOT_SHOWN, "not shown: this needs")
    for result in certificate.broken:
        lines += [f"broken: {result.case.id}: {result.case.promise.splitlines()[0]}", f"    {result.detail}"]
    lines.append(_verdict(certificate))
    return "\n".join(lines)


def _count(certificate: Certificate, number: int) -> str:
    found = Counter(result.finding for result in certificate.of(number))
    return ", ".join(f"{found[finding]} {finding.value}" for finding in Finding if found[finding])


def _reasons(certificate: Certificate, finding: Finding, introduction: str) -> list[str]:
    """Return each reason once, with the cases that have it."""
    cases: dict[str, list[str]] = {}
    for result in certificate.results:
        if result.finding is finding:
            cases.setdefault(result.detail, []).append(result.case.id)
    return [f"{introduction} {detail} ({', '.join(names)})" for detail, names in cases.items()]


def _verdict(certificate: Certificate) -> str:
    total, broken, missed = map(len, (certificate.results, certificate.broken, certificate.not_shown))
    if broken:
        return f"BROKEN: {broken} of {total} cases failed"
    kept = f"none of {total} cases failed" + (f", {missed} could not be shown" if missed else "")
    if certificate.certified:
        return f"certified: {kept}"
    why = (
        f"{certificate.avoidable} need a --restart-command"
        if certificate.avoidable
        else "not all of the suite was chosen"
    )
    return f"NOT CERTIFIED: {kept}; {why}"


def as_json(certificate: Certificate) -> str:
    """Return the certificate as one JSON object: `certified`, numbers of cases, `guarantees` and `cases`."""
    found = {
        "certified": certificate.certified,
        "broken": len(certificate.broken),
        "not_shown": len(certificate.not_shown),
        "not_tried": certificate.not_tried,
        "guarantees": [
            {"guarantee": number, "text": text, "finding": certificate.finding(number).value}
            for number, text in GUARANTEES.items()
        ],
        "cases": [
            {
                "case": result.case.id,
                "promise": result.case.promise,
                "guarantees": list(result.case.guarantees),
                "finding": result.finding.value,
                "detail": result.detail,
            }
            for result in certificate.results
        ],
    }
    return json.dumps(found, indent=2)
