"""The ids that a storage takes, unchanged: any text of 1 to 512 bytes, unless it declares otherwise."""

from __future__ import annotations

from typing import Final

from workers.errors import Unsupported
from workers.jobs import JobEventKind, JobState
from workers.storage.base import Storage
from workers.testing.case import ANY_ID, ORDERING_KEYS, case
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


async def _takes(storage: Storage, name: str) -> bool:
    """Tell whether the storage takes this as an id; it is free again in either case."""
    try:
        await enqueue(storage, job(name))
    except Unsupported:
        return False
    assert await storage.remove([name]) == 1
    return True


async def _possible(harness: Harness, storage: Storage) -> list[str]:
    """Return the nasty ids that the storage takes."""
    return [name for name in NASTY if harness.capabilities.any_id or await _takes(storage, name)]


@case(guarantees=(9,), needs=(ANY_ID,))
async def no_text_is_refused(storage: Storage) -> None:
    """All nasty ids are taken, in one call."""
    await enqueue(storage, *map(job, NASTY))


@case(guarantees=(9, 24))
async def a_refused_id_is_unsupported(harness: Harness, storage: Storage) -> None:
    """Without `capabilities.any_id` some ids are `Unsupported`: none is inserted, and no verb finds one."""
    for name in set(NASTY) - set(await _possible(harness, storage)):
        try:
            await storage.enqueue([job("plain"), job(name)])
        except Unsupported:
            assert await storage.status(["plain", name]) == [None, None]
            assert await storage.remove([name]) + await storage.retry([name]) + await storage.promote([name]) == 0
        else:
            raise AssertionError(f"{name!r} was refused before")
    assert await claim(storage) == []


@case(guarantees=(9,))
async def any_text_is_a_job_id(harness: Harness, storage: Storage) -> None:
    """Nasty ids are enqueued, claimed, read, listed, settled and found again unchanged, and each is distinct."""
    names = await _possible(harness, storage)
    await enqueue(storage, *(job(name, payload=name.encode()) for name in names))
    assert {found.id for found in (await storage.list(JobState.QUEUED, limit=len(NASTY) + 1)).jobs} == set(names)
    claims = await claim(storage, len(NASTY) + 1)
    assert ids(claims) == names
    assert [held.payload.decode() for held in claims] == names
    await apply(storage, *(completed(held, held.payload) for held in claims))
    for name in names:
        outcome = await storage.result(name)
        assert outcome is not None
        assert outcome.result == name.encode()
    found = await storage.status(names)
    assert [one.id if one else None for one in found] == names
    assert [result.id for result in await storage.enqueue([job(name) for name in names])] == names


@case(guarantees=(9,))
async def any_text_can_be_retried_and_cancelled(harness: Harness, storage: Storage) -> None:
    """Nasty ids work in the verbs that look a single job up: retry, cancel, remove and their events."""
    names = await _possible(harness, storage)
    await enqueue(storage, *(job(name) for name in names))
    await apply(storage, *(failed(held) for held in await claim(storage, len(names))))
    assert await storage.retry(names) == len(names)
    for name in names[::2]:
        async with storage.subscribe(name) as subscription:
            assert (await storage.cancel(name)).value == "cancelled"
            assert (await expect(subscription, JobEventKind.CANCELLED))[0].job_id == name
    assert await storage.remove(names[1::2]) == len(names[1::2])
    assert await claim(storage, len(names)) == []


@case(guarantees=(9,))
async def any_text_is_a_worker_id_or_name(storage: Storage) -> None:
    """Workers and jobs may have any text as their name, too."""
    for name in NASTY:
        await enqueue(storage, job(name=name))
        (held,) = await claim(storage, worker_id=name)
        assert (held.worker_id, held.name) == (name, name)
        assert (await status(storage, held.job_id)).worker_id == name
    assert {worker.id for worker in await storage.workers()} == set(NASTY)


@case(guarantees=(9,), needs=(ORDERING_KEYS,))
async def any_text_is_an_ordering_key(storage: Storage) -> None:
    """Ordering keys may be any text, and look-alikes are different keys."""
    await enqueue(storage, *(job(ordering_key=key) for key in NASTY for _ in range(2)))
    assert len(await claim(storage, 2 * len(NASTY))) == len(NASTY)
