"""What the engine learns of one attempt, beside what its wire sees."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

from federation.base.queues.job_data import FederationDeliveryJob
from federation.delivery.error_codes import FailureClass
from federation.delivery.errors import PermanentFailure, RetryableFailure
from federation.delivery.ledger.entries import Series
from federation.delivery.wire import Sending, Trace, Wire, code_of
from federation.servers.link_rules import Link


@dataclass(slots=True)
class Report:
    """What the engine has learned of one attempt so far.

    `started_at` and `started` say when it began, by the wall clock and by the loop's clock; `attempt` is its number in
    its job. `link` is what was known of the server when `checked`, by the loop's clock. `begun`: the attempt may go on,
    and belongs to `series` if there is a row; then `payload` is its text. `first_byte`: how long the server may take to
    begin its answer. `seen` is the wire's.
    """

    delivery: FederationDeliveryJob
    wire: Wire
    started_at: datetime
    started: float
    attempt: int = 1
    payload: str = field(default="", repr=False)
    link: Link | None = None
    checked: float = 0.0
    begun: bool = False
    series: Series | None = None
    first_byte: timedelta | None = None
    seen: Trace = field(default_factory=Trace)

    @property
    def is_repeat(self) -> bool:
        """Whether an attempt at the delivery was made before, so that the server may have the activity."""
        return self.attempt > 1 or (self.series is not None and self.series.attempts > 1)

    def sending(self, job_name: str, refuse_blacklisted: Callable[[FederationDeliveryJob], Awaitable[None]]) -> Sending:
        """Return what the wire is to send now."""
        delivery = self.delivery
        assert self.link is not None  # it was looked at before the attempt began
        return Sending(
            job_name=job_name,
            delivery_id=delivery.delivery_job_id,
            server_url=delivery.server_url,
            target_url=delivery.target_url,
            payload=self.payload,
            started_at=self.started_at,
            link=self.link,
            is_repeat=self.is_repeat,
            first_byte=self.first_byte,
            seen=self.seen,
            refuse_blacklisted=partial(refuse_blacklisted, delivery),
        )

    def class_of(self, failure: PermanentFailure | RetryableFailure) -> FailureClass:
        """Return the class that the failure names, or that its code has."""
        if failure.failure_class is not None:
            return failure.failure_class
        told = code_of(self.wire, failure.code)
        return FailureClass.OURS if told is None else told.failure_class
