"""What programs ask of a dashboard: calls, each with the shape of what it takes and of what it answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Generic, Literal, TypeAlias, TypeVar

from workers.dashboard.accounts import Account
from workers.dashboard.shapes import Between
from workers.dashboard.visit import ActionTaken, Record

A = TypeVar("A")

MOST_LISTED: Final = 200
LISTED: Final = 50

Limit: TypeAlias = Annotated[int, "The most items of a page; it may have fewer and go on.", Between(1, MOST_LISTED)]
After: TypeAlias = Annotated[str | None, "Where the page before ended; its `next` has it."]


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingAsked:
    """There is nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Part of a list. `after` is where the next page begins, None at the end."""

    items: Sequence[object]
    after: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whoever calls, by the token of an account; and what a file that was sent says."""

    account: Account
    record_action: Record
    uploaded: bytes = field(default=b"", repr=False)

    @property
    def name(self) -> str:
        return self.account.name

    async def record(self, action: str, subject: str, affected: int, *, problem: str | None = None) -> None:
        """Write to the log what the caller has done."""
        done = ActionTaken(
            by=self.name, action=action, subject=subject, affected=affected, problem=problem, by_api=True
        )
        await self.record_action(done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[A]):
    """One thing that can be asked. `POST` changes something, and takes an operator.

    `asks` is a dataclass: the parameters of an address, or the body of a `POST`. `answers` is the dataclass of the
    answer, or of an item if the call `lists`. A call that takes a file of type `takes` has its parameters in the
    address, too.
    """

    method: Literal["GET", "POST"]
    path: str
    summary: str
    asks: type[A]
    answers: type
    code: Callable[[Caller, A], Awaitable[object]]
    lists: bool = False
    takes: str | None = None

    @property
    def is_asked_by_address(self) -> bool:
        return self.method == "GET" or self.takes is not None


AnyCall: TypeAlias = Call[Any]  # Any: each has parameters of its own
