"""What works beside other programs on one queue, and the test that shows it; the table in `docs/queue/storages.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

OURS, NODE, WHEEL = "our worker", "Node's worker", "worker of the Python package"
COLUMNS: Final = (
    ("bullmq", OURS),
    ("bullmq", NODE),
    ("bullmq", WHEEL),
    ("bull", OURS),
    ("bull", NODE),
    ("later bull", OURS),
)
HEADS: Final = (
    "BullMQ 5, 6: ours",
    "BullMQ 5, 6: Node's",
    "BullMQ: the Python package's",
    "Bull 1.0, 1.1: ours",
    "Bull 1.0, 1.1: Node's",
    "Bull 3, 4: ours",
)

_TESTS: Final[Mapping[str, tuple[str | None, ...]]] = {
    "jobs of the others, and their results": (
        "test_node_bullmq.test_options_of_a_node_job_are_read",
        "test_node_bullmq.test_node_works_our_jobs",
        "test_stock_worker.test_success",
        "test_node_bull.test_a_node_job_is_read",
        "test_node_bull.test_node_runs_our_jobs",
    ),
    "attempts are counted across both": (
        "test_node_bullmq.test_attempts_are_counted_across_both",
        "test_node_bullmq.test_attempts_are_counted_across_both",
        "test_stock_worker.test_retries",
        "test_node_bull.test_backoff_goes_on_where_the_other_stopped",
        "test_node_bull.test_backoff_goes_on_where_the_other_stopped",
    ),
    "a job's own back-off": (
        "test_node_bullmq.test_our_worker_keeps_a_node_jobs_backoff",
        "test_node_bullmq.test_node_keeps_our_backoff_and_failures",
        None,
        "test_node_bull.test_a_failure_without_backoff_runs_again_at_once",
        "test_node_bull.test_backoff_goes_on_where_the_other_stopped",
    ),
    "failures that end a job": (
        "test_node_bullmq.test_our_failures_read_in_node",
        "test_node_bullmq.test_an_unrecoverable_node_failure_ends_our_job",
        "test_stock_worker.test_unrecoverable",
        "test_node_bull.test_our_failures_read_in_node",
        "test_node_bull.test_nodes_failures_read_here",
    ),
    "jobs of a worker that was killed": (
        "test_bullmq_crashes.test_a_crash_is_no_attempt_of_a_node_job",
        "test_bullmq_crashes.test_our_crash_is_no_attempt_in_node",
        None,
        "test_bull_crashes.test_a_killed_node_workers_job_runs_here",
        "test_bull_crashes.test_a_job_of_our_killed_worker_runs_in_node",
    ),
    "pauses": (
        "test_bullmq_limits.test_a_pause_in_the_middle",
        "test_bullmq_limits.test_what_waited_when_we_paused_is_there_when_node_resumes",
        None,
        "test_bull_control.test_a_pause_from_node_holds_us_back",
        "test_bull_control.test_a_pause_from_here_holds_node_back",
    ),
    "global concurrency": (
        "test_bullmq_limits.test_a_freed_slot_of_the_queue_is_taken_at_once",
        "test_bullmq_limits.test_node_keeps_our_concurrency",
    ),
    "global rate limit": (
        "test_bullmq_limits.test_a_rate_limit_in_the_middle",
        "test_bullmq_limits.test_node_keeps_our_rate",
    ),
    "job schedulers": (
        "test_node_schedulers.test_schedulers_live_on",
        "test_our_schedulers.test_node_sees_and_turns_our_crons",
    ),
    "flows": (
        "test_node_flows.test_our_workers_run_a_flow_of_node",
        "test_node_flows.test_node_runs_our_flow",
    ),
    "children added at run time": (
        "test_node_flows.test_children_added_while_a_job_runs",
        "test_node_flows.test_children_added_while_a_job_runs",
    ),
    "log lines, stacks, metrics, names of workers": ("test_node_operators.test_a_failing_node_job",),
    "every option of `add`": (None, "test_node_operators.test_every_option_of_add"),
    "cancelled jobs": (
        None,
        "test_node_bullmq.test_a_cancelled_job_is_a_failed_one_to_node",
        None,
        None,
        "test_bull_control.test_a_cancelled_job_is_a_failed_one_to_node",
    ),
    "retry, remove and clean": (
        *[None] * 3,
        "test_bull_control.test_failures_are_retried_from_either_side",
        "test_bull_control.test_jobs_are_removed_from_either_side",
    ),
    "progress and events": (
        *[None] * 3,
        "test_bull_messages.test_node_hears_our_events",
        "test_node_bull.test_progress_travels",
    ),
    "known by its keys: opened, or refused": (
        "test_later_bull.test_queues_of_nodes_bullmq_are_opened",
        None,
        "test_stock_worker.test_its_queue_is_opened",
        "test_node_bull.test_its_queue_is_opened",
        None,
        "test_later_bull.test_a_queue_of_bull_3_or_4_is_refused",
    ),
}

ROWS: Final = {feature: (*tests, *[None] * (len(COLUMNS) - len(tests))) for feature, tests in _TESTS.items()}
"""The tests by feature, in the order of the columns: None where there is no such thing, or nobody tried."""


def table() -> str:
    """The table as it stands in the README."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield f"| | {' | '.join(HEADS)} |"
    yield "|---" * (1 + len(HEADS)) + "|"
    for feature, tests in ROWS.items():
        yield f"| {feature} | {' | '.join('' if test is None else '✓' for test in tests)} |"
