"""The conformance suite catches what it is there for: each of these storages is wrong in one way, and found out."""

from __future__ import annotations

import sys

import pytest

from tests.workers.testing import broken_storages as broken
from workers.storage.base import Storage
from workers.storage.memory import MemoryStorage
from workers.testing import MemoryHarness, all_cases, certify, steps

CASES = all_cases()
CAUGHT_BY: dict[type[MemoryStorage], tuple[str, ...]] = {
    broken.NoTokenCheck: ("settle.an_old_token_has_no_effect", "settle.an_old_token_is_nothing_to_a_new_generation"),
    broken.LostWakeUp: ("wait.no_wake_up_is_lost_in_a_race",),
    broken.ResultAfterState: ("settle.a_completion_is_seen_whole",),
    broken.StateAfterResult: ("settle.a_completion_is_seen_whole",),
    broken.ContinuationAfterState: (
        "settle.a_completion_is_seen_whole",
        "settle.a_settle_broken_off_can_be_repeated",
    ),
    broken.ContinuationLost: ("settle.a_continuation_comes_with_the_completion",),
    broken.ContinuedWithOldAttempts: (
        "chains.a_continued_job_goes_on_as_its_next_link",
        "chains.a_continued_job_is_recovered_as_its_link",
    ),
    broken.ContinuedByAnybody: ("chains.continuing_again_changes_nothing",),
    broken.DoubleRecovery: ("recover.any_number_of_reapers_recover_a_job_once",),
    broken.ExpiresWithNeighbours: ("retention.results_expire_one_by_one",),
    broken.SweepsNeighbours: ("retention.results_expire_one_by_one",),
    broken.RetentionIgnored: ("retention.results_expire_one_by_one", "retention.an_expired_id_is_free"),
    broken.KeepIgnored: (
        "retention.a_settlement_may_choose_the_retention",
        "retention.a_failure_may_leave_no_record",
        "chains.a_link_may_fail_without_a_record",
    ),
    broken.AttemptCountedAtTheEnd: ("attempts.an_attempt_counts_when_it_is_claimed",),
    broken.StallsNotCounted: ("recover.a_job_stalled_too_often_fails",),
    broken.CancelIgnoredWhileScheduled: ("cancel.a_delayed_job_stays_cancelled_when_due",),
    broken.ReleasedToTheEnd: ("ordering.a_released_job_keeps_its_place",),
    broken.EnqueueRace: ("enqueue.a_hundred_producers_insert_an_id_once",),
    broken.KeyRace: ("deduplication.a_hundred_producers_of_a_key_insert_one_job",),
    broken.ThrottleEndsWithItsJob: (
        "deduplication.a_throttled_key_is_taken_for_its_time",
        "deduplication.a_chain_keeps_its_key",
        "deduplication.release_recovery_and_retry_leave_keys_alone",
    ),
    broken.OldGenerationLingers: ("enqueue.a_failed_id_starts_a_new_generation",),
    broken.KeyKeptByTheClaim: ("deduplication.a_debounced_job_runs_with_the_last_payload",),
    broken.KeyOfNobody: ("deduplication.every_end_frees_a_key",),
    broken.FirstPayloadStays: ("deduplication.a_debounced_job_runs_with_the_last_payload",),
    broken.GroupsAreSplit: (
        "deduplication.jobs_of_one_call_with_one_key_are_a_group",
        "deduplication.a_large_group_is_one",
    ),
    broken.RenewsWhatIsLost: ("renew.a_lost_lease_is_reported_with_its_reason",),
    broken.RepeatsAreLost: ("settle.a_repeated_settle_is_already_applied",),
    broken.KeyHeldWhileWaiting: ("ordering.a_waiting_retry_does_not_hold_its_key",),
    broken.SilentCancel: ("cancel.waiters_are_told_at_once",),
    broken.ProgressOfAnybody: ("progress.an_old_token_reports_nothing",),
    broken.UnheardRequests: ("cancel.a_request_is_told_at_once",),
    broken.ForgottenRequests: ("cancel.a_flood_of_requests_loses_none_in_silence",),
    broken.FollowsNobody: (
        "dependencies.a_job_waits_for_all_it_follows",
        "dependencies.a_chain_is_followed_to_its_end",
    ),
    broken.ReleaseRace: ("dependencies.concurrent_finishers_strand_nobody",),
    broken.CancelStrands: (
        "dependencies.what_did_not_complete_fails_its_dependents",
        "dependencies.a_long_line_of_dependents_ends_in_one_step",
    ),
    broken.CronReplacedByAnybody: ("crons.a_row_is_replaced_once_from_each_revision",),
    broken.CronJobsOfTheLate: ("crons.a_row_is_replaced_once_from_each_revision",),
    broken.TokenNotTaken: ("limits.a_rate_is_kept", "limits.every_start_takes_a_token", "limits.both_limits_count"),
    broken.PlaceOfTheLost: ("limits.a_crashed_worker_frees_its_place",),
    broken.ParkedForgotten: ("limits.a_concurrency_is_kept", "limits.a_changed_limit_counts_at_once"),
    broken.OpeningForgotten: ("limits.a_bucket_fills_at_its_rate", "limits.a_token_wakes_a_worker"),
    broken.ChangedLimitUnseen: ("limits.a_changed_limit_counts_at_once",),
    broken.FairKeysInOrder: ("limits.fair_keys_take_turns", "limits.a_batch_is_fair_too"),
    broken.UrgentLast: (
        "priorities.urgent_jobs_come_first",
        "priorities.an_urgent_job_has_its_name",
        "priorities.an_urgent_job_stays_urgent",
        "priorities.an_urgent_job_of_a_key_is_the_next",
        "priorities.an_urgent_job_of_a_fair_key_is_its_next",
    ),
    broken.ResultLeftBehind: ("events.a_small_result_travels_with_the_end",),
    broken.LargeResultGone: ("events.a_large_result_waits_to_be_read",),
    broken.HeldWakeUpForgotten: ("wait.a_held_wake_up_comes_at_the_end",),
    broken.HeldForEverybody: ("wait.others_wake_while_a_block_is_open",),
    broken.FarewellUnheard: ("inspect.a_worker_that_stops_is_listed_no_more",),
    broken.SpinningWait: ("wait.an_idle_wait_does_not_spin",),
}
"""Each fault, and cases that fail because of it."""


@pytest.mark.parametrize("kind", CAUGHT_BY, ids=lambda kind: kind.__name__)
async def test_the_suite_catches_the_fault(kind: type[MemoryStorage], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case named for the fault fails on the storage that has it."""
    for module in (steps, *(sys.modules[case.function.__module__] for case in CASES)):
        monkeypatch.setattr(module, "PATIENCE", 0.5, raising=False)

    class BrokenHarness(MemoryHarness):
        async def make(self, queue: str) -> Storage:
            return kind(self.space, queue)

    named = [case for case in CASES if case.id in CAUGHT_BY[kind]]
    certificate = await certify(BrokenHarness, named, at_once=len(named))
    assert {result.case.id for result in certificate.broken} == set(CAUGHT_BY[kind])
