"""Which ids a storage takes: any text of 1 to 512 bytes, unchanged."""

from __future__ import annotations

from typing import Final

from workers.jobs import JobEventKind, JobState
from workers.testing.case import ORDERING_KEYS, case
from workers.testing.harness import Harness
from workers.testing.steps import apply, claim, completed, enqueue, expect, failed, ids, job, status

NASTY: Final = (
    *(
        "a:b",
        "0:x",
        "::",
        "a/b",
        "/",
        "../../etc/passwd",
        ".",
        "..",
        "C:\\x",
        "a\\b",
        "~abc",
        "~",
        "-",
        "_",
        " ",
        "  x ",
    ),
    *("0", "12345", "-1", "1e9", "meta", "wait", "active", "completed", "marker", "events", "id", "null", "None"),
    *("*", "%", "%s", "{}", "{tag}", "[x]", "?", "#", "$1", "';--", '"', "`", "a'b", "<x>", "&amp;", "a,b", "a=b"),
    *("a\nb", "a\tb", "\r\n", "a\x00b", "\x00", "\x7f", "\x1b[0m", "ünïcödé", "日本語", "👩‍🚀", "\u202eabc", "\ufeff"),
    *("e\u0301", "\u00e9", "ABC", "abc", "x" * 512, "é" * 256, "/" * 512),
)
"""Ids that collide with keys, paths, patterns, quotes or encodings somewhere; look-alikes are different ids."""


@case(guarantees=(9,))
async def any_text_is_a_job_id(harness: Harness) -> None:
    """Nasty ids are enqueued, claimed, read, listed, settled and found again as they are, each one its own."""
    storage = await harness.open()
    await enqueue(storage, *(job(name, payload=name.encode()) for name in NASTY))
    assert {found.id for found in (await storage.list(JobState.QUEUED, limit=len(NASTY) + 1)).jobs} == set(NASTY)
    claims = await claim(storage, len(NASTY) + 1)
    assert ids(claims) == list(NASTY)
    assert [held.payload.decode() for held in claims] == list(NASTY)
    await apply(storage, *(completed(held, held.payload) for held in claims))
    for name in NASTY:
        outcome = await storage.result(name)
        assert outcome is not None
        assert outcome.result == name.encode()
    found = await storage.status(NASTY)
    assert [one.id if one else None for one in found] == list(NASTY)
    assert [result.id for result in await storage.enqueue([job(name) for name in NASTY])] == list(NASTY)


@case(guarantees=(9,))
async def any_text_can_be_retried_and_cancelled(harness: Harness) -> None:
    """Nasty ids work in the verbs that look a single job up: retry, cancel, remove and their events."""
    storage = await harness.open()
    await enqueue(storage, *(job(name) for name in NASTY))
    await apply(storage, *(failed(held) for held in await claim(storage, len(NASTY))))
    assert await storage.retry(NASTY) == len(NASTY)
    for name in NASTY[::2]:
        async with storage.subscribe(name) as subscription:
            assert (await storage.cancel(name)).value == "cancelled"
            assert (await expect(subscription, JobEventKind.CANCELLED))[0].job_id == name
    assert await storage.remove(NASTY[1::2]) == len(NASTY[1::2])
    assert await claim(storage, len(NASTY)) == []


@case(guarantees=(9,))
async def any_text_is_a_worker_id_or_name(harness: Harness) -> None:
    """Workers and job names may be called anything, too."""
    storage = await harness.open()
    for name in NASTY:
        await enqueue(storage, job(name=name))
        (held,) = await claim(storage, worker_id=name)
        assert (held.worker_id, held.name) == (name, name)
        assert (await status(storage, held.job_id)).worker_id == name
    assert {worker.id for worker in await storage.workers()} == set(NASTY)


@case(guarantees=(9,), needs=(ORDERING_KEYS,))
async def any_text_is_an_ordering_key(harness: Harness) -> None:
    """Ordering keys may be any text, and look-alikes are different keys."""
    storage = await harness.open()
    await enqueue(storage, *(job(ordering_key=key) for key in NASTY for _ in range(2)))
    assert len(await claim(storage, 2 * len(NASTY))) == len(NASTY)
