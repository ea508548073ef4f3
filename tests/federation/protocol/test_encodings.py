"""Parsing leaves the process alone: other tests show what it accepts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from federation.protocol.encodings import parse_json
from federation.protocol.errors import NotJson


@pytest.fixture
def collector() -> Iterator[None]:
    """The collector is on again afterwards."""
    yield
    gc.enable()


def test_a_document_of_empty_lists_starts_no_collections() -> None:
    """Each would go through all lists so far, so that a few mebibytes would stop the process for a second."""
    phases: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)

    text = f"[{'[],' * 50_000}[]]"
    gc.collect()
    gc.callbacks.append(note)
    try:
        value = parse_json(text, limit=len(text))
        during = list(phases)
    finally:
        gc.callbacks.remove(note)

    assert isinstance(value, list)
    # Enabled again, the collector runs once at the next allocation, which may be this test's.
    assert len(during) <= 2


@pytest.mark.parametrize("text", ["[]", "[", "[" * 100_000])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.usefixtures("collector")
def test_the_collector_is_as_it_was(text: str, enabled: bool) -> None:
    """Also after a text that is no JSON, and for a host application that has switched it off."""
    (gc.enable if enabled else gc.disable)()

    with suppress(NotJson):
        parse_json(text, limit=len(text))

    assert gc.isenabled() is enabled
