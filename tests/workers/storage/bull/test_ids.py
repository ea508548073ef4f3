"""Which ids jobs on a Bull queue may have, and how they stand in Redis."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.workers.storage.bull.steps import NodeBull, claimed
from workers.errors import Unsupported
from workers.jobs import Completed, Continued, SettleStatus
from workers.storage.bull import BullStorage
from workers.storage.bull.codec import RESERVED_IDS
from workers.testing.steps import claim_one, job

LOCKS = ["a:lock", ":lock", "~x:lock"]
NUMBERS = ["0", "123", "007", "9" * 40]


@pytest.mark.parametrize("job_id", [*sorted(RESERVED_IDS), *LOCKS, *NUMBERS])
async def test_ids_that_bull_would_confuse_are_refused(job_id: str, storage: BullStorage, node: NodeBull) -> None:
    """Names of keys and locks, and the counter's numbers: the error names the id, nothing of the batch is written."""
    with pytest.raises(Unsupported, match=f"^job {job_id!r}: .*give it an"):
        await storage.enqueue([job("before"), job(job_id)])
    assert await node.client.keys(node.key("*")) == []


async def test_an_id_like_another_is_none_of_those(storage: BullStorage, node: NodeBull) -> None:
    """What resembles a name of a key, a lock or a number is an id, and what is no plain word is wrapped in Redis."""
    plain, wrapped = ["waiting", "Wait", "lock", "job-1"], ["a:lock ", "wait:", "-1", "1.0", "1 ", "٣", "~x", "a:wait"]
    await storage.enqueue([job(job_id) for job_id in (*plain, *wrapped)])
    line = await node.line("wait")
    assert line[: len(plain)] == plain
    assert all(raw.startswith("~") for raw in line[len(plain) :])
    assert await claimed(storage, 100) == [*plain, *wrapped]


@pytest.mark.parametrize("another", ["a", "z"])
async def test_a_claim_with_another_id_is_none_of_the_job_that_was_claimed(another: str, storage: BullStorage) -> None:
    """It speaks of the job it names, of which its token is not."""
    await storage.enqueue([job("mine"), job(another)])
    held = await claim_one(storage)
    [settled] = await storage.settle([Completed(claim=replace(held, job_id=another), result=b"1")])
    assert settled.status is SettleStatus.LOST
    [settled] = await storage.settle([Completed(claim=held, result=b"1")])
    assert settled.status is SettleStatus.APPLIED


async def test_a_continuation_by_such_an_id_is_an_error(storage: BullStorage) -> None:
    """Of that settlement alone, whose job is still its claim's."""
    await storage.enqueue([job("one")])
    held = await claim_one(storage)
    [refused] = await storage.settle([Completed(claim=held, result=b"1", then=job("wait"))])
    assert (refused.status, refused.detail) == (SettleStatus.ERROR, str(refused.detail))
    assert "give it another id" in str(refused.detail)
    [kept] = await storage.settle([Completed(claim=held, result=b"1", then=job("after"))])
    assert kept.status is SettleStatus.APPLIED
    assert await claimed(storage) == ["after"]


async def test_a_job_of_node_may_be_a_chain(storage: BullStorage, node: NodeBull) -> None:
    """The next link keeps the number that is its id."""
    number = await node.add()
    held = await claim_one(storage)
    [outcome] = await storage.settle([Continued(claim=held, then=job(number, name="next"))])
    assert outcome.status is SettleStatus.APPLIED
    assert await node.line("wait") == [number]
    assert (await claim_one(storage)).name == "next"


async def test_every_dialect_has_ids_to_take(storage: BullStorage) -> None:
    """Those of dialect C are no numbers, and no two are the same."""
    found = [await storage.next_id() for _ in range(3)]
    await storage.enqueue([job(one) for one in found])
    assert await claimed(storage) == found


async def test_ids_of_node_read_as_they_are(storage: BullStorage, node: NodeBull) -> None:
    """Numbers and any text that Node chose; every verb finds them."""
    theirs = [await node.add(), await node.add("a:b"), await node.add("wörk ~")]
    assert [found.id if found else None for found in await storage.status(theirs)] == theirs
    assert await claimed(storage) == theirs
    assert await storage.remove(theirs, running=True) == 3


@pytest.mark.parametrize("job_id", ["abc", "007", "-1", "1.0", "9007199254740992", "٣", "1 "])
async def test_old_dialects_take_numbers_alone(job_id: str, old: BullStorage) -> None:
    """Node up to 1.0 reads every id as a number: another is refused before anything is written, and told what to do."""
    with pytest.raises(Unsupported, match="next_id"):
        await old.enqueue([job("1"), job(job_id)])
    assert await old.status(["1"]) == [None]


async def test_old_dialects_have_numbers_to_take(old: BullStorage, node: NodeBull) -> None:
    """Numbers from `next_id` are nobody else's, and each job takes one; one from elsewhere is never given out again."""
    first, second = [await old.next_id() for _ in range(2)]
    await old.enqueue([job(first), job(second)])
    assert (second, await node.add()) == ("2", "3")
    await old.enqueue([job("500")])
    assert await node.add() == "501"
    assert (await node.record("500"))["opts"].startswith('{"attempts"')
    assert await claimed(old) == [first, second, "3", "500", "501"]
