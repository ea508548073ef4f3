"""How a delivery attempt can fail, and what that means for its job and its row."""

from __future__ import annotations

from datetime import timedelta

from db import HoldReason
from federation.delivery.error_codes import FailureClass
from workers import Retry, Snooze, UnrecoverableError
from workers.jobs import DROP


class PermanentFailure(UnrecoverableError):
    """The job ends now. `code` names the reason in the attempt log, `method` what was to be delivered.

    The code's class decides what becomes of the row: an `INVALID` failure leaves none. `failure_class` is given where
    the code alone does not decide it.
    """

    def __init__(self, code: str, message: str, *, failure_class: FailureClass | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.failure_class = failure_class
        self.method: str | None = None  # set by the attempt that ends with it


class RetryableFailure(Retry):
    """The attempt failed and may succeed later. `at_least` is how long the server asked to be left alone.

    `failure_class` is given where the code alone does not decide it. `moved_to` is the origin that the server's
    redirect named. `tried_later`: once its attempts are used up, the delivery waits by itself and is tried again some
    times, at growing intervals, before the refusal counts.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        failure_class: FailureClass | None = None,
        at_least: timedelta | None = None,
        moved_to: str | None = None,
        tried_later: bool = False,
    ) -> None:
        super().__init__(message, at_least=at_least)
        self.code = code
        self.tried_later = tried_later
        self.moved_to = moved_to
        self.failure_class = failure_class
        self.method: str | None = None  # set by the attempt that ends with it


class Held(UnrecoverableError):
    """The delivery waits in its row, without a job: this job ends and leaves nothing behind."""

    def __init__(self, delivery_id: str, reason: HoldReason) -> None:
        super().__init__(f"delivery {delivery_id} is held: {reason.value}", keep=DROP)


class Superseded(UnrecoverableError):
    """Another job acts for the delivery, or none may: this job ends and leaves nothing behind."""

    def __init__(self, delivery_id: str) -> None:
        super().__init__(f"delivery {delivery_id} is not this job's to send", keep=DROP)


class NotNow(Snooze):
    """This node cannot do its part at the moment: the job goes back, and the attempt is not counted."""

    def __init__(self, message: str, delay: timedelta) -> None:
        super().__init__(delay, reason=message)


class EffectFailed(Exception):
    """What an acknowledgment changes could not be written, by a fault of the wire's: nothing of it was committed."""

    def __init__(self, kind: str, error: Exception) -> None:
        super().__init__(f"{kind} could not be written: {type(error).__name__}")
