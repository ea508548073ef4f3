"""What the manual shows of deliveries: states of rows, and classes of failures.

The code decides by the classes. That it does with rows what `TRANSITIONS` says, neither more nor less, a test shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from db import DeliveryState
from federation.codes import CODES
from federation.delivery.error_codes import FailureClass
from federation.sealed.codes import class_of_status

_S: Final = DeliveryState


class Step(StrEnum):
    """What happens to a delivery's row."""

    OWE = "owed"
    OWE_HELD = "owed while its server is down, or behind an older one"
    DELIVER = "acknowledged"
    HOLD = "its server is down, rests or is slow, or a fault of ours"
    RELEASE = "released, or next in order"
    FAIL = "refused"
    FORBID = "its server was blacklisted"
    CANCEL = "invalid, or cancelled, or dropped"
    EXPIRE = "held until too old"
    RETRY = "deliveries retry"
    PURGE = "kept 7 days, or dropped, or followed by a younger one of its key"


TRANSITIONS: Final[Mapping[tuple[DeliveryState | None, Step], DeliveryState | None]] = {
    (None, Step.OWE): _S.READY,
    (None, Step.OWE_HELD): _S.HELD,
    (_S.READY, Step.DELIVER): None,
    (_S.READY, Step.HOLD): _S.HELD,
    (_S.READY, Step.FAIL): _S.FAILED,
    (_S.READY, Step.CANCEL): None,
    (_S.HELD, Step.RELEASE): _S.READY,
    (_S.HELD, Step.FORBID): _S.FAILED,
    (_S.HELD, Step.EXPIRE): _S.EXPIRED,
    (_S.HELD, Step.CANCEL): None,
    (_S.FAILED, Step.RETRY): _S.READY,
    (_S.FAILED, Step.PURGE): None,
    (_S.EXPIRED, Step.RETRY): _S.READY,
    (_S.EXPIRED, Step.PURGE): None,
}
"""The row's next state, by its state and the step. None stands for no row."""

_BECOMES: Final[Mapping[FailureClass, str]] = {
    FailureClass.UNAVAILABLE: "tried again; after the last attempt, or once the link is down, held for `server`",
    FailureClass.REST: "held for `rest` until the pause is over; the attempt does not count",
    FailureClass.REJECTED: "tried again, or ended at once where the code is final; then failed, and kept 7 days",
    FailureClass.OURS: "tried again; then held for `ours`: 1, 2, 4 … 60 min",
    FailureClass.INVALID: "failed at once, and deleted",
}
_MEANS: Final[Mapping[FailureClass, str]] = {
    FailureClass.UNAVAILABLE: "the server could not judge it",
    FailureClass.REST: "the server asked for a pause",
    FailureClass.REJECTED: "the server answered, and refuses",
    FailureClass.OURS: "a fault of this node",
    FailureClass.INVALID: "it can never be delivered, or must not be",
}
_WITH_CONDITIONS: Final[Mapping[FailureClass, str]] = {
    FailureClass.UNAVAILABLE: "other 4xx without a JSON object",
    FailureClass.REST: "503 with `Retry-After`",
}


def states() -> str:
    """Return the table of transitions as a Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    for (source, step), target in TRANSITIONS.items():
        lines.append(f"    {source or '[*]'} --> {target or '[*]'}: {step.value}")
    return "\n".join(lines)


def failures() -> str:
    """Return the classes of failures as a Markdown table."""
    lines = ["| class | codes | what becomes of the delivery |", "|---|---|---|"]
    for kind in FailureClass:
        codes = [f"`{code}`" for code in sorted(code for code, of in CODES.items() if of.failure_class is kind)]
        codes += [*_statuses(kind), *([_WITH_CONDITIONS[kind]] if kind in _WITH_CONDITIONS else [])]
        lines.append(f"| **{kind}**: {_MEANS[kind]} | {', '.join(codes)} | {_BECOMES[kind]} |")
    return "\n".join(lines)


def _statuses(kind: FailureClass) -> Iterable[str]:
    """Yield the HTTP statuses that belong to the class by themselves: a whole hundred as `4xx`, or single ones."""
    for hundred in (300, 400, 500):
        classes = {status: _class(status) for status in range(hundred, hundred + 100)}
        ((most, _),) = Counter(classes.values()).most_common(1)
        if most is kind:
            yield f"{'other ' if len(set(classes.values())) > 1 else ''}{hundred // 100}xx"
        else:
            yield from (str(status) for status, each in classes.items() if each is kind)


def _class(status: int) -> FailureClass:
    return class_of_status(status, asks_to_wait=False, is_json=True)
