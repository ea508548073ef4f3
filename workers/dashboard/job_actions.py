"""What is done to jobs of a queue, and in which states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from workers.dashboard.catalog import answer
from workers.errors import JobLockedError
from workers.jobs import JobState
from workers.queue import Queue


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAction:
    """Something that is done to jobs of one queue, in the words of a button, a question and a report."""

    verb: str
    does: str
    done: str
    states: Sequence[JobState]
    is_grave: bool = False


ACTIONS: Final = {
    "retry": JobAction(
        verb="Retry",
        does="Queue {} again, with fresh attempts?",
        done="queued again",
        states=(JobState.FAILED, JobState.CANCELLED),
    ),
    "promote": JobAction(
        verb="Run now",
        does="Make {} due now?",
        done="due now",
        states=(JobState.SCHEDULED, JobState.FAILING, JobState.WAITING),
    ),
    "remove": JobAction(
        verb="Remove",
        does="Remove {} without a trace?",
        done="removed",
        states=tuple(state for state in JobState if state is not JobState.PROCESSING),
        is_grave=True,
    ),
}


async def act_on(queue: Queue, key: str, ids: Sequence[str]) -> tuple[int, str | None]:
    """Do it, and return to how many it was done, and why not to the others if something is known of that."""
    manage = queue.manage
    verbs = {"retry": manage.retry, "promote": manage.promote, "remove": manage.remove}
    try:
        return await answer(verbs[key](ids)), None
    except JobLockedError as error:
        return error.done, str(error)
