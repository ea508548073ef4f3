"""All that the engine knows of a protocol: a wire, by which deliveries are sent and answers are understood.

Theory of operation. The engine owes, tries, holds and releases deliveries; it never asks what they say. The name of a
delivery's job chooses its wire (`Wires`). The wire checks what is to be owed before anything is written, sends one
delivery at a time, and raises what went wrong by a code; its `codes` give the class of each, beside the engine's own.
What it sees on the way it writes into `Trace`, so that the record of an attempt that fails has it, too. What an
acknowledgment changes in the application's tables is an `Effect`: the ledger writes it in the transaction in which the
row goes. Blacklist, order, links and what becomes of a row are the engine's alone.

A new wire is a package with a class like this, and is given to `Federation`, with its queue if it has one; those that
ship are made in the composition root. A wire that never answers, or breaks off with anything but its failures, has a
bug: the delivery is held as a fault of ours, and its server is not blamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ClassVar, Final, Protocol, Self, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from db import AttemptNote
from db.errors import is_outage
from federation.delivery.error_codes import ENGINE_CODES, FailureCode
from federation.protocol.values import Value
from federation.servers.link_rules import Link

T = TypeVar("T")

DELIVERY_TIMEOUT: Final = timedelta(seconds=15)
"""How long one attempt may ask a server, in all: whatever it knocks, and whoever it is relayed by."""
LONGEST_ANSWER: Final = timedelta(minutes=5)
"""A wire has limits of its own, far below this one: who waits for it keeps a slot, and a lease, and others out."""


@dataclass(slots=True)
class Trace:
    """What a wire has seen of an attempt so far.

    `method` is the kind of what was sent, for the log. `status` and `remote_code` are the answer's; `relayed_by` is
    the server that carried it. `answered`: whether the server began to answer, None if it was not asked; `waited`: for
    how many seconds it was waited for. `note`: what the attempt's record is to say beside its outcome.
    `activity_id` is what the protocol calls that which was sent, if it calls it anything; `signature` the kind of
    signature that counted, where it has several, and `knocks` how many of them were tried.
    """

    method: str | None = None
    status: int | None = None
    remote_code: str | None = None
    relayed_by: str | None = None
    answered: bool | None = None
    waited: float | None = None
    request_bytes: int | None = None
    response_bytes: int | None = None
    note: AttemptNote | None = None
    activity_id: str | None = None
    signature: str | None = None
    knocks: int = 0


class Sending(Value, frozen=True, kw_only=True):
    """One delivery to send now.

    `link` is what was known of the server; `is_repeat`: an attempt was made before, so that the server may have it
    already. `first_byte` is how long the server may take to begin its answer. `refuse_blacklisted` raises if an
    operator has forbidden the delivery meanwhile: a wire calls it after what took long, before it sends.
    """

    unshown: ClassVar = frozenset({"payload", "refuse_blacklisted"})

    job_name: str
    delivery_id: str
    server_url: str
    target_url: str
    payload: str
    started_at: datetime
    link: Link
    is_repeat: bool
    first_byte: timedelta | None
    seen: Trace
    refuse_blacklisted: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """How the ledger's single statement on PostgreSQL writes effects of one kind; see `ledger.postgres_fast_path`.

    `ctes` are common table expressions, in which `{arrived}` stands for a table of the effects: the delivery's `id`,
    and `columns`, which are the effect's fields with their types. The one called `changed` has the `id` of each
    delivery whose effect changed a row. It does the same as `Effect.apply`.
    """

    columns: Mapping[str, str]
    ctes: str
    changed: str


class Effect(Protocol):
    """What the acknowledgment of a delivery changes here: a struct or a dataclass.

    Writing it twice must change nothing more.
    """

    fragment: ClassVar[Fragment | None]
    """None: a group with such an effect goes the longer way, in a transaction of several statements."""

    @classmethod
    def apply(cls, connection: Connection, effects: Sequence[Self], /) -> Sequence[bool]:
        """Write effects of this kind in the ledger's transaction, and tell of each whether it changed a row."""

    def log_missed(self, *, delivery_id: str) -> None:
        """Log that there was nothing to change."""


class Wire(Protocol):
    """One protocol."""

    @property
    def name(self) -> str:
        """Its name in logs and messages."""

    @property
    def job_names(self) -> Collection[str]:
        """The names of jobs that are sent by it. The wire of all other names claims none."""

    @property
    def codes(self) -> Mapping[str, FailureCode]:
        """Its failures, beside the engine's."""

    def check(self, payload: str, /) -> None:
        """Check what is to be owed.

        Raises:
            ValueError: it could never be delivered; the message names the member.
        """

    async def name_of(self, server_url: str, /) -> str:
        """Return the name by which the server is known here, in its one spelling."""

    async def send(self, sending: Sending, /) -> Effect | None:
        """Send the delivery, and return what its acknowledgment changes.

        Raises:
            PermanentFailure, RetryableFailure: what went wrong.
            SQLAlchemyError: the database could not be asked; the attempt does not count. One that refused a statement
                was asked what no wire should ask.
        """

    async def may_recover(self, sending: Sending, code: str, /) -> bool:
        """Tell whether the refusal by this code may end without anybody's doing: the delivery waits for that.

        Raises:
            RetryableFailure: what it found to be behind the refusal, of the class OURS; it counts in its place.
        """

    async def is_well(self, server_url: str, /) -> bool | None:
        """Ask the server for which nothing is held whether it is back. None: only a delivery can tell."""


class BrokenWire(Exception):
    """A wire raised what no wire should."""


async def asked(answer: Awaitable[T]) -> T:
    """Return what a wire answers.

    Raises:
        BrokenWire: it takes longer than `LONGEST_ANSWER`, or cancelled itself, which would end whoever asks, or the
            database refused a statement of its own.
        SQLAlchemyError: the database could not be asked.
    """
    try:
        async with asyncio.timeout(LONGEST_ANSWER.total_seconds()) as limit:
            return await answer
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise BrokenWire(f"it gave no answer within {LONGEST_ANSWER}") from error
    except SQLAlchemyError as error:
        if is_outage(error):
            raise
        raise BrokenWire(f"the database refused its statement: {type(error).__name__}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise BrokenWire("it cancelled itself") from error


class Wires:
    """The wires of a node. `default` is that of all names of jobs that no other claims.

    Raises:
        ValueError: two claim the same jobs, or have the same name, or one beside the default claims no jobs.
    """

    def __init__(self, default: Wire, *others: Wire) -> None:
        self._default: Final = default
        self._by_name: Final[dict[str, Wire]] = {}
        self._by_own_name: Final[dict[str, Wire]] = {default.name: default}
        for wire in others:
            if not wire.job_names:
                raise ValueError(f"the wire {wire.name} claims no jobs, so it would send none: give it `job_names`")
            for name in wire.job_names:
                if name in self._by_name:
                    raise ValueError(f"two wires claim jobs named {name!r}: {self._by_name[name].name}, {wire.name}")
                self._by_name[name] = wire
            if wire.name in self._by_own_name:
                raise ValueError(f"two wires are called {wire.name!r}, and would share the links to servers")
            self._by_own_name[wire.name] = wire

    def of(self, job_name: str) -> Wire:
        """Return the wire by which jobs of this name are sent."""
        return self._by_name.get(job_name, self._default)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all wires."""
        return tuple(self._by_own_name)

    def check(self, job_name: str, payload: str) -> str:
        """Check what is to be owed, and return the name of its wire.

        Raises:
            ValueError: it could never be delivered; the message names the member.
        """
        wire = self.of(job_name)
        wire.check(payload)
        return wire.name

    async def is_well(self, link: Link) -> bool | None:
        """Ask the server by the link's wire whether it is back. None: only a delivery can tell, or the wire is gone."""
        wire = self._by_own_name.get(link.wire)
        return None if wire is None else await asked(wire.is_well(link.server_url))


def code_of(wire: Wire, code: str) -> FailureCode | None:
    """Return what a failure's code says, of the engine's or of the wire's; None for one that neither knows."""
    return ENGINE_CODES.get(code) or wire.codes.get(code)
