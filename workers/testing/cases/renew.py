"""The promises of `renew`."""

from __future__ import annotations

from dataclasses import replace

from workers.errors import LossReason
from workers.jobs import JobState, Renewal
from workers.storage.base import Storage
from workers.testing.case import case
from workers.testing.harness import Harness
from workers.testing.steps import (
    LEASE,
    apply,
    claim,
    claim_one,
    completed,
    crash,
    dropped,
    enqueue,
    job,
    recover,
    released,
    state,
)


@case(guarantees=(18,))
async def a_renewed_lease_outlives_the_first(harness: Harness, storage: Storage) -> None:
    """A renewed claim is not recovered when its first lease would have ended, by any number of passes."""
    await enqueue(storage, job("kept"))
    held = await claim_one(storage, lease=harness.moment)
    assert await storage.renew([replace(held, lease=LEASE)]) == Renewal()
    await harness.advance(harness.moment)
    for _ in range(harness.capabilities.recovery_passes + 1):
        recovery = await storage.recover(100)
        assert (recovery.requeued, recovery.failed) == ((), ())
    assert await state(storage, "kept") is JobState.PROCESSING
    await apply(storage, completed(held))


@case(guarantees=(18, 23))
async def many_claims_are_renewed_at_once(storage: Storage) -> None:
    """Of a batch of renewals, only the lost ones are reported lost; the others hold."""
    await enqueue(storage, *(job() for _ in range(20)))
    claims = await claim(storage, 20)
    await apply(storage, completed(claims[3]), completed(claims[7]))
    renewal = await storage.renew(claims)
    assert dict(renewal.lost) == {
        claims[3].token: LossReason.COMPLETED,
        claims[7].token: LossReason.COMPLETED,
    }
    assert await storage.renew([]) == Renewal()


@case(guarantees=(5, 18))
async def each_claim_is_renewed_by_its_own_lease(harness: Harness, storage: Storage) -> None:
    """Leases of different lengths that are renewed in one call end at different times."""
    await enqueue(storage, job("long"), job("short"), job("also long"))
    long, short, also_long = await claim(storage, 3)
    renewal = await storage.renew([long, replace(short, lease=harness.moment), also_long])
    assert renewal == Renewal()
    await harness.advance(harness.moment)
    assert (await recover(harness, storage, 1)).requeued == ("short",)
    await apply(storage, completed(long), completed(also_long))


@case(guarantees=(3,))
async def a_lost_lease_is_reported_with_its_reason(harness: Harness, storage: Storage) -> None:
    """A claim learns whether its job was taken, was completed or is unknown."""
    await enqueue(storage, job("job"))
    (old,) = await crash(harness, storage)
    await recover(harness, storage, 1)
    assert dict((await storage.renew([old])).lost) == {old.token: LossReason.TAKEN}
    held = await claim_one(storage)
    assert dict((await storage.renew([old, held])).lost) == {old.token: LossReason.TAKEN}
    await apply(storage, completed(held))
    assert dict((await storage.renew([old])).lost) == {old.token: LossReason.COMPLETED}
    await enqueue(storage, job("gone"))
    gone = await claim_one(storage)
    await apply(storage, dropped(gone))
    assert dict((await storage.renew([gone])).lost) == {gone.token: LossReason.NOT_FOUND}


@case(guarantees=(3,))
async def a_released_claim_is_lost(storage: Storage) -> None:
    """A worker cannot renew a claim after giving its job back."""
    await enqueue(storage, job())
    held = await claim_one(storage)
    await apply(storage, released(held))
    assert list((await storage.renew([held])).lost) == [held.token]


@case(guarantees=(18,))
async def an_expired_lease_nobody_took_is_still_good(harness: Harness, storage: Storage) -> None:
    """A lease that ran out is still renewed as long as no reaper has recovered its job."""
    await enqueue(storage, job("late"))
    (held,) = await crash(harness, storage)
    assert await storage.renew([replace(held, lease=LEASE)]) == Renewal()
    assert (await storage.recover(100)).requeued == ()
    await apply(storage, completed(held))
