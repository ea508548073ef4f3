"""Metadata of jobs: what is refused before anything is written, what handlers and operators read, and junk."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from workers.chains import Continuation, continue_with
from workers.jobs import JobState, NewJob
from workers.metadata import (
    MAX_META,
    MAX_META_BYTES,
    MAX_META_NAME_BYTES,
    MAX_META_VALUE_BYTES,
    TRACEPARENT,
    TRACESTATE,
    decode_meta,
    encode_meta,
    read_meta,
)
from workers.queue import Queue
from workers.specs import JobSpec
from workers.storage.bullmq.codec import decode_options, encode_options
from workers.storage.memory import MemoryStorage
from workers.sync import SyncQueue
from workers.worker.handlers import Job

TRACE = {TRACEPARENT: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", TRACESTATE: "a=1"}
LARGEST = (
    {str(number): "" for number in range(MAX_META)},
    {"n" * MAX_META_NAME_BYTES: "v" * MAX_META_VALUE_BYTES},
    {str(number): "v" * (MAX_META_BYTES // 4 - 1) for number in range(4)},
    {**{str(number): "" for number in range(MAX_META)}, **TRACE},
)
TOO_MUCH = (
    ({str(number): "" for number in range(MAX_META + 1)}, "at most 16 names, not 17"),
    ({"n" * (MAX_META_NAME_BYTES + 1): ""}, "1 to 64 bytes long, not 65"),
    ({"": "no name"}, "1 to 64 bytes long, not 0"),
    ({"name": "ü" * 257}, "at most 512 bytes long, not 514"),
    ({str(number): "v" * 511 for number in range(5)}, "at most 2048 bytes of names and values, not 2560"),
    ({"name": "\ud800"}, "cannot be encoded as UTF-8"),
    ({TRACEPARENT: "0" * 513}, "at most 512 bytes long, not 513"),
)
NO_META = ([("name", "value")], {"name": 1}, {1: "value"}, {"name": None}, "text", 5)
JUNK = ("", "{", "[]", "5", '{"a":1}', '{"a":"' + "x" * 513 + '"}', "[" * 5000, '{"a":"\\ud800"}')


@pytest.mark.parametrize("meta", LARGEST)
async def test_so_much_is_taken(meta: dict[str, str]) -> None:
    """Up to the bounds; a trace context counts beside them."""
    queue = Queue(MemoryStorage())
    await queue.enqueue(1, id="job", meta=meta)
    found = await queue.get_job("job")
    assert found is not None
    assert found.meta == meta
    assert found.spec().meta == meta


@pytest.mark.parametrize(("meta", "said"), TOO_MUCH)
async def test_more_is_refused_before_anything_is_written(meta: dict[str, str], said: str) -> None:
    """A `ValueError` that says which bound, also in the middle of many jobs, of which none is stored."""
    queue = Queue(MemoryStorage())
    with pytest.raises(ValueError, match=said):
        await queue.enqueue_many([JobSpec(payload=1), JobSpec(payload=2, meta=meta)])
    with SyncQueue(MemoryStorage()) as plain, pytest.raises(ValueError, match=said):
        plain.enqueue(1, meta=meta)
    assert sum((await queue.counts()).values()) == 0


@pytest.mark.parametrize("meta", NO_META, ids=repr)
async def test_what_is_no_mapping_of_texts_is_refused(meta: object) -> None:
    """As every argument of another kind."""
    queue = Queue(MemoryStorage())
    with pytest.raises(TypeError, match="meta"):
        await queue.enqueue(1, meta=meta)  # type: ignore[arg-type]  # what a program without a checker may pass


async def test_a_handler_reads_it_and_later_changes_do_not_count() -> None:
    """What was given at the enqueue, in each attempt and each link of the chain; a job without has none."""
    read = []

    async def handle(job: Job) -> Continuation | None:
        read.append((job.name, dict(job.meta)))
        return continue_with("second", 2) if job.name == "first" else None

    queue = Queue(MemoryStorage())
    queue.execute(handle)
    given = {"tenant": "ann"}
    async with queue:
        await queue.enqueue(1, name="first", id="job", delay=timedelta(milliseconds=20), meta=given)
        given["tenant"] = "bob"
        await queue.wait_for_job_chain_completion("job")
        await queue.enqueue_and_wait(1, name="other")
    assert read == [("first", {"tenant": "ann"}), ("second", {"tenant": "ann"}), ("other", {})]


async def test_a_chain_that_goes_on_from_outside_keeps_it() -> None:
    """The link that somebody else adds is one of the same chain."""
    queue = Queue(MemoryStorage())
    await queue.start_job_chain("first", 1, id="chain", meta={"tenant": "ann"})
    await queue.complete_job_chain("chain", continue_with("second", 2))
    found = await queue.get_job("chain")
    assert found is not None
    assert (found.status.name, found.status.state, found.meta) == ("second", JobState.QUEUED, {"tenant": "ann"})


@pytest.mark.parametrize("text", JUNK, ids=repr)
def test_what_somebody_spoilt_reads_as_none(text: str) -> None:
    """A record with it is still a job that runs."""
    assert decode_meta(text) == {}


def test_it_is_written_as_ascii() -> None:
    """What PostgreSQL's text cannot hold is escaped."""
    meta = {"ü": "\x00"}
    assert encode_meta(meta) == '{"\\u00fc":"\\u0000"}'
    assert decode_meta(encode_meta(meta)) == meta
    assert read_meta({**TRACE, "baggage": "x" * 9_999}, (TRACEPARENT, "missing")) == {TRACEPARENT: TRACE[TRACEPARENT]}


def test_on_bullmq_the_trace_is_where_node_has_it() -> None:
    """In `tm`, as JSON; the rest is an option that Node does not know."""
    options = encode_options(NewJob(id="a", name="n", payload=b"1", meta={"of": "ann", **TRACE}), "a")
    assert json.loads(str(options["tm"])) == TRACE
    assert options["workersMeta"] == {"of": "ann"}
    assert decode_options(options).meta == {"of": "ann", **TRACE}
    assert not {"tm", "workersMeta"} & encode_options(NewJob(id="a", name="n", payload=b"1"), "a").keys()


@pytest.mark.parametrize("told", [None, 5, [], {"traceparent": "x"}, "{", '"text"', '{"traceparent":5}', "[" * 9_999])
def test_telemetry_that_is_none_is_ignored(told: object) -> None:
    """Any program may have written it; the job's other metadata is read all the same."""
    assert decode_options({"tm": told, "workersMeta": {"of": "ann"}}).meta == {"of": "ann"}
    assert decode_options({"tm": json.dumps({**TRACE, "baggage": "x" * 9_999}), "workersMeta": "junk"}).meta == TRACE
    long = {**TRACE, "tracestate": "x" * 513}
    assert decode_options({"tm": json.dumps(long)}).meta == {"traceparent": TRACE["traceparent"]}
