"""Payloads and results are bytes from end to end."""

from __future__ import annotations

import os
from typing import Final

from workers.jobs import Completed
from workers.storage.base import Storage
from workers.testing.case import case
from workers.testing.harness import Harness
from workers.testing.steps import apply, claim, claim_one, crash, enqueue, failed, job, recover, retried

BODIES: Final = (
    *(b"", b"null", b"{}", b'{"a":1}', b'"text"', b"not json", b" ", b"\x00", b"\xff\xfe", bytes(range(256))),
    *(
        "ünï 👩‍🚀".encode(),
        b'{"a": 1.0, "b": [1, 2]}',
        b'{"a":1,"a":2}',
        b"1e400",
        b"12345678901234567890123",
        b"[" * 200,
    ),
)
"""Empty, binary, and JSON that would not survive being parsed and written again."""


@case(guarantees=(10,))
async def any_bytes_are_a_payload(storage: Storage) -> None:
    """Payloads come back byte for byte, whatever they look like."""
    await enqueue(storage, *(job(f"job-{number}", payload=body) for number, body in enumerate(BODIES)))
    assert [held.payload for held in await claim(storage, 100)] == list(BODIES)


@case(guarantees=(10,))
async def any_bytes_are_a_result(storage: Storage) -> None:
    """Results come back byte for byte, from `result` and with a repeated enqueue."""
    await enqueue(storage, *(job(f"job-{number}") for number in range(len(BODIES))))
    claims = await claim(storage, 100)
    await apply(storage, *(Completed(claim=held, result=body) for held, body in zip(claims, BODIES, strict=True)))
    again = await storage.enqueue([job(f"job-{number}") for number in range(len(BODIES))])
    assert [answer.result for answer in again] == list(BODIES)
    outcomes = [await storage.result(f"job-{number}") for number in range(len(BODIES))]
    assert [outcome.result if outcome else None for outcome in outcomes] == list(BODIES)


@case(guarantees=(10,))
async def sixteen_mebibytes_are_a_payload(storage: Storage) -> None:
    """A payload of 16 MiB of random bytes, and a result of that size, come back unchanged."""
    body = os.urandom(16 << 20)
    await enqueue(storage, job("large", payload=body))
    held = await claim_one(storage)
    assert held.payload == body
    await apply(storage, Completed(claim=held, result=body))
    outcome = await storage.result("large")
    assert outcome is not None
    assert outcome.result == body


@case(guarantees=(10,))
async def a_payload_survives_every_way_back(harness: Harness, storage: Storage) -> None:
    """A retry, a crash and an operator's retry hand out the same bytes again."""
    await enqueue(storage, job("job", payload=bytes(range(256)), max_attempts=9))
    await apply(storage, retried(await claim_one(storage)))
    await crash(harness, storage)
    await recover(harness, storage, 1)
    await apply(storage, failed(await claim_one(storage)))
    await storage.retry(["job"])
    assert (await claim_one(storage)).payload == bytes(range(256))
