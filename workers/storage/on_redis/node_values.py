"""Ids, payloads, errors and numbers as the queues of Node keep them, and back; pure.

Any producer may have written what is read here: junk never raises, it reads as if it were not there.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from workers.checks import MAX_DELAY
from workers.jobs import MESSAGE_CHARACTERS, STACK_CHARACTERS, ErrorInfo
from workers.storage.rules import bounded

ERROR_FIELD: Final = "workers:error"
"""Holds what `failedReason` cannot say: the error's type, and whether the attempts were used up."""

DELAY_SCALE: Final = 0x1000
"""Scores of the delayed set are milliseconds times this; the low bits give the order within one millisecond."""

STACKS_CHARACTERS: Final = 1 << 16
"""How much of the stacks of earlier failures a job keeps; Node keeps all, which costs more with each attempt."""

FOREVER: Final = MAX_DELAY
MAX_NUMBER: Final = 2**53
"""The largest number up to which JavaScript and Lua count exactly."""

_PLAIN_ID: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]*\Z", re.ASCII)
_UUID: Final = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\Z", re.ASCII)
_WRAPPED: Final = b'{"$base64":"'
NOTHING: Final = b"null"
"""What most handlers return."""
_STACK_HEAD: Final = re.compile(r"[A-Za-z_][\w.]*(?=:|\Z)", re.ASCII)


def encode_id(job_id: str, reserved: Collection[str]) -> str:
    """Return the id in Redis.

    A UUID is unchanged, and so is a plain word that is not `reserved`; any other id is `~` and its base64url.
    """
    if _UUID.match(job_id) or (_PLAIN_ID.match(job_id) and job_id not in reserved):
        return job_id
    return "~" + base64.urlsafe_b64encode(job_id.encode(errors="surrogateescape")).decode().rstrip("=")


def decode_id(raw: str, reserved: Collection[str]) -> str:
    """Return the id that a job in Redis goes by; one that `encode_id` did not make reads as it is."""
    if not raw.startswith("~"):
        return raw
    try:
        job_id = base64.urlsafe_b64decode(raw[1:] + "=" * (-len(raw[1:]) % 4)).decode()
    except (binascii.Error, ValueError):
        return raw
    return job_id if job_id and encode_id(job_id, reserved) == raw else raw


def encode_bytes(data: bytes) -> bytes:
    """Return JSON text for `data`: `data` itself, byte for byte, if it is JSON, else `{"$base64":"..."}`."""
    if data.startswith(_WRAPPED) or not _is_json(data):
        return _WRAPPED + base64.b64encode(data) + b'"}'
    return data


def decode_bytes(text: str) -> bytes:
    """Return the bytes that `encode_bytes` took, or the JSON text of another producer."""
    data = text.encode(errors="surrogateescape")
    if data.startswith(_WRAPPED) and data.endswith(b'"}'):
        try:
            return base64.b64decode(data[len(_WRAPPED) : -2], validate=True)
        except binascii.Error:
            pass
    return data


def _is_json(data: bytes) -> bool:
    if data == NOTHING:
        return True
    try:
        _decode(data.decode())
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_decode: Final = json.JSONDecoder(parse_constant=_refuse).decode  # `json.loads` would make one for each call


def error_fields(error: ErrorInfo, earlier: str | None = None, kept: int | None = None) -> dict[str, object]:
    """Return the hash fields that go with a failure, beside `failedReason`.

    `earlier` are the stacks of failures before it, as the record has them. Of all of them the last `kept` stay, None
    for as many as fit 64 KiB.
    """
    stacks = [one for one in _json_list(earlier) if isinstance(one, str)]
    if error.stack:
        stacks.append(error.stack)
    stacks = stacks if kept is None else stacks[len(stacks) - min(kept, len(stacks)) :]
    while len(stacks) > 1 and sum(map(len, stacks)) > STACKS_CHARACTERS:
        del stacks[0]
    return {"stacktrace": json.dumps(stacks), ERROR_FIELD: error_facts(error, bare=not error.stack)}


def cancelled_error(job_id: str) -> ErrorInfo:
    """Return why a cancelled job has failed, as Node reads it."""
    return ErrorInfo(type="JobCancelledError", message=f"job {job_id!r} was cancelled")


def error_facts(error: ErrorInfo, *, bare: bool = False) -> str:
    """Return the value of `ERROR_FIELD`; `bare`: the last stack in the record is that of an earlier failure."""
    known = {"type": error.type, "exhausted": error.exhausted, "of": _checksum(error.message)}
    if bare:
        known["bare"] = True
    return json.dumps(known, separators=(",", ":"))


def decode_error(reason: str | None, stacktrace: str | None, known: str | None, *, exhausted: bool) -> ErrorInfo | None:
    """Return the last failure.

    `known` counts only if it belongs to this `reason`, because a Node worker may have failed the job since.
    """
    if reason is None:
        return None
    stack = last_text(stacktrace)
    facts = json_object(known)
    head = _STACK_HEAD.match(stack)
    kind = head.group() if head else "Error"
    if facts.get("of") == _checksum(reason):
        kind, exhausted = str(facts.get("type")), facts.get("exhausted") is True
        stack = "" if facts.get("bare") is True else stack
    return ErrorInfo(
        type=kind, message=reason[:MESSAGE_CHARACTERS], stack=stack[-STACK_CHARACTERS:], exhausted=exhausted
    )


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode(errors="surrogateescape"))


def last_text(stacktrace: str | None) -> str:
    """Return the last stack of a JSON list of them, empty if there is none."""
    stacks = _json_list(stacktrace)
    return str(stacks[-1] or "") if stacks else ""


def _json_list(text: str | None) -> list[object]:
    try:
        value = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else []


def json_object(text: str | None) -> Mapping[str, object]:
    """Return the JSON object in `text`, empty if there is none."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


_SURELY_COUNTS: Final = 15
"""Numbers of no more digits are below `MAX_NUMBER`."""


def number(value: object) -> float | None:
    """Return a number from 0 to 2^53, given as a number or as text; else None."""
    if value is None:  # mostly, and each job asks for some ten
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        parsed = float(value)
    except (ValueError, OverflowError):
        return None
    if not 0 <= parsed <= MAX_NUMBER:
        return None
    return int(parsed) if parsed.is_integer() else parsed


def whole(value: object) -> int:
    """Return a counter as the scripts keep it, 0 when missing."""
    if value is None:
        return 0
    if isinstance(value, str) and len(value) <= _SURELY_COUNTS and value.isdecimal():
        return int(value)
    return int(number(value) or 0)


def to_ms(duration: timedelta) -> int:
    """Return the bounded duration in milliseconds."""
    return round(bounded(duration) / timedelta(milliseconds=1))


def from_ms(milliseconds: float) -> timedelta:
    return timedelta(milliseconds=min(milliseconds, FOREVER / timedelta(milliseconds=1)))


def moment(milliseconds: float) -> datetime:
    """Return the time of a timestamp of BullMQ; one that is out of range reads as the start of 1970."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, UTC)


def due_ms(score: object) -> int | None:
    """Return when the member of the delayed set with this score is due; None for no score.

    A score is a number, or its text.
    """
    # Not `number`: by the scale, dates after 2039 exceed what counts exactly. A date need not be exact.
    if not isinstance(score, str | int | float):
        return None
    try:
        return int(float(score) // DELAY_SCALE)
    except (ValueError, OverflowError):
        return None
