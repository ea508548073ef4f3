"""One job with all that its queue keeps of it: what dead letters are read, exported and sent elsewhere by."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Final

from workers.errors import ErrorInfo, JobFailedError, WorkersError
from workers.jobs import FailedAttempt, JobRecord, JobStatus
from workers.serde import Encoded, Serde
from workers.specs import JobSpec
from workers.storage.base import Storage

READ_AT_ONCE: Final = 20
"""How many jobs are read with their payloads at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetails:
    """A job as `Queue.get_job` returns it.

    `encoded_payload` and `encoded_result` are the bytes that the storage keeps, None where it keeps none: the payload
    of a completed job may be gone. See `JobRecord` for `failures`. `meta` is what the enqueue gave.
    """

    status: JobStatus
    failures: tuple[FailedAttempt, ...] = ()
    meta: Mapping[str, str] = field(default_factory=dict, repr=False)
    encoded_payload: bytes | None = field(default=None, repr=False)
    encoded_result: bytes | None = field(default=None, repr=False)
    payload_serde: Serde = field(repr=False)
    result_serde: Serde = field(repr=False)

    @property
    def id(self) -> str:
        return self.status.id

    @property
    def payload(self) -> object:
        """The decoded payload, None if it is gone.

        Raises:
            ValueError: the queue's serde cannot decode it; there is `encoded_payload`.
        """
        return None if self.encoded_payload is None else self.payload_serde.loads(self.encoded_payload)

    @property
    def result(self) -> object:
        """The decoded result, None if there is none.

        Raises:
            ValueError: the queue's serde cannot decode it; there is `encoded_result`.
        """
        return None if self.encoded_result is None else self.result_serde.loads(self.encoded_result)

    @property
    def error(self) -> ErrorInfo | None:
        """The last failure, with its traceback."""
        return self.status.last_error

    def spec(self) -> JobSpec:
        """Return what enqueues the job anew, here or elsewhere: same id, name, payload, attempts, priority, metadata.

        The payload's bytes are taken as they are. Everything else is as the queue it is enqueued in has it.

        Raises:
            ValueError: the payload is gone.
        """
        if self.encoded_payload is None:
            raise ValueError(f"the payload of job {self.id!r} is gone; only a job that has not completed keeps it")
        status = self.status
        return JobSpec(
            payload=Encoded(self.encoded_payload),
            id=status.id,
            name=status.name,
            max_attempts=status.max_attempts,
            priority=status.priority,
            meta=self.meta,
        )

    def as_json(self) -> str:
        """Return one line of JSON: a payload that is no JSON is `payload_base64`."""
        status = self.status
        return json.dumps(
            {
                "id": status.id,
                "name": status.name,
                "state": status.state.value,
                "attempt": status.attempt,
                "max_attempts": status.max_attempts,
                "priority": status.priority,
                "meta": dict(self.meta),
                "created_at": status.created_at.isoformat(),
                "finished_at": None if status.finished_at is None else status.finished_at.isoformat(),
                **_shown("payload", self.encoded_payload),
                **_shown("result", self.encoded_result),
                "error": None if self.error is None else asdict(self.error),
                "failures": [asdict(one) for one in self.failures],
            },
            default=_as_text,
        )


def _shown(name: str, data: bytes | None) -> dict[str, object]:
    if data is None:
        return {name: None}
    try:
        return {name: json.loads(data.decode())}
    except (ValueError, RecursionError):
        return {f"{name}_base64": base64.b64encode(data).decode()}


def _as_text(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not JSON")


@dataclass(frozen=True, slots=True)
class JobReader:
    """Reads jobs of one storage with the serdes of its queue."""

    storage: Storage
    payload_serde: Serde
    result_serde: Serde

    def details(self, record: JobRecord) -> JobDetails:
        """Return the record as applications see it."""
        return JobDetails(
            status=record.status,
            failures=record.failures,
            meta=record.meta,
            encoded_payload=record.payload,
            encoded_result=record.result,
            payload_serde=self.payload_serde,
            result_serde=self.result_serde,
        )

    async def read(self, job_id: str) -> JobDetails | None:
        """Return the job, None if it is unknown."""
        [record] = await self.storage.read([job_id])
        return None if record is None else self.details(record)

    async def read_all(self, ids: Sequence[str]) -> AsyncIterator[JobDetails]:
        """Yield the jobs that are known, a few payloads at a time."""
        for start in range(0, len(ids), READ_AT_ONCE):
            for record in await self.storage.read(ids[start : start + READ_AT_ONCE]):
                if record is not None:
                    yield self.details(record)

    @asynccontextmanager
    async def explaining(self, job_id: str | None = None, payload: bytes | None = None) -> AsyncIterator[None]:
        """Give a `JobFailedError` that the block raises the payload of its job: `payload` if it is that of `job_id`."""
        try:
            yield
        except JobFailedError as error:
            with suppress(WorkersError, ValueError):  # the error is what the caller has to learn
                if error.job_id == job_id and payload is not None:
                    error.payload = self.payload_serde.loads(payload)
                else:
                    found = await self.read(error.job_id)
                    error.payload = None if found is None else found.payload
            raise
