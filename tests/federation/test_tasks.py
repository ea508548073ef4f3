"""The application's own background tasks, on the node's workers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import federation.runtime.nodes
from federation.base.errors import ConfigurationError
from federation.run import run
from federation.runtime.composition import Federation
from federation.runtime.workers import FederationWorkers
from federation.tasks import declared_tasks, enqueue_task, task
from tests.federation.conftest import MakeSettings
from tests.patience import eventually, until
from workers import DeduplicationMode, EnqueueStatus, Job, JobState, Unsupported

seen: list[object] = []


@task("tests.note")
async def note(job: Job) -> str:
    """Notes its payload, and which node it runs on."""
    seen.append((job.payload, federation.runtime.nodes.get_federation()))
    return "noted"


class Crowd:
    """How many runs of `crowded` there are, and were at most."""

    now = most = 0


@task("tests.crowded")
async def crowded(job: Job) -> None:
    Crowd.now += 1
    Crowd.most = max(Crowd.most, Crowd.now)
    await asyncio.sleep(0.02)  # time for one too many
    Crowd.now -= 1


@pytest.fixture
async def node(make_settings: MakeSettings, queue_settings: dict[str, object]) -> AsyncIterator[Federation]:
    """This process's node, on each storage."""
    made = Federation(make_settings(**queue_settings))
    federation.runtime.nodes.adopt(made)
    yield made
    federation.runtime.nodes.release()
    await made.close()


@pytest.fixture
async def embedded(make_settings: MakeSettings) -> AsyncIterator[Federation]:
    """This process's node, with its queues in its database, and known there."""
    made = Federation(make_settings())
    federation.runtime.nodes.adopt(made)
    await made.tasks_queue.start()
    yield made
    federation.runtime.nodes.release()
    await made.close()


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of modules that can be imported; what was imported from it is forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("tasks_of_"):
            del sys.modules[name]


async def test_a_task_runs_on_the_nodes_workers(node: Federation) -> None:
    """On every storage, in a queue of its own, on the process's own node; its worker stops with the others."""
    workers = FederationWorkers(node, tasks=declared_tasks(()))
    with capture_logs() as logs:
        workers.start()
        enqueued = await enqueue_task(note, {"to": "bob"})
        await until(lambda: node.tasks_queue.get_result(enqueued.id))
        await workers.stop()
    assert seen[-1] == ({"to": "bob"}, node)
    assert enqueued.status is EnqueueStatus.QUEUED
    stopped = {entry["queue"] for entry in logs if entry["event"] == "worker_stopped"}
    assert stopped == {"federation-delivery", "federation-discovery", "federation-health-check", "federation-tasks"}
    assert (await node.tasks_queue.counts())[JobState.COMPLETED] == 1


async def test_the_setting_bounds_how_many_run_at_once(make_settings: MakeSettings) -> None:
    """`FEDERATION_TASKS_CONCURRENCY` of them, and the others after these."""
    node = Federation(make_settings(federation_tasks_concurrency=2))
    federation.runtime.nodes.adopt(node)
    workers = FederationWorkers(node, tasks=declared_tasks(()))
    workers.start()
    for _ in range(6):
        await enqueue_task(crowded, None)
    await eventually(node.tasks_queue.counts, lambda counts: counts[JobState.COMPLETED] == 6)
    await workers.stop()
    federation.runtime.nodes.release()
    await node.close()
    assert Crowd.most == 2


async def test_a_restarted_pair_finds_its_tasks_worker(embedded: Federation) -> None:
    """Stopping the pair one by one leaves the tasks at work, and a start after that makes no second worker for them."""
    workers = FederationWorkers(embedded, tasks=declared_tasks(()))
    with capture_logs() as logs:
        for running in workers.start():
            await running.stop()
        workers.start()
        enqueued = await enqueue_task(note, "again")
        await until(lambda: embedded.tasks_queue.get_result(enqueued.id))
        await workers.stop()
    ours = [entry["event"] for entry in logs if entry.get("queue") == "federation-tasks"]
    assert ours == ["worker_ready", "worker_stopped"]


async def test_a_task_meets_the_node_that_runs_it(make_settings: MakeSettings, empty_environment: Path) -> None:
    """What a task asks of its process is the running node's, not another one's from the environment."""
    settings = make_settings()
    running = asyncio.create_task(run(settings, workers=True, node=False))
    await asyncio.sleep(0)
    node = federation.runtime.nodes.get_federation()
    assert node.settings is settings
    enqueued = await enqueue_task(note, "here")
    await until(lambda: node.tasks_queue.get_result(enqueued.id))
    assert seen[-1] == ("here", node)
    running.cancel()
    await asyncio.wait([running])
    assert federation.runtime.nodes.release() is None


async def test_a_task_can_be_part_of_a_transaction(embedded: Federation) -> None:
    """It is queued with the commit, and never was without it."""
    async with embedded.outbox.transaction() as session:
        kept = await enqueue_task(note, 1, session=session)
    async with embedded.outbox.transaction() as session:
        undone = await enqueue_task(note, 2, session=session)
        await session.rollback()
    assert await embedded.tasks_queue.get_status(kept.id) is not None
    assert await embedded.tasks_queue.get_status(undone.id) is None


async def test_a_task_is_enqueued_once_per_key(node: Federation) -> None:
    """On every storage that keeps keys itself, and on BullMQ by a mark in its Redis; the other is told the job's id."""
    if not (node.tasks_queue.storage.capabilities.deduplication or node.task_keys):
        with pytest.raises(TypeError, match="leave it out"):
            await enqueue_task(note, 1, deduplication_key="key")
        return
    first, *others = await asyncio.gather(*(enqueue_task(note, at, deduplication_key="key") for at in range(5)))
    found = [first, *others]
    assert sorted(one.status for one in found) == [*[EnqueueStatus.DUPLICATE] * 4, EnqueueStatus.QUEUED]
    assert len({one.id for one in found}) == 1
    assert (await enqueue_task(note, 5, deduplication_key="another")).status is EnqueueStatus.QUEUED
    assert sum((await node.tasks_queue.counts()).values()) == 2


async def test_on_bullmq_other_modes_are_refused(
    make_settings: MakeSettings, redis_url: str, queue_prefix: str
) -> None:
    """A mark can `throttle` alone: it knows nothing of its job. Nothing is enqueued."""
    node = Federation(make_settings(redis_url=redis_url, federation_queue_prefix=queue_prefix))
    federation.runtime.nodes.adopt(node)
    for mode in (DeduplicationMode.SIMPLE, DeduplicationMode.DEBOUNCE):
        with pytest.raises(Unsupported, match=mode.value):
            await enqueue_task(note, 1, deduplication_key="key", deduplication_mode=mode)
    assert sum((await node.tasks_queue.counts()).values()) == 0
    federation.runtime.nodes.release()
    await node.close()


async def test_a_key_is_part_of_the_transaction(embedded: Federation) -> None:
    """It is taken with the commit, and free without; what has it is told in a transaction and outside of one."""
    if not embedded.tasks_queue.storage.capabilities.deduplication:
        async with embedded.outbox.transaction() as session:
            with pytest.raises(Unsupported, match="natively"):
                await enqueue_task(note, 1, session=session, deduplication_key="key")
        assert sum((await embedded.tasks_queue.counts()).values()) == 0
        return
    async with embedded.outbox.transaction() as session:
        await enqueue_task(note, 1, session=session, deduplication_key="key")
        await session.rollback()
    async with embedded.outbox.transaction() as session:
        kept = await enqueue_task(note, 2, session=session, deduplication_key="key")
        again = await enqueue_task(note, 3, session=session, deduplication_key="key")
    outside = await enqueue_task(note, 4, deduplication_key="key")
    assert [one.status for one in (kept, again, outside)] == [EnqueueStatus.QUEUED, *[EnqueueStatus.DUPLICATE] * 2]
    assert {again.id, outside.id} == {kept.id}
    assert sum((await embedded.tasks_queue.counts()).values()) == 1


async def test_a_transaction_that_the_queue_cannot_join_is_refused(make_settings: MakeSettings, tmp_path: Path) -> None:
    """And nothing is enqueued, with a key or without."""
    node = Federation(make_settings(queue_url=f"file://{tmp_path}/queues"))
    federation.runtime.nodes.adopt(node)
    async with node.outbox.transaction() as session:
        with pytest.raises(Unsupported, match="without `session`"):
            await enqueue_task(note, 1, session=session)
        with pytest.raises(Unsupported, match="without `session`"):
            await enqueue_task(note, 1, session=session, deduplication_key="key")
    assert sum((await node.tasks_queue.counts()).values()) == 0
    federation.runtime.nodes.release()
    await node.close()


def test_a_module_that_cannot_be_imported_is_told(modules: Path) -> None:
    """With its name, the reason and what to do; one that lacks another package as well."""
    (modules / "tasks_of_mine.py").write_text("import package_nobody_has\n")
    with pytest.raises(ConfigurationError) as error:
        declared_tasks(("tasks_of_nobody", "tasks_of_mine"))
    nobody, mine = error.value.problems
    assert nobody.startswith("FEDERATION_TASKS: tasks_of_nobody cannot be imported: No module named 'tasks_of_nobody'")
    assert "PYTHONPATH" in nobody
    assert "'package_nobody_has'" in mine


def test_a_syntax_error_is_told_with_the_line(modules: Path) -> None:
    """In one line, without a traceback."""
    (modules / "tasks_that_fail.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(ConfigurationError) as error:
        declared_tasks(("tasks_that_fail",))
    file = modules / "tasks_that_fail.py"
    assert error.value.problems == (
        f"FEDERATION_TASKS: tasks_that_fail cannot be imported: invalid syntax ({file}, line 2)",
    )


def test_the_modules_tasks_are_declared(modules: Path) -> None:
    """Importing them is what declares them."""
    (modules / "tasks_of_ours.py").write_text(
        "from federation.tasks import task\n\n@task('tests.ours')\nasync def ours(job): ...\n"
    )
    assert "tests.ours" not in declared_tasks(())
    assert {"tests.ours", "tests.note"} <= declared_tasks(("tasks_of_ours",)).keys()


def test_an_error_in_a_module_is_the_applications_own(modules: Path) -> None:
    """It is raised as it is, with its traceback, and not taken for a setting."""
    (modules / "tasks_of_wrong.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        declared_tasks(("tasks_of_wrong",))
