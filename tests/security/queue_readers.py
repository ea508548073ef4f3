"""What reads what stands in a queue, where everybody writes who reaches the server, and what its dashboard is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from typing import Final, get_args
from urllib.parse import quote
from zoneinfo import ZoneInfo

import httpx

from tests.security.reading import NOW, Reader, text_of
from workers.cron import UnreadablePattern, read_pattern
from workers.crons.definition import Cron, KeptCron
from workers.dashboard.access import Access
from workers.dashboard.application import queue_site
from workers.dashboard.site import Site
from workers.errors import StorageError
from workers.jobs import JobStatus
from workers.metadata import check_meta, decode_meta
from workers.queue import Queue
from workers.serde import JsonSerde
from workers.storage.base import ANY_NAME
from workers.storage.bull import codec as bull
from workers.storage.bull import inspect as bull_reading
from workers.storage.bullmq import record as bullmq
from workers.storage.bullmq import schedulers
from workers.storage.failures import decode_failures
from workers.storage.file import codec as file
from workers.storage.file.frames import Frame
from workers.storage.memory import MemoryStorage
from workers.storage.on_redis.messages import STATES
from workers.storage.redis import codec as redis
from workers.storage.sql import rows

NOW_MS: Final = int(NOW.timestamp() * 1000)
_ZONE: Final = ZoneInfo("Europe/Berlin")
_AS_IT_IS: Final = "".join(chr(number) for number in range(0x21, 0x7F) if chr(number) != "#")
_SERDE: Final = JsonSerde()
_LEASES: Final = {ANY_NAME: timedelta(seconds=30)}


class NoFields(Exception):
    """An input is none, which says nothing about who reads them."""


def _fields(data: bytes) -> dict[str, str]:
    """The fields of a hash, with values that are texts, as our connections read them."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise NoFields
    return {name: told for name, told in value.items() if isinstance(told, str)}


def _payload(data: bytes) -> None:
    _SERDE.dumps(_SERDE.loads(data))


def _meta(data: bytes) -> None:
    check_meta(decode_meta(data))


def _cron(data: bytes) -> None:
    """Also the search for the next time, of which there may be none."""
    pattern = read_pattern(text_of(data))
    found = pattern.next_after(NOW_MS, _ZONE)
    assert found is None or found > NOW_MS


def _bullmq_job(data: bytes) -> None:
    """In whatever place its hash is, claimed or looked at."""
    fields = _fields(data)
    for place in ("waiting", "active", "delayed", "completed", "failed", "unknown"):
        replies = [[fields.get(name) for name in bullmq.WHOLE_FIELDS], place, fields.get("lock"), fields.get("score")]
        found = bullmq.record("7", replies, NOW_MS, bullmq.WHOLE_FIELDS)
        whole = bullmq.whole_record(found)
        if whole is not None:
            _shown(whole.status)
    flat = [each for pair in fields.items() for each in pair]
    claim = bullmq.make_claim((flat, "7"), "worker:1", "worker", _LEASES)
    assert claim.attempt >= 1


def _kept_cron(data: bytes) -> None:
    KeptCron.decoded("daily", text_of(data))


def _bullmq_scheduler(data: bytes) -> None:
    schedulers.decoded("daily", _fields(data))


def _bull_job(data: bytes) -> None:
    told: Mapping[str, bytes] = {name: text.encode("utf-8", "surrogatepass") for name, text in _fields(data).items()}
    get = told.get
    counts = [get(name) for name in ("timestamp", "attempts", "made", "stalls")]
    facts = [get(name) for name in ("reason", "stacks", "facts")]
    for dialect in get_args(bull.Dialect):
        [claim] = bull.decode_claims(
            "worker", b"x" * 12, dialect, [b"7", get("name"), get("data", b""), get("opts"), *counts, *facts, 30_000]
        )
        assert claim.attempt >= 1
    shown = [get("name"), get("opts"), *counts, get("progress"), get("stacks"), get("reason"), get("mark")]
    for code in STATES:
        status = [b"7", code, NOW_MS, get("lock"), [*shown, get("facts"), get("stall"), None, get("finished"), None]]
        kept = bull_reading.decode_whole([status, get("data", b""), get("result"), None, get("failures")])
        _shown(kept.status)


def _shown(status: JobStatus) -> None:
    """As a dashboard and a command do it."""
    assert repr(status)


def _redis_job(data: bytes) -> None:
    """The scripts read the head of a record, and set aside what has none."""
    [claim] = redis.decode_claims("worker", b"x" * 12, [b"7", data, 1, 30_000_000, b""])
    assert claim.stalled is None or claim.name == redis.UNREADABLE
    redis.decode_error(data)


def _journal(data: bytes) -> None:
    entries, _, blobs = data.partition(b"\n")
    file.decode(Frame(entries=entries, blobs=blobs, start=0, end=len(data)))


def _row(data: bytes) -> None:
    text = text_of(data)
    rows.decode_error(text)
    rows.decode_backoff(text)
    decode_failures(text)
    assert rows.decode_text(rows.encode_text(text)) == text


@cache
def _dashboard() -> tuple[asyncio.Runner, httpx.AsyncClient]:
    """One of a queue in memory, which lasts as long as the process."""
    runner = asyncio.Runner()

    async def made() -> Site:
        queue = Queue(MemoryStorage(queue="mail"))
        await queue.start()
        await queue.enqueue({"to": "bob"}, name="send", id="first")
        return queue_site([queue], access=Access(allow_actions=True))[0]

    site = runner.run(made())
    transport = httpx.ASGITransport(app=site.app, client=("127.0.0.1", 50_000))
    return runner, httpx.AsyncClient(transport=transport, base_url="http://localhost:8765")


def _page(data: bytes) -> None:
    """A path and its query, by a browser or a program; and the same as a form, and as JSON."""
    runner, client = _dashboard()
    path, _, sent = data.partition(b"\n")
    target = httpx.URL("http://localhost:8765").copy_with(raw_path=b"/" + quote(path, safe=_AS_IT_IS).encode())

    async def asked() -> None:
        for kind in (None, "application/x-www-form-urlencoded", "application/json"):
            headers = {} if kind is None else {"content-type": kind}
            method = "GET" if kind is None else "POST"
            answer = await client.request(method, target, content=sent if kind else None, headers=headers)
            assert answer.status_code < 500, (answer.status_code, answer.text[:500])

    runner.run(asked())


_BULLMQ: Final = {
    "name": "send",
    "data": '{"to":"bob"}',
    "opts": '{"attempts":3,"delay":0,"backoff":{"type":"exponential","delay":1000,"jitter":0.5},"kl":5,"tm":"{}"}',
    "timestamp": "1767323045678",
    "priority": "0",
    "atm": "1",
    "ats": "2",
    "stc": "0",
    "failedReason": "no route",
    "stacktrace": '["Error: no route\\n    at send (a.js:1:2)"]',
    "finishedOn": "1767323045679",
    "progress": "42",
}
_BULL: Final = {
    "name": "send",
    "data": '{"to":"bob"}',
    "opts": '{"attempts":3,"backoff":{"type":"fixed","delay":1000},"timeout":500,"removeOnComplete":true}',
    "timestamp": "1767323045678",
    "attempts": "3",
    "made": "1",
    "stalls": "0",
    "reason": "no route",
    "stacks": '["Error: no route"]',
    "stall": '["worker", 1, 3, 1, 1]',
    "failures": '1767323045678 [1,"worker",5,"Error","no route"]',
}
_SCHEDULER: Final = {"name": "send", "pattern": "0 3 * * *", "tz": "Europe/Berlin", "every": "60000", "data": "{}"}
_KEPT_CRON: Final = KeptCron(
    cron=Cron(name="daily", job="send", pattern="0 3 * * *", payload=b"{}"), last=NOW
).encoded()
_RECORD: Final = (
    b"\x01\x00\x06aU\x9b$Ox\x00\x06aU\x9b$Ox\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x00\xd6\x93\xa4\x00\x00"
    b"\x00\x00\x8c\xd0\xe3\xa0\x00\x00\x04send\x00\x01k\x00*\x02@\x14\x00\x00\x00\x00\x00\x00@\x00\x00\x00\x00\x00\x00\x00@r"
    b'\xc0\x00\x00\x00\x00\x00?\xb9\x99\x99\x99\x99\x99\x9a{"a":"b"}{"to":"bob"}'
)
_FRAME: Final = (
    b'[["q","mail"],["p",false],["w","w",1767312000000000],["m","k"],["g","","1","eA=="],["j","0","7","send",12,0,3,'
    b'3600000000,604800000000,0,"k",[5000000,2.0,300000000,0.1],0,{"a":"b"},"queued",1795870208539148,'
    b'1795870208539148,0,0,0,0,null,null,null,null,false,null,null,null,null]]\n{"to":"bob"}'
)

QUEUE_READERS: Final = {
    "payload": Reader(_payload, (b'{"to": ["bob", 1, 2.5, null, true]}',), (ValueError,)),
    "metadata": Reader(_meta, (b'{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}',)),
    "cron": Reader(_cron, (b"*/5 3 1,15 jan-mar *", b"0 0 31 3,5 *", b"@daily", b"0 0 L * 5L"), (UnreadablePattern,)),
    "kept cron": Reader(_kept_cron, (_KEPT_CRON.encode(),), (StorageError,)),
    "bullmq job": Reader(_bullmq_job, (json.dumps(_BULLMQ).encode(),), (NoFields,)),
    "bullmq scheduler": Reader(_bullmq_scheduler, (json.dumps(_SCHEDULER).encode(),), (NoFields,)),
    "bull job": Reader(_bull_job, (json.dumps(_BULL).encode(),), (NoFields,)),
    "redis job": Reader(_redis_job, (_RECORD,)),
    "journal": Reader(_journal, (_FRAME,), (file.BadEntry,)),
    "row": Reader(_row, (b'["ValueError", "no route", "at send", true]', b"[5.0, 2.0, 300.0, 0.1]")),
    "dashboard": Reader(
        _page,
        (
            b"queue?name=mail&state=failed&after=1",
            b"job?queue=mail&id=first",
            b"jobs\nqueue=mail&id=first&action=retry&state=failed",
            b'api/v1/queues/mail/jobs?state=queued&limit=5\n{"ids": ["first"]}',
        ),
        costly=True,
    ),
}
