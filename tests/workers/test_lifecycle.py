"""Properties of the transition table."""

from __future__ import annotations

import pytest

from workers.jobs import JobState
from workers.lifecycle import TRANSITIONS, IllegalTransition, Step, after, allows, diagram


def test_every_state_is_reached_and_left() -> None:
    """From nowhere every state can be reached, and from every state a job can get back to nowhere."""
    forward: dict[JobState | None, set[JobState | None]] = {}
    for (source, _), target in TRANSITIONS.items():
        forward.setdefault(source, set()).add(target)
    assert _reached(forward, None) == {*JobState, None}
    assert all(None in _reached(forward, state) for state in JobState)


def _reached(forward: dict[JobState | None, set[JobState | None]], start: JobState | None) -> set[JobState | None]:
    reached: set[JobState | None] = set()
    fringe = {start}
    while fringe:
        fringe = {target for state in fringe for target in forward[state]} - reached
        reached |= fringe
    return reached


def test_every_step_is_used() -> None:
    """The table has no step that leads nowhere, and none is missing from it."""
    assert {step for _, step in TRANSITIONS} == set(Step)


def test_completed_only_expires() -> None:
    """A completed job changes no more: its record can only expire."""
    assert {step for state, step in TRANSITIONS if state is JobState.COMPLETED} == {Step.EXPIRE}


@pytest.mark.parametrize("ended", [JobState.FAILED, JobState.CANCELLED])
def test_other_ends_only_expire_or_start_again(ended: JobState) -> None:
    """A failed or cancelled job expires, or its id starts a new generation; no attempt can touch it."""
    assert {step for state, step in TRANSITIONS if state is ended} == {
        Step.EXPIRE,
        Step.ENQUEUE,
        Step.SCHEDULE,
        Step.AWAIT,
    }


def test_only_queued_jobs_are_claimed() -> None:
    """Nothing but a queued job can be claimed, and a claim makes it processing."""
    assert {state for state, step in TRANSITIONS if step is Step.CLAIM} == {JobState.QUEUED}
    assert after(JobState.QUEUED, Step.CLAIM) is JobState.PROCESSING


def test_only_processing_jobs_are_settled() -> None:
    """Every way an attempt can end starts from processing and leaves it."""
    ends = {
        *(Step.COMPLETE, Step.CONTINUE, Step.CONTINUE_LATER, Step.RETRY, Step.FAIL, Step.STOP, Step.RELEASE),
        *(Step.SUSPEND, Step.STALL, Step.EXHAUST, Step.SNOOZE, Step.SNOOZE_AGAIN, Step.CONTINUE_AFTER),
    }
    leaves = {step for state, step in TRANSITIONS if state is JobState.PROCESSING}
    outside = {Step.COMPLETE_FROM_OUTSIDE, Step.CONTINUE_FROM_OUTSIDE, Step.CONTINUE_FROM_OUTSIDE_LATER}
    assert leaves == {*ends, Step.REMOVE, *outside}
    assert {state for state, step in TRANSITIONS if step in ends} == {JobState.PROCESSING}
    assert JobState.PROCESSING not in {target for (_, step), target in TRANSITIONS.items() if step in ends}


@pytest.mark.parametrize("state", list(JobState))
def test_what_waits_is_cancelled(state: JobState) -> None:
    """What waits can be cancelled, and is so then; what runs is stopped by its worker, what is over cannot be."""
    waiting = state in (JobState.QUEUED, JobState.SCHEDULED, JobState.WAITING, JobState.FAILING)
    assert allows(state, Step.CANCEL) == waiting
    if waiting:
        assert after(state, Step.CANCEL) is JobState.CANCELLED


def test_an_illegal_step_says_what_was_tried() -> None:
    """A step the table lacks is refused with the step and the state in the message."""
    assert not allows(JobState.COMPLETED, Step.CLAIM)
    with pytest.raises(IllegalTransition, match="no step 'claim' from completed"):
        after(JobState.COMPLETED, Step.CLAIM)
    with pytest.raises(IllegalTransition, match="no step 'claim' from nowhere"):
        after(None, Step.CLAIM)


def test_the_diagram_shows_every_row() -> None:
    """The diagram has an arrow between two states for all rows that lead there; nowhere is drawn as `[*]`."""
    lines = diagram().splitlines()
    assert lines[0] == "stateDiagram-v2"
    assert len(lines) == 1 + len({(source, target) for (source, _), target in TRANSITIONS.items()})
    assert sum(len(line.partition(": ")[2].split(" / ")) for line in lines[1:]) == len(TRANSITIONS)
    assert "    [*] --> queued: enqueue" in lines
    assert "    failed --> [*]: retention over" in lines
