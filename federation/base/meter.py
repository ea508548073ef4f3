"""What the parts of a node report of themselves, whoever counts it."""

from __future__ import annotations

from typing import Final, Protocol

from db import AttemptOutcome, RunOutcome


class Meter(Protocol):
    """Told as things happen, in the event loop; must be quick and never raise."""

    def attempt(self, outcome: AttemptOutcome, code: str | None, *, relayed: bool) -> None:
        """An attempt at a delivery ended."""

    def relay(self, *, helped: bool) -> None:
        """Peers were asked to relay, and one of them did, or none."""

    def relay_refused(self, code: str) -> None:
        """One peer did not relay."""

    def released(self, number: int) -> None:
        """So many held deliveries are sent again."""

    def expired(self, number: int) -> None:
        """So many deliveries were held until they were too old."""

    def stranger(self) -> None:
        """A job of another node was in the delivery queue, and went back."""

    def scheduled(self, job: str, outcome: RunOutcome) -> None:
        """A run of a recurring job ended."""

    def inbound(self, path: str, status: int) -> None:
        """A request to an endpoint was answered."""


class Metrics(Meter, Protocol):
    """A meter whose numbers can be read."""

    def render(self) -> bytes:
        """All numbers, as Prometheus reads them."""


class _Unmetered:
    """Counts nothing."""

    def attempt(self, outcome: AttemptOutcome, code: str | None, *, relayed: bool) -> None: ...
    def relay(self, *, helped: bool) -> None: ...
    def relay_refused(self, code: str) -> None: ...
    def released(self, number: int) -> None: ...
    def expired(self, number: int) -> None: ...
    def stranger(self) -> None: ...
    def scheduled(self, job: str, outcome: RunOutcome) -> None: ...
    def inbound(self, path: str, status: int) -> None: ...


NO_METER: Final[Meter] = _Unmetered()
