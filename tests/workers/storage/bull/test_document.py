"""The description of the Bull protocol says what is so."""

from __future__ import annotations

import doctest
import re

import pytest
import redis

from tests.workers.manual import ROOT

DOCUMENT = ROOT / "workers" / "storage" / "bull" / "PROTOCOL.md"


def test_the_arithmetic_is_right() -> None:
    """Every calculation in the document comes out as printed."""
    results = doctest.testfile(str(DOCUMENT), module_relative=False)
    assert results.attempted > 10
    assert results.failed == 0


def test_the_progress_tracker_is_ticked() -> None:
    """No part is announced as missing."""
    boxes = re.findall(r"^- \[(.)\]", DOCUMENT.read_text(), re.M)
    assert set(boxes) == {"x"}


def test_links_lead_to_headings() -> None:
    """Every link within the document has its heading."""
    text = DOCUMENT.read_text()
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    headings = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


@pytest.mark.parametrize("ids", [[4093, 4094, 4095, 4096, 4097], [5, 4101]], ids=["across a block", "a block apart"])
def test_redis_orders_equal_due_times_as_described(ids: list[int], redis_url: str) -> None:
    """The server has the order that the document calculates."""
    due = 1_795_219_512_343
    scores = {str(number): due * 4096 + number % 4096 for number in ids}
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        key = f"document:{ids}"
        client.zadd(key, scores)
        found = client.zrange(key, 0, -1)
        client.delete(key)
    assert found == sorted(scores, key=lambda member: (scores[member], member))
    assert found != [str(number) for number in ids]
