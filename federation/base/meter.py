"""What the parts of a node report about themselves, independent of who counts it."""

from __future__ import annotations

from typing import Final, Protocol

from db import AttemptOutcome, RunOutcome


class Meter(Protocol):
    """Is told of things as they happen, in the event loop; must be quick and never raise."""

    def attempt(self, outcome: AttemptOutcome, code: str | None, *, relayed: bool) -> None:
        """Count an attempt at a delivery that ended."""

    def failed(self) -> None:
        """Count a delivery that was given up because it failed, not because of a rule of the blacklist."""

    def second_knock(self, signature: str | None) -> None:
        """Count an attempt that knocked twice, by the kind of signature that counted; None: neither did."""

    def signed(self, seconds: float) -> None:
        """Count a request that was signed, and how long that took."""

    def relay(self, *, helped: bool) -> None:
        """Count that peers were asked to relay, and whether one of them did."""

    def relay_refused(self, code: str) -> None:
        """Count a peer that did not relay."""

    def released(self, number: int) -> None:
        """Count held deliveries that are sent again."""

    def expired(self, number: int) -> None:
        """Count deliveries that were held until they were too old."""

    def stranger(self) -> None:
        """Count a job of another node that was in the delivery queue, and went back."""

    def scheduled(self, job: str, outcome: RunOutcome) -> None:
        """Count a run of a recurring job that ended."""

    def inbound(self, path: str, status: int) -> None:
        """Count a request to an endpoint that was answered."""

    def activity_received(self, type: str, outcome: str) -> None:  # noqa: A002 - as the column
        """Count an activity of ActivityPub's that was verified: `stored`, or `known`; or `ignored` unverified."""

    def activity_refused(self, why: str) -> None:
        """Count an activity of ActivityPub's that was not taken."""

    def activity_handled(self, outcome: str) -> None:
        """Count the handling of an activity: `done`, `retried` later, or `failed` for good."""


class Metrics(Meter, Protocol):
    """A meter whose numbers can be read."""

    def render(self) -> bytes:
        """Return all numbers in the format that Prometheus reads."""


class _Unmetered:
    """A meter that counts nothing."""

    def attempt(self, outcome: AttemptOutcome, code: str | None, *, relayed: bool) -> None: ...
    def failed(self) -> None: ...
    def second_knock(self, signature: str | None) -> None: ...
    def signed(self, seconds: float) -> None: ...
    def relay(self, *, helped: bool) -> None: ...
    def relay_refused(self, code: str) -> None: ...
    def released(self, number: int) -> None: ...
    def expired(self, number: int) -> None: ...
    def stranger(self) -> None: ...
    def scheduled(self, job: str, outcome: RunOutcome) -> None: ...
    def inbound(self, path: str, status: int) -> None: ...
    def activity_received(self, type: str, outcome: str) -> None: ...  # noqa: A002 - as the column
    def activity_refused(self, why: str) -> None: ...
    def activity_handled(self, outcome: str) -> None: ...


NO_METER: Final[Meter] = _Unmetered()
