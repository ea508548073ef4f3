"""What BullMQ's fields hold, and what we read from fields that anybody may have written."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.jobs import DROP, ErrorInfo, NewJob, Retention
from workers.retry import RetryPolicy
from workers.storage.bullmq import codec
from workers.storage.on_redis import node_values

NASTY_IDS = (
    *("0", "7", "0:0", "0:123", "1:2", "meta", "wait", "id", "de", "workers", "workers:seen", "stalled-check"),
    *("~", "~MQ", "~!!", "-", "_x", "a.b", "a b", "a:b", "../x", "a/b", "ü", "🙂", "\0", "line\nbreak", "{tag}", "*"),
    *("x" * 512, "repeat:a:1", "0f8fad5b-d9cb-469f-a165-70867728950e ", "\u0661"),
)


@pytest.mark.parametrize("job_id", NASTY_IDS)
def test_ids_round_trip(job_id: str) -> None:
    """An id that BullMQ would misread is written in letters it takes as they are, and reads as itself."""
    raw = codec.encode_id(job_id)
    assert codec.decode_id(raw) == job_id
    assert raw.startswith("~") or job_id == "x" * 512
    assert not set(raw) - set("~-_ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")


@settings(deadline=None)
@given(st.text(min_size=1))
def test_any_id_round_trips(job_id: str) -> None:
    """No two ids share a key, and none is the name of another key."""
    raw = codec.encode_id(job_id)
    assert codec.decode_id(raw) == job_id
    assert raw not in codec.RESERVED_IDS


@pytest.mark.parametrize(
    "job_id", ["job-1", "A_b", "0f8fad5b-d9cb-469f-a165-70867728950e", "health-check_d4b64e4b29f0e3be_0", "x"]
)
def test_plain_ids_stay_as_they_are(job_id: str) -> None:
    """UUIDs and plain words look in Redis as their producer wrote them."""
    assert codec.encode_id(job_id) == job_id


@pytest.mark.parametrize("raw", ["1", "42", "~job", "~", "~a=b", "~YQ", "a:b:c"])
def test_foreign_ids_read_as_they_are(raw: str) -> None:
    """What this storage would not have written is no encoding of its own."""
    assert codec.decode_id(raw) == raw


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_round_trip(data: bytes) -> None:
    """Payloads and results come back byte for byte, and are JSON text on the wire."""
    stored = node_values.encode_bytes(data)
    json.loads(stored)
    assert node_values.decode_bytes(stored.decode()) == data


@pytest.mark.parametrize("data", [b'{"b": 1,\n "a": "\xc3\xbc"}', b"null", b"3", b'"x"', b"[]", b' {"$base64":"x"}'])
def test_json_is_stored_as_it_is(data: bytes) -> None:
    """A Node worker reads our JSON payloads as the values they are."""
    assert node_values.encode_bytes(data) == data


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"NaN", b'{"a":Infinity}', b"[" * 100_000, b"\xef\xbb\xbf{}", b'{"$base64":"eA=="}', b"{} {}"],
)
def test_other_bytes_are_wrapped(data: bytes) -> None:
    """What is no JSON, and what looks like the wrapper itself, travels in the wrapper."""
    stored = node_values.encode_bytes(data)
    assert set(json.loads(stored)) == {"$base64"}
    assert node_values.decode_bytes(stored.decode()) == data


@pytest.mark.parametrize(
    "policy",
    [
        RetryPolicy(),
        RetryPolicy(initial=timedelta(seconds=5), jitter=0, maximum=node_values.FOREVER),
        RetryPolicy(multiplier=1, jitter=0.5),
        RetryPolicy(multiplier=1.5, jitter=1),
    ],
)
def test_backoff_round_trips(policy: RetryPolicy) -> None:
    """Our policies survive BullMQ's options, whatever BullMQ has no word for."""
    job = NewJob(id="x", name="n", payload=b"", backoff=policy)
    assert codec.decode_options(codec.encode_options(job, "x")).backoff == policy


def test_backoff_as_the_original_wrote_it() -> None:
    """A plain exponential back-off has exactly BullMQ's two members."""
    policy = RetryPolicy(initial=timedelta(seconds=5), jitter=0, maximum=node_values.FOREVER)
    job = NewJob(id="x", name="n", payload=b"", backoff=policy, max_attempts=5)
    assert codec.encode_options(job, "x")["backoff"] == {"type": "exponential", "delay": 5000}


def test_a_jittered_node_backoff_has_the_same_range() -> None:
    """BullMQ shortens delays by up to the jitter; ours spread around the middle of the same range."""
    options = codec.decode_options({"backoff": {"type": "fixed", "delay": 1000, "jitter": 0.5}})
    assert options.backoff is not None
    shortest = options.backoff.delay(1, uniform=lambda low, _: low)
    longest = options.backoff.delay(9, uniform=lambda _, high: high)
    assert shortest / timedelta(milliseconds=1) == pytest.approx(500, abs=1)
    assert longest / timedelta(milliseconds=1) == pytest.approx(1000, abs=1)


@pytest.mark.parametrize(
    ("remove", "keep", "keep_jobs"),
    [
        (True, DROP, {"count": 0}),
        (0, DROP, {"count": 0}),
        (False, node_values.FOREVER, {"count": -1}),
        (None, node_values.FOREVER, {"count": -1}),
        (100, node_values.FOREVER, {"count": 100}),
        ({"age": 60}, timedelta(minutes=1), {"age": 60}),
        ({"age": 60, "count": 5}, timedelta(minutes=1), {"age": 60, "count": 5}),
        ({"count": 0}, DROP, {"count": 0}),
        ("junk", node_values.FOREVER, {"count": -1}),
        ({"age": -1}, node_values.FOREVER, {}),
    ],
)
def test_removal_options(remove: object, keep: Retention, keep_jobs: dict[str, object]) -> None:
    """Each form of `removeOnComplete` is read as BullMQ means it, and handed on as it was."""
    assert codec.retention_of(remove) == keep
    assert codec.keep_limits(remove) == keep_jobs


@pytest.mark.parametrize("attempts", [None, 0, -3, "x", True, 1e300, float("nan"), [], {}])
def test_attempts_without_sense_are_one(attempts: object) -> None:
    """BullMQ's missing or zero attempts mean one run; junk means the same."""
    assert codec.decode_options({"attempts": attempts}).max_attempts == 1


def test_options_that_differ_by_the_jobs_id_are_decoded_once() -> None:
    """One id, in the place of ids, makes no difference; within what a producer says of his own it does."""
    first, second = (codec.read_options(f'{{"attempts":3,"jobId":"{raw}","mine":[1]}}', raw) for raw in ("a", "b"))
    assert first is second
    assert (first.max_attempts, first.written) == (3, {"attempts": 3, "jobId": "", "mine": [1]})
    nested = '{"mine":{"jobId":"a"},"jobId":"a"}'
    assert codec.read_options(nested, "a").written == {"mine": {"jobId": "a"}, "jobId": "a"}
    assert codec.read_options(None, "a").written == codec.read_options("junk", "a").written == {}
    long = json.dumps({"jobId": "a", "mine": "x" * 2_000})
    assert codec.read_options(long, "a").written == json.loads(long)


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["fixed", "exponential"])
)
MEMBERS = st.sampled_from(["type", "delay", "jitter", "multiplier", "maximum", "age", "count", "limit"])
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(MEMBERS, inner), max_leaves=4)


@settings(deadline=None)  # the first example pays for building the strategy
@given(st.dictionaries(st.sampled_from(["attempts", "backoff", "removeOnComplete", "removeOnFail"]), JSON))
def test_any_options_can_be_read(options: dict[str, object]) -> None:
    """Options of a broken producer never raise, and leave at least one attempt."""
    read = codec.decode_options(options)
    assert read.max_attempts >= 1
    assert read.backoff is None or read.backoff.delay(99) >= timedelta(0)
    assert isinstance(read.remove_on_complete, dict)


def test_errors_round_trip() -> None:
    """Type, message, stack and exhaustion survive BullMQ's two fields and ours."""
    error = ErrorInfo(type="ValueError", message="no", stack="a\nb", exhausted=True)
    fields = node_values.error_fields(error)
    read = node_values.decode_error(
        "no", str(fields["stacktrace"]), str(fields[node_values.ERROR_FIELD]), exhausted=False
    )
    assert read == error


def test_a_node_failure_after_ours_is_not_mixed_up() -> None:
    """Our field is ignored once a Node worker has written another reason."""
    ours = node_values.error_fields(ErrorInfo(type="ValueError", message="no", exhausted=True))
    stack = json.dumps(["old", "TypeError: later\n    at x.js:1"])
    read = node_values.decode_error("later", stack, str(ours[node_values.ERROR_FIELD]), exhausted=False)
    assert read == ErrorInfo(type="TypeError", message="later", stack="TypeError: later\n    at x.js:1")


@pytest.mark.parametrize(("stack", "known"), [("{", "{"), ("[1]", "[]"), ("{}", "null"), ("", ""), (None, None)])
def test_a_broken_failure_still_reads(stack: str | None, known: str | None) -> None:
    """A reason alone is an error."""
    read = node_values.decode_error("why", stack, known, exhausted=False)
    assert read is not None
    assert (read.type, read.message) == ("Error", "why")
