"""What our processes report to Prometheus; the only module that needs the extra `metrics`.

No label is ever a server's: labels come from sets that are part of the program, so the number of series is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from db import AttemptOutcome, RunOutcome
from federation.http.threat_policy import NetworkErrorCode
from federation.monitoring.numbers import DatabaseNumbers, age
from workers import JobState
from workers.worker.events import WorkerEvent, WorkerEventKind

ATTEMPT_CODES: Final = frozenset(
    {
        *(code.value for code in NetworkErrorCode),
        *("BLACKLISTED", "BLOCKED_URL", "BODY_TOO_LARGE", "DATABASE", "DISCOVERY", "DISCOVERY_REFUSED"),
        *("FOREIGN_ANSWER", "INBOX_GONE", "INTERNAL", "INVALID_ACK"),
        *("INVALID_ACK_SIGNATURE", "INVALID_JOB", "INVALID_PAYLOAD", "KEY_MATERIAL", "NO_ACK"),
        *("NO_OWN_KEYS", "NO_OWN_URL", "NO_PUBLIC_KEY", "NO_RECEIVER", "PARKED", "STALLED"),
        *("OWN_ACTOR_UNREACHABLE", "PLAIN_HTTP"),
    }
)
OWN_FAULTS: Final = {
    "DATABASE": AttemptOutcome.RETRYABLE,
    "INTERNAL": AttemptOutcome.RETRYABLE,
    "NO_OWN_KEYS": AttemptOutcome.PERMANENT,
    "NO_OWN_URL": AttemptOutcome.PERMANENT,
    "OWN_ACTOR_UNREACHABLE": AttemptOutcome.RETRYABLE,
    "PLAIN_HTTP": AttemptOutcome.PERMANENT,
}
"""Codes of attempts that fail on this side, with their outcome. An operator is woken for these."""
ENDPOINTS: Final = frozenset(
    {
        "/discover",
        "/discover/rotate/init",
        "/discover/rotate/confirm",
        "/api/auth/social/follows",
        "/api/auth/social/posts",
        "/proxy",
        "/inbox",  # and all others of actors
    }
)
ACTIVITY_TYPES: Final = frozenset(
    {
        *("Accept", "Add", "Announce", "Block", "Create", "Delete", "Dislike", "Flag", "Follow", "Like", "Move"),
        *("Reject", "Remove", "Undo", "Update"),
    }
)
SIGNATURES: Final = frozenset({"cavage", "rfc9421"})
OTHER: Final = "other"

_HTTP_CODE: Final = re.compile(r"HTTP_([1-5])[0-9]{2}")


def code_label(code: str | None) -> str:
    """Return one of about thirty labels: the code, `HTTP_4xx` for all of a class, `other` for unknown ones, `none`."""
    if code is None:
        return "none"
    if match := _HTTP_CODE.fullmatch(code):
        return f"HTTP_{match[1]}xx"
    return code if code in ATTEMPT_CODES else OTHER


def endpoint_label(path: str) -> str:
    """Return the path if it is an endpoint's, otherwise `other`."""
    return path if path in ENDPOINTS else OTHER


def status_label(status: int) -> str:
    """Return the class of an HTTP status, such as `4xx`."""
    return f"{status // 100}xx" if 100 <= status <= 599 else OTHER


# From a quick acknowledgment to the delivery deadline.
SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30)

_ENDS: Final = frozenset(
    {
        WorkerEventKind.COMPLETED,
        WorkerEventKind.CONTINUED,
        WorkerEventKind.FAILING,
        WorkerEventKind.SNOOZED,
        WorkerEventKind.FAILED,
        WorkerEventKind.CANCELLED,
        WorkerEventKind.RELEASED,
        WorkerEventKind.SUSPENDED,
        WorkerEventKind.LEASE_LOST,
    }
)


class ProcessMetrics:
    """The `Metrics` of a process, and an observer of its workers; gauges keep the last values they were given."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._of_workers()
        self._of_deliveries()
        self._of_recurring_jobs()
        self._of_the_database()
        self._inbound = self._counter(
            "federation_inbound_requests",
            "Requests to the inbound side by endpoint and class of status.",
            "endpoint",
            "status",
        )
        self._refreshed = self._gauge(
            "federation_refreshed_timestamp_seconds",
            "When the gauges read from a queue, or from the database, were last right.",
            "source",
        )
        self._of_received()
        self._under_way: dict[str, set[tuple[str, str]]] = {}

    def _counter(self, name: str, tells: str, *labels: str) -> Counter:
        return Counter(name, tells, labels, registry=self.registry)

    def _gauge(self, name: str, tells: str, *labels: str) -> Gauge:
        return Gauge(name, tells, labels, registry=self.registry)

    def _of_workers(self) -> None:
        self._events = self._counter("federation_worker_events", "Events of workers by kind.", "queue", "kind")
        self._seconds = Histogram(
            "federation_attempt_seconds",
            "How long attempts took.",
            ["queue", "outcome"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._in_flight = self._gauge("federation_attempts_in_flight", "Attempts under way in this process.", "queue")
        self._jobs = self._gauge("federation_jobs", "Jobs by state.", "queue", "state")
        self._oldest = self._gauge(
            "federation_oldest_ready_seconds",
            "At least how long ago the oldest job that could run was enqueued or became due.",
            "queue",
        )

    def _of_deliveries(self) -> None:
        self._deliveries = self._counter(
            "federation_delivery_attempts",
            "Attempts at deliveries by outcome, code and route.",
            "outcome",
            "code",
            "route",
        )
        # They exist from the start, at 0: if a series begins with its first increment, `increase` does not see that.
        for code, outcome in OWN_FAULTS.items():
            self._deliveries.labels(outcome.value, code, "direct")
        self._knocks = self._counter(
            "federation_second_knocks",
            "Attempts that knocked with both kinds of signature, by the one that counted.",
            "signature",
        )
        self._signing = self._counter("federation_signature_seconds", "Seconds spent on signing requests.")
        self._relays = self._counter(
            "federation_relays", "How often peers were asked to relay, by whether one did.", "outcome"
        )
        self._refusals = self._counter("federation_relay_refusals", "Peers that did not relay, by code.", "code")
        self._released = self._counter(
            "federation_deliveries_released", "Held deliveries that this process had sent again."
        )
        self._failed = self._counter(
            "federation_deliveries_failed",
            "Deliveries that this process gave up because they failed, but for those that the blacklist forbids.",
        )
        self._expired = self._counter(
            "federation_deliveries_expired",
            "Deliveries that this process gave up because they were held until too old.",
        )
        self._strangers = self._counter(
            "federation_jobs_of_other_nodes",
            "Jobs of another node or database that were in the delivery queue, and went back.",
        )

    def _of_received(self) -> None:
        self._received = self._counter(
            "federation_activities_received", "Activities by ActivityPub that were taken, by type.", "type", "outcome"
        )
        self._not_taken = self._counter(
            "federation_activities_refused", "Activities by ActivityPub that were not taken, by why.", "reason"
        )
        self._handled = self._counter(
            "federation_activities_handled", "How often activities were handled, by what came of it.", "outcome"
        )
        self._activities_waiting = self._gauge(
            "federation_activities_waiting", "Activities that were received and not yet handled, 20 000 at most."
        )
        self._activities_failed = self._gauge(
            "federation_activities_failed", "Activities that were received and could not be handled, 20 000 at most."
        )
        self._oldest_activity = self._gauge(
            "federation_oldest_activity_waiting_seconds", "Age of the oldest activity that waits to be handled."
        )

    def _of_recurring_jobs(self) -> None:
        self._scheduled = self._counter(
            "federation_scheduler_runs", "Runs of recurring jobs by this process.", "task", "outcome"
        )
        self._last_success = self._gauge(
            "federation_scheduler_last_success_timestamp_seconds",
            "When a recurring job last succeeded, in whichever process, as far as this one knows.",
            "task",
        )

    def _of_the_database(self) -> None:
        self._servers = self._gauge("federation_servers", "Registered servers by state.", "state")
        self._rules = self._gauge("federation_blacklist_rules", "Rules of the blacklist in force.")
        self._inboxes_gone = self._gauge("federation_inboxes_gone", "Inboxes of other servers that are no more.")
        self._links = self._gauge("federation_links", "Servers by the state of their link.", "state")
        self._owed = self._gauge(
            "federation_deliveries_owed",
            "Deliveries of ours that are not over, 20 000 ready and 20 000 held ones at most.",
        )
        self._held = self._gauge(
            "federation_deliveries_held",
            "Deliveries that wait without a job by what they wait for, of the 20 000 oldest.",
            "reason",
        )
        self._oldest_owed = self._gauge(
            "federation_oldest_owed_seconds",
            "Age of the oldest delivery that is not over by its state; of a released one since its release.",
            "state",
        )
        self._oldest_sendable = self._gauge(
            "federation_oldest_owed_while_up_seconds",
            "Age of the oldest delivery that is not over to a server whose link is up.",
        )
        self._jobless = self._gauge(
            "federation_deliveries_without_job",
            "Deliveries owed for a while and not known to have a job, among the 20 000 oldest.",
        )

    def __call__(self, event: WorkerEvent) -> None:
        self._events.labels(event.queue, event.kind.value).inc()
        if event.duration is not None:
            self._seconds.labels(event.queue, event.kind.value).observe(event.duration.total_seconds())
        if event.claim is not None:
            self._note_flight(event, event.claim.job_id)

    def attempt(self, outcome: AttemptOutcome, code: str | None, *, relayed: bool) -> None:
        route = "relayed" if relayed else "direct"
        self._deliveries.labels(outcome.value, code_label(code), route).inc()

    def failed(self) -> None:
        self._failed.inc()

    def second_knock(self, signature: str | None) -> None:
        kind = "none" if signature is None else signature if signature in SIGNATURES else OTHER
        self._knocks.labels(kind).inc()

    def signed(self, seconds: float) -> None:
        self._signing.inc(seconds)

    def relay(self, *, helped: bool) -> None:
        self._relays.labels("relayed" if helped else "failed").inc()

    def relay_refused(self, code: str) -> None:
        self._refusals.labels(code_label(code)).inc()

    def released(self, number: int) -> None:
        self._released.inc(number)

    def stranger(self) -> None:
        self._strangers.inc()

    def expired(self, number: int) -> None:
        self._expired.inc(number)

    def scheduled(self, job: str, outcome: RunOutcome) -> None:
        self._scheduled.labels(job, outcome.value).inc()

    def inbound(self, path: str, status: int) -> None:
        self._inbound.labels(endpoint_label(path), status_label(status)).inc()

    def activity_received(self, type: str, outcome: str) -> None:  # noqa: A002 - as the column
        self._received.labels(type if type in ACTIVITY_TYPES else OTHER, outcome).inc()

    def activity_refused(self, why: str) -> None:
        self._not_taken.labels(why).inc()

    def activity_handled(self, outcome: str) -> None:
        self._handled.labels(outcome).inc()

    def set_queue(self, queue: str, counts: Mapping[JobState, int], *, oldest_seconds: float, at: datetime) -> None:
        """Set the gauges of a queue."""
        for state, number in counts.items():
            self._jobs.labels(queue, state.value).set(number)
        self._oldest.labels(queue).set(oldest_seconds)
        self._refreshed.labels(queue).set(at.timestamp())

    def set_database(self, numbers: DatabaseNumbers, *, at: datetime) -> None:
        """Set the gauges of what the database knows."""
        self._servers.labels("healthy").set(numbers.healthy)
        self._servers.labels("unhealthy").set(numbers.unhealthy)
        self._rules.set(numbers.blacklist_rules)
        self._inboxes_gone.set(numbers.inboxes_gone)
        self._activities_waiting.set(numbers.received.waiting)
        self._activities_failed.set(numbers.received.failed)
        self._oldest_activity.set(age(numbers.received.oldest, at))
        self._owed.set(numbers.owed)
        for state, number in numbers.links.items():
            self._links.labels(state).set(number)
        for reason, number in numbers.held.items():
            self._held.labels(reason.value).set(number)
        self._oldest_owed.labels("ready").set(age(numbers.oldest_ready, at))
        self._oldest_owed.labels("held").set(age(numbers.oldest_held, at))
        self._oldest_sendable.set(age(numbers.oldest_while_up, at))
        self._jobless.set(numbers.without_job)
        for job, succeeded_at in numbers.successes.items():
            self._last_success.labels(job).set(succeeded_at.timestamp())
        self._refreshed.labels("database").set(at.timestamp())

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _note_flight(self, event: WorkerEvent, job_id: str) -> None:
        # A set, not a number: a lost lease may be reported twice, or before the attempt's end.
        under_way = self._under_way.setdefault(event.queue, set())
        if event.kind is WorkerEventKind.ACTIVE:
            under_way.add((event.worker_id, job_id))
        elif event.kind in _ENDS:
            under_way.discard((event.worker_id, job_id))
        self._in_flight.labels(event.queue).set(len(under_way))
