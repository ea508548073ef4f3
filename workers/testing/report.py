"""A certificate as text for people, or as JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from typing import Final

from workers.testing.case import GUARANTEES
from workers.testing.certification import Certificate, Finding

_WIDTH: Final = max(map(len, GUARANTEES.values()))


def table(certificate: Certificate) -> str:
    """Return one line per guarantee.

    Below the lines it says what is declared or could not be shown, and why each broken case is broken.
    """
    lines = [f"{'':>2}  {'guarantee':<{_WIDTH}}  {'finding':<9}  cases"]
    for number, text in GUARANTEES.items():
        finding = certificate.finding(number)
        lines.append(f"{number:>2}  {text:<{_WIDTH}}  {finding.value:<9}  {_count(certificate, number)}")
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
    total, broken = len(certificate.results), len(certificate.broken)
    return f"BROKEN: {broken} of {total} cases failed" if broken else f"certified: none of {total} cases failed"


def as_json(certificate: Certificate) -> str:
    """Return the certificate as one JSON object: `certified`, `guarantees` and `cases`."""
    found = {
        "certified": not certificate.broken,
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
