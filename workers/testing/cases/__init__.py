"""The conformance cases, one module per verb or concern."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from workers.testing.case import REGISTRY, Case

MODULES: Final = (
    *(
        "enqueue",
        "claim",
        "ordering",
        "priorities",
        "limits",
        "crons",
        "wait",
        "renew",
        "settle",
        "attempts",
        "recover",
        "retention",
        "cancel",
        "flows",
    ),
    *("deduplication", "chains", "dependencies", "dependencies_across", "follow_ups", "outcomes", "progress"),
    *(
        "inspect",
        "records",
        "manage",
        "events",
        "identifiers",
        "payloads",
        "metadata",
        "bad_input",
        "isolation",
        "restart",
        "full",
    ),
)


def all_cases() -> tuple[Case, ...]:
    """Return every case of the suite, in the order of the verbs."""
    for module in MODULES:
        import_module(f"{__name__}.{module}")
    return tuple(REGISTRY)
