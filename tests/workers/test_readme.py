"""The manual of the queue core says what the code does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry

from tests.workers.manual import (
    DEPENDENCIES,
    ENQUEUEING,
    FAILED,
    HANDLERS,
    README,
    STORAGES,
    TASKS,
    TRACES,
    examples,
    run_example,
)
from workers.lifecycle import diagram
from workers.middlewares import opentelemetry
from workers.middlewares.prometheus import JobCounters, QueueGauges
from workers.testing import GUARANTEES, all_cases


def test_the_diagram_is_generated_from_the_table() -> None:
    """The state diagram in the README is exactly what `lifecycle.diagram()` prints."""
    shown = re.search(r"<!-- diagram -->\n```mermaid\n(.*?)\n```\n<!-- /diagram -->", README.read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1] == diagram()


def guarantee_rows() -> Mapping[int, tuple[str, str]]:
    """Read what each row of the table of guarantees promises, and the tests that it names."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| [^|]+ \| ([^|]+) \|$", README.read_text(), re.MULTILINE)
    return {int(number): (promise, tests) for number, promise, tests in rows}


def test_the_table_promises_what_the_suite_certifies() -> None:
    """The README's guarantees are those of the certificate, number by number and word by word."""
    assert {number: promise for number, (promise, _) in guarantee_rows().items()} == GUARANTEES


def test_the_table_names_cases_that_show_the_guarantee() -> None:
    """Every case that the README names for a guarantee stands for it, and so does one of every group of cases."""
    for number, (_, tests) in guarantee_rows().items():
        shown = {name for case in all_cases() if number in case.guarantees for name in (case.name, case.verb)}
        named = {name for name in re.findall(r"`(\w+)`", tests) if not name.startswith("test_")}
        assert named, number
        assert named <= shown, number


def test_the_example_runs(tmp_path: Path) -> None:
    """The manual's queue runs as it stands and delivers."""
    finished = run_example(examples(ENQUEUEING)["Queues and handlers"], tmp_path)
    assert "1 {'to': 'bob'}" in finished.stdout


def test_the_plain_example_runs(tmp_path: Path) -> None:
    """The manual's plain code has no event loop, and enqueues all the same."""
    assert run_example(examples(HANDLERS)["Plain code"], tmp_path).stdout.splitlines() == ["queued"]


def test_the_overtime_example_runs(tmp_path: Path) -> None:
    """The manual's one slot is enough for two jobs of which one waits for the other."""
    assert run_example(examples(HANDLERS)["Overtime"], tmp_path).stdout.splitlines() == ["an answer"]


def test_the_flow_example_runs(tmp_path: Path, redis_url: str) -> None:
    """The manual's parent waits for the children it was enqueued with, and for one that it adds."""
    program = examples(HANDLERS)["Parents and children"].replace("redis://localhost:6379", redis_url)
    assert run_example(program, tmp_path).stdout.splitlines() == ["['a.small', 'b.small', 'cover.small']"]


def test_the_transaction_example_runs(tmp_path: Path) -> None:
    """The manual's handler ends its job with its own writes as shown, on the application's engine."""
    finished = run_example(examples(HANDLERS)["Jobs in your own transaction"], tmp_path)
    assert finished.stdout.split() == ["shipped", "paid"]


def test_the_join_of_tasks_runs(tmp_path: Path) -> None:
    """The manual's task gets the results of those before it as shown."""
    assert run_example(examples(DEPENDENCIES)["A join of tasks"], tmp_path).stdout.split() == ["14"]


def test_the_traces_example_runs(tmp_path: Path) -> None:
    """The page's attempt and enqueue are told as shown, and the handler finds its job's metadata."""
    told = run_example(examples(TRACES)["Traces"], tmp_path).stdout.split("\n")
    assert sorted(filter(None, told)) == ["enqueue mail", "for ann within the trace True", "process mail", "request"]


def test_the_page_on_metrics_names_what_there_is() -> None:
    """Every metric of both kinds is in its table."""
    registry = CollectorRegistry()
    JobCounters(registry)
    QueueGauges(registry=registry)
    kinds = {"counter": "_total", "histogram": "", "gauge": ""}
    names = {metric.name + kinds[metric.type] for metric in registry.collect()}
    source = Path(opentelemetry.__file__).read_text()
    names |= set(re.findall(r"create_\w+\(\"([\w.]+)\"", source))
    assert names - set(re.findall(r"`(workers[\w.]+)`", TRACES.read_text())) == set()
    assert len(names) == 13


def test_the_middlewares_example_runs(tmp_path: Path) -> None:
    """The manual's middlewares work together as shown: every line of the attempt names its job."""
    lines = run_example(examples(HANDLERS)["Middlewares"], tmp_path).stderr.splitlines()
    assert lines[:2] == ["mail [mail-1/1] sending", "workers.job [mail-1/1] the server took it"]
    assert lines[2].startswith("workers.attempts [mail-1/1] job mail-1 (default) attempt 1 of 3: completed after 0.")


def test_the_examples_of_dependents_run(tmp_path: Path) -> None:
    """Parts run before what joins them, a job after the one that let it follow."""
    printed = run_example(examples(DEPENDENCIES)["Jobs that follow others"], tmp_path).stdout.splitlines()
    assert (sorted(printed[:3]), printed[3:]) == (["part 0", "part 1", "part 2"], ["join None", "clean up None"])
    finished = run_example(examples(DEPENDENCIES)["A job that follows from a handler"], tmp_path)
    assert finished.stdout.splitlines() == ["upload", "index"]


def test_the_example_of_failed_jobs_runs(tmp_path: Path) -> None:
    """The manual's dead letters are told, read, exported and sent as it says."""
    assert run_example(examples(FAILED)["On a queue"], tmp_path).stdout.splitlines() == [
        "failed: mail-1 {'to': 'bob'} nobody is called bob",
        "attempt 1 of UnrecoverableError",
        *("exported: 1", "sent: 1", "queued"),
    ]


def test_the_tasks_example_runs(tmp_path: Path) -> None:
    """The manual's tasks run as they stand, each once per key."""
    printed = run_example(examples(TASKS)["Handlers as tasks, and keys"], tmp_path).stdout.splitlines()
    assert "queued duplicate True" in printed
    assert [line for line in printed if "digest" in line] == [f"digest for {who}" for who in ("bob", "carol", "dave")]


def test_the_typed_tasks_example_runs(tmp_path: Path) -> None:
    """The manual's tasks with arguments run as they stand, and so does its test of one, which needs no server."""
    shown = examples(TASKS)
    assert run_example(shown["Tasks with arguments"], tmp_path).stdout.splitlines() == ["3: good news"]
    assert run_example(shown["In your tests"], tmp_path).stdout == ""


def test_a_storage_of_ones_own_is_certified_as_shown(tmp_path: Path) -> None:
    """The manual's way to certify a storage runs as it stands and prints a certificate."""
    finished = run_example(examples(STORAGES)["Certify a storage"], tmp_path)
    assert "certified: none of" in finished.stdout


def test_a_producers_program_runs(tmp_path: Path) -> None:
    """The waiter has the result of a job that is kept for a millisecond."""
    assert run_example(examples(ENQUEUEING)["On a queue"], tmp_path).stdout.splitlines() == ["soon forgotten"]
