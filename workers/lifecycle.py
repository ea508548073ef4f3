"""The life of a job, as one table.

Theory of operation. A job is in exactly one state, or it is nowhere (`None`). Each row of `TRANSITIONS` is one atomic
step of a storage. `completed`, `failed` and `cancelled` have no way out but a new generation: enqueueing a failed or
cancelled id again, or an operator's retry. Only the holder of the claim's token may take the steps that leave
`processing`, except `STALL` and `EXHAUST`, which the reaper takes when the lease has expired, and `REMOVE` and
`COMPLETE_FROM_OUTSIDE`, `CONTINUE_FROM_OUTSIDE` and `CONTINUE_FROM_OUTSIDE_LATER`, by which a client takes the job from
its worker. A job that waits is cancelled by `CANCEL`; a running one is asked to stop, which its worker does by `STOP`.
A snooze is no failure: it leaves a job `failing` only if an attempt before it failed. `scheduled` and `failing` become
claimable by the passing of time alone (`COME_DUE`); no storage needs to write anything for that step, so a due job
reads as `queued`. A job leaves `waiting` in the step that ends the last of the jobs it follows (`FOLLOW`), or the first
of them that did not complete (`GIVE_UP`), whatever step that is; or as every job that waits does, by `CANCEL`, `REMOVE`
and `COMPLETE_FROM_OUTSIDE`. The parents of flows follow their children, also those that they have added (`SUSPEND`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from workers.jobs import JobState

S: Final = JobState


class Step(StrEnum):
    """What moves a job from one state to the next."""

    ENQUEUE = "enqueue"
    SCHEDULE = "enqueue with delay"
    AWAIT = "enqueue after others"
    FOLLOW = "the others ended"
    FOLLOW_LATER = "the others ended, with delay"
    GIVE_UP = "one of the others did not complete"
    DEBOUNCE = "debounced"
    COME_DUE = "due"
    CLAIM = "claim"
    COMPLETE = "settle(completed)"
    CONTINUE = "settle(continued)"
    CONTINUE_LATER = "settle(continued with delay)"
    CONTINUE_AFTER = "settle(continued after others)"
    RETRY = "settle(retried)"
    SNOOZE = "settle(snoozed)"
    SNOOZE_AGAIN = "settle(snoozed after a failure)"
    FAIL = "settle(failed)"
    STOP = "settle(cancelled)"
    SUSPEND = "settle(suspended)"
    RELEASE = "release"
    STALL = "lease expired"
    EXHAUST = "lease expired too often"
    CANCEL = "cancel"
    REMOVE = "remove"
    COMPLETE_FROM_OUTSIDE = "complete"
    CONTINUE_FROM_OUTSIDE = "continue"
    CONTINUE_FROM_OUTSIDE_LATER = "continue with delay"
    EXPIRE = "retention over"


TRANSITIONS: Final[dict[tuple[JobState | None, Step], JobState | None]] = {
    (None, Step.ENQUEUE): S.QUEUED,
    (None, Step.SCHEDULE): S.SCHEDULED,
    (None, Step.AWAIT): S.WAITING,
    (S.FAILED, Step.ENQUEUE): S.QUEUED,
    (S.FAILED, Step.SCHEDULE): S.SCHEDULED,
    (S.FAILED, Step.AWAIT): S.WAITING,
    (S.CANCELLED, Step.ENQUEUE): S.QUEUED,
    (S.CANCELLED, Step.SCHEDULE): S.SCHEDULED,
    (S.CANCELLED, Step.AWAIT): S.WAITING,
    (S.QUEUED, Step.DEBOUNCE): S.SCHEDULED,
    (S.SCHEDULED, Step.DEBOUNCE): S.SCHEDULED,
    (S.WAITING, Step.DEBOUNCE): S.WAITING,
    (S.WAITING, Step.FOLLOW): S.QUEUED,
    (S.WAITING, Step.FOLLOW_LATER): S.SCHEDULED,
    (S.WAITING, Step.GIVE_UP): S.FAILED,
    (S.SCHEDULED, Step.COME_DUE): S.QUEUED,
    (S.FAILING, Step.COME_DUE): S.QUEUED,
    (S.QUEUED, Step.CLAIM): S.PROCESSING,
    (S.PROCESSING, Step.COMPLETE): S.COMPLETED,
    (S.PROCESSING, Step.CONTINUE): S.QUEUED,
    (S.PROCESSING, Step.CONTINUE_LATER): S.SCHEDULED,
    (S.PROCESSING, Step.CONTINUE_AFTER): S.WAITING,
    (S.PROCESSING, Step.RETRY): S.FAILING,
    (S.PROCESSING, Step.SNOOZE): S.SCHEDULED,
    (S.PROCESSING, Step.SNOOZE_AGAIN): S.FAILING,
    (S.PROCESSING, Step.FAIL): S.FAILED,
    (S.PROCESSING, Step.STOP): S.CANCELLED,
    (S.PROCESSING, Step.SUSPEND): S.WAITING,
    (S.PROCESSING, Step.RELEASE): S.QUEUED,
    (S.PROCESSING, Step.STALL): S.QUEUED,
    (S.PROCESSING, Step.EXHAUST): S.FAILED,
    (S.QUEUED, Step.CANCEL): S.CANCELLED,
    (S.SCHEDULED, Step.CANCEL): S.CANCELLED,
    (S.WAITING, Step.CANCEL): S.CANCELLED,
    (S.FAILING, Step.CANCEL): S.CANCELLED,
    (S.QUEUED, Step.REMOVE): None,
    (S.SCHEDULED, Step.REMOVE): None,
    (S.WAITING, Step.REMOVE): None,
    (S.FAILING, Step.REMOVE): None,
    (S.PROCESSING, Step.REMOVE): None,
    (S.QUEUED, Step.COMPLETE_FROM_OUTSIDE): S.COMPLETED,
    (S.SCHEDULED, Step.COMPLETE_FROM_OUTSIDE): S.COMPLETED,
    (S.WAITING, Step.COMPLETE_FROM_OUTSIDE): S.COMPLETED,
    (S.FAILING, Step.COMPLETE_FROM_OUTSIDE): S.COMPLETED,
    (S.PROCESSING, Step.COMPLETE_FROM_OUTSIDE): S.COMPLETED,
    (S.QUEUED, Step.CONTINUE_FROM_OUTSIDE): S.QUEUED,
    (S.SCHEDULED, Step.CONTINUE_FROM_OUTSIDE): S.QUEUED,
    (S.WAITING, Step.CONTINUE_FROM_OUTSIDE): S.QUEUED,
    (S.FAILING, Step.CONTINUE_FROM_OUTSIDE): S.QUEUED,
    (S.PROCESSING, Step.CONTINUE_FROM_OUTSIDE): S.QUEUED,
    (S.QUEUED, Step.CONTINUE_FROM_OUTSIDE_LATER): S.SCHEDULED,
    (S.SCHEDULED, Step.CONTINUE_FROM_OUTSIDE_LATER): S.SCHEDULED,
    (S.WAITING, Step.CONTINUE_FROM_OUTSIDE_LATER): S.SCHEDULED,
    (S.FAILING, Step.CONTINUE_FROM_OUTSIDE_LATER): S.SCHEDULED,
    (S.PROCESSING, Step.CONTINUE_FROM_OUTSIDE_LATER): S.SCHEDULED,
    (S.COMPLETED, Step.EXPIRE): None,
    (S.FAILED, Step.EXPIRE): None,
    (S.CANCELLED, Step.EXPIRE): None,
}


class IllegalTransition(AssertionError):
    """A storage tried a step the table does not have: a bug in that storage."""


def after(state: JobState | None, step: Step) -> JobState | None:
    """Return the state a job is in after `step`, None when it is gone."""
    try:
        return TRANSITIONS[state, step]
    except KeyError:
        raise IllegalTransition(f"no step {step.value!r} from {state or 'nowhere'}") from None


def allows(state: JobState | None, step: Step) -> bool:
    """Tell whether the table has this step."""
    return (state, step) in TRANSITIONS


def diagram() -> str:
    """Return the table as a Mermaid state diagram; the package README shows exactly this text."""
    arrows: dict[str, list[str]] = {}
    for (source, step), target in TRANSITIONS.items():
        arrows.setdefault(f"    {source or '[*]'} --> {target or '[*]'}", []).append(step.value)
    return "\n".join(("stateDiagram-v2", *(f"{arrow}: {' / '.join(steps)}" for arrow, steps in arrows.items())))
