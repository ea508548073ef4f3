"""What ends and claims many jobs by one call, against BullMQ's own script, called for one job after the other."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgpack
import pytest
from bullmq.redis_connection import loadScript

from tests.workers.storage.bullmq.steps import LEASES
from workers.errors import StorageUnavailable
from workers.jobs import Claim, JobState, Settlement, SettleStatus
from workers.storage.abilities import Exchange
from workers.storage.bullmq import BullMQStorage
from workers.storage.bullmq.scripts import BullMQScripts, Finish, Wanted
from workers.testing import steps

NOW: Final = 1_800_000_000_000
LASTS: Final = 3_600
LOCK_MS: Final = 30_000


class Side:
    """One of two queues that are to be alike."""

    def __init__(self, client: Any, kind: str) -> None:
        self.name = f"{kind}-{uuid.uuid4().hex}"
        self.client = client
        self.lua = BullMQScripts(self.name, "bull")
        self.lua.metrics = 10

    async def run(self, *commands: tuple[Any, ...]) -> list[Any]:
        return [await self.client.execute_command(*command) for command in commands]

    async def fill(self, waiting: int, *, refused: bool) -> None:
        """Jobs of every kind that may end, all active; behind them some that wait, or are delayed."""
        add, base = self.lua.add, self.lua.base
        for at in range(2):
            old = f"old-{at}"
            await self.client.hset(base + old, "name", "n")
            await self.client.zadd(self.lua["completed"], {old: NOW - LASTS * 1000 + at})
        parents = [add(f"parent-{at}", "n", "{}", {}, NOW, awaits=True) for at in range(2)]
        children = [
            add(f"child-{at}-{of}", "n", "{}", {}, NOW, {"id": f"parent-{of}", "queueKey": base[:-1]})
            for at, of in ((0, 0), (0, 1), (1, 1))
        ]
        flows = [*parents, *children] if refused else []  # which put their parents in line
        unique = add("unique", "n", "{}", {"de": {"id": "key"}}, NOW)
        await self.run(*flows, unique, *(add(f"plain-{at}", "n", "{}", {}, NOW) for at in range(8)))
        if refused:
            again = {"name": "n", "data": '"again"', "opts": json.dumps({"de": {"id": "key"}}), "jid": "again"}
            await self.client.hset(f"{base}dn:key", mapping=again)
        await self.run(self.lua.claim("first:", LOCK_MS, NOW, count=100))
        later = add("later", "n", "{}", {"delay": 1000}, NOW)
        urgent = [add("urgent", "n", "{}", {"priority": 3}, NOW)] if waiting else []
        await self.run(later, *urgent, *(add(f"next-{at}", "n", "{}", {}, NOW) for at in range(waiting)))
        await self.client.hset(base + "plain-2", "defa", "no")
        await self.client.hdel(self.lua["meta"], "opts.maxLenEvents")
        await self.client.delete(self.lua["marker"])
        if not refused:
            return
        await self.client.set(self.lua.lock("plain-3"), "another's")
        await self.client.delete(self.lua.lock("plain-4"))
        await self.client.lrem(self.lua["active"], 1, "plain-5")
        await self.client.sadd(f"{base}plain-6:dependencies", "unfinished")

    async def contents(self) -> dict[str, Any]:
        """Everything there is, under names that the other has, too."""
        found: dict[str, Any] = {}
        async for key in self.client.scan_iter(f"{self.lua.base}*"):
            kind = await self.client.type(key)
            read: dict[str, tuple[Any, ...]] = {
                "hash": ("HGETALL", key),
                "list": ("LRANGE", key, 0, -1),
                "set": ("SMEMBERS", key),
                "zset": ("ZRANGE", key, 0, -1, "WITHSCORES"),
                "stream": ("XRANGE", key, "-", "+"),
                "string": ("GET", key),
            }
            value = await self.client.execute_command(*read[kind])
            if kind == "stream":  # by job: an order between jobs is nobody's
                value = sorted((fields for _, fields in value), key=lambda fields: str(fields.get("jobId", "")))
            found[key.removeprefix(self.lua.base)] = json.loads(
                json.dumps(value, default=sorted).replace(self.name, "q")
            )
        return found


def endings(tokens: dict[str, str]) -> Iterator[Finish]:
    """How these jobs end, whose claims have these tokens."""
    ways: dict[str, tuple[str, dict[str, object]]] = {
        "plain-1": ("completed", {"count": 0}),
        "plain-2": ("failed", {"age": LASTS}),
        "plain-7": ("failed", {"count": 1}),
        "child-1-1": ("failed", {"count": -1}),
    }
    for raw, token in tokens.items():
        target, keep = ways.get(raw, ("completed", {"age": LASTS, "limit": 1}))
        fields = {"one": "more"} if target == "failed" else {}
        yield Finish(raw=raw, token=token, target=target, value="1", keep=keep, max_attempts=1, fields=fields)


LINES: Final = ("wait", "active", "prioritized", "events", "stalled", "limiter", "delayed", "paused", "meta", "pc")


def stock_ending(lua: BullMQScripts, ending: Finish) -> tuple[Any, ...]:
    """The call of BullMQ's own script that ends a job."""
    options = {"token": ending.token, "keepJobs": ending.keep, "attempts": 1, "maxMetricsSize": lua.metrics}
    fields = msgpack.packb([part for field in ending.fields.items() for part in field]) if ending.fields else ""
    named = (*LINES, ending.target)
    keys = (*(lua[name] for name in named), lua.job(ending.raw), f"{lua.base}metrics:{ending.target}", lua["marker"])
    field = "returnvalue" if ending.target == "completed" else "failedReason"
    said = (ending.raw, NOW, field, ending.value, ending.target, "", lua.base)
    return ("EVAL", loadScript("moveToFinished-14.lua"), 14, *keys, *said, msgpack.packb(options), fields)


def stock_claim(lua: BullMQScripts, token: str) -> tuple[Any, ...]:
    """The call of BullMQ's own script that claims a job."""
    options = {"token": token, "lockDuration": LOCK_MS, "name": token}
    keys = [lua[name] for name in (*LINES, "marker")]
    return ("EVAL", loadScript("moveToActive-11.lua"), 11, *keys, lua.base, NOW, msgpack.packb(options))


@pytest.mark.usefixtures("storage")  # whose scripts are loaded
@pytest.mark.parametrize(("waiting", "refused"), [(0, False), (0, True), (3, True), (30, False), (30, True)])
async def test_a_turn_leaves_a_queue_as_bullmqs_own_script_does(client: Any, waiting: int, refused: bool) -> None:
    """Every key, field, event, marker and metric is the same, and so are the answers."""
    ours, theirs = Side(client, "ours"), Side(client, "theirs")
    answers: list[list[Any]] = []
    for side in (ours, theirs):
        await side.fill(waiting, refused=refused)
        active = await client.lrange(side.lua["active"], 0, -1)
        tokens = {raw: await client.hget(side.lua.job(raw), "pb") for raw in (*active[::-1], "plain-5", "nobody")}
        ends, wanted = list(endings({raw: token or "t" for raw, token in tokens.items()})), min(waiting, 10)
        if side is ours:
            claims = Wanted(count=wanted, now_ms=NOW, tokens="next:", lock_ms=LOCK_MS)
            [[codes, claimed, _]] = await side.run(side.lua.exchange(ends, NOW, claims))
        else:
            codes = await side.run(*(stock_ending(side.lua, ending) for ending in ends))
            claimed = await side.run(*(stock_claim(side.lua, f"next:{at:x}") for at in range(wanted)))
        answers.append([codes, [claim[1:] for claim in claimed]])
    assert answers[0] == answers[1]
    assert set(answers[0][0]) == ({-1, -2, -3, -4, -6, 0} if refused else {0, -1})
    contents = await ours.contents()
    assert contents == await theirs.contents()
    assert ({"event": "drained"} in contents["events"]) == (not waiting and not refused)


async def exchange_on(storage: BullMQStorage, *ends: Settlement, limit: int) -> Exchange:
    return await storage.settle_and_claim(ends, "w", leases=LEASES, limit=limit)


@pytest.mark.parametrize("line", ["wait", "prioritized"])
@pytest.mark.parametrize(
    ("raw", "spoil"),
    [
        ("bad", ("SET", "no hash")),
        ("bad", ("HSET", "ats", "many")),
        ("bad", ("HSET", "atm", "1.5")),
        ("bad", ("HSET", "stc", "9" * 20)),
        ("meta", ("HSET", "of", "the queue")),
        ("workers:seen", ("ZADD", 1, "somebody")),
    ],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
async def test_a_turn_claims_up_to_a_job_with_a_fault(
    storage: BullMQStorage, client: Any, raw: str, spoil: tuple[Any, ...], line: str
) -> None:
    """What comes before it runs; it is back in line, without a lock, and set aside before the next claim."""
    base = f"bull:{storage.queue}:"
    await steps.enqueue(storage, steps.job("first"))
    first = await steps.claim_one(storage)
    priority = 1 if line == "prioritized" else 0
    await steps.enqueue(storage, *(steps.job(name, priority=priority) for name in ("before", "between", "behind")))
    command, *rest = spoil
    await client.execute_command(command, base + raw, *rest)
    if line == "wait":
        await client.linsert(f"{base}wait", "BEFORE", "between", raw)
    else:
        await client.zadd(f"{base}prioritized", {raw: 1.5 * 2**32})
        await client.zadd(f"{base}prioritized", {"between": 1.4 * 2**32, "behind": 1.6 * 2**32})
    turn = await exchange_on(storage, steps.completed(first), limit=9)
    assert (turn.outcomes[0].status, steps.ids(turn.claims or ())) == (SettleStatus.APPLIED, ["before", "between"])
    assert sorted(await client.lrange(f"{base}active", 0, -1)) == ["before", "between"]
    assert await client.lindex(f"{base}wait", -1) == raw
    assert not await client.exists(f"{base}{raw}:lock")
    assert steps.ids(await steps.claim(storage, 9)) == ["behind"]
    assert [entry.id for entry in await storage.quarantine()] == [raw]


@pytest.mark.parametrize("name", ["meta", "wait", "active", "prioritized", "events", "stalled"])
async def test_no_job_ends_at_a_key_in_the_way(storage: BullMQStorage, client: Any, name: str) -> None:
    """Nothing of it is changed, and it ends as soon as the key is gone."""
    await steps.enqueue(storage, steps.job("a"))
    claim = await steps.claim_one(storage)
    base = f"bull:{storage.queue}:"
    before = await client.hgetall(f"{base}a")
    if moved := await client.exists(base + name):
        await client.rename(base + name, f"{base}moved")
    await client.set(base + name, "no queue's")
    with pytest.raises(StorageUnavailable, match=f"{name} is a string"):
        await exchange_on(storage, steps.failed(claim), limit=1)
    assert (await client.hgetall(f"{base}a"), await client.get(f"{base}a:lock")) == (before, claim.token)
    if moved:
        await client.rename(f"{base}moved", base + name)
    else:
        await client.delete(base + name)
    await steps.apply(storage, steps.failed(claim))


@pytest.mark.parametrize("end", [steps.completed, steps.failed])
async def test_a_job_that_changes_while_it_runs_is_in_a_line_whatever_happens(
    storage: BullMQStorage, client: Any, end: Callable[[Claim], Settlement]
) -> None:
    """BullMQ stops half-way at a deduplication key it cannot use: a recovery finds the job, its neighbours end."""
    await steps.enqueue(storage, *map(steps.job, ("a", "b", "c")))
    claims = await steps.claim(storage, 3)
    base = f"bull:{storage.queue}:"
    await client.hset(f"{base}b", "deid", "key")
    await client.rpush(f"{base}de:key", "no string")
    turn = await exchange_on(storage, *map(end, claims), limit=1)
    statuses = [outcome.status for outcome in turn.outcomes]
    assert statuses == [SettleStatus.APPLIED, SettleStatus.ERROR, SettleStatus.APPLIED]
    assert await client.lrange(f"{base}active", 0, -1) == ["b"]
    recoveries = [await storage.recover(10) for _ in range(storage.capabilities.recovery_passes)]
    assert recoveries[-1].requeued == ("b",)
    again = await steps.claim_one(storage)
    assert (await steps.settle(storage, steps.completed(again))).status is SettleStatus.ERROR
    await steps.apply(storage, steps.failed(again))  # and loses the key
    assert (await steps.status(storage, "b")).state is JobState.FAILED
