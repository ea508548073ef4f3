"""A certificate as text for people, or as JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from typing import Final

from workers.testing.case import GUARANTEES
from workers.testing.certification import Certificate, Finding

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
