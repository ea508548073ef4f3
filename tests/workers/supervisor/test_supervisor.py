"""A supervisor keeps its processes running, whatever ends them, and leaves none behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from tests.patience import PATIENCE_SECONDS, until
from tests.workers.supervisor.crew import crew, is_alive, is_running

SUBREAPER = """
import ctypes, os, sys
assert not ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""What loses its parent below the program becomes its child, as it does of process 1 in a container."""


async def get(port: int, path: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as client:
        return await client.get(f"http://127.0.0.1:{port}{path}")


async def test_all_processes_work_and_end_when_told(tmp_path: Path) -> None:
    """One of them leads; one port tells of all; a stop ends each once, and the supervisor with status 0."""
    async with crew(tmp_path) as running:
        pids = await running.until_ready(2)
        await running.until(lambda: running.reports("metrics_serving"))
        metrics = (await get(running.port, "/metrics")).text
        assert [line for line in metrics.splitlines() if line.startswith(("up", "# HELP up", "# TYPE up"))] == [
            "# HELP up Whether.",
            "# TYPE up gauge",
            'up{process="1",a="}"} 1',
            'up{process="2",a="}"} 1',
        ]
        assert all(f'pid{{process="{number}"}} {pid}' in metrics for number, pid in enumerate(pids, 1))
        assert 'workers_processes{state="ready"} 2' in metrics
        health = await get(running.port, "/healthz")
        assert (health.status_code, set(health.json()["processes"])) == (200, {"1", "2"})
        running.signal(signal.SIGTERM)
        assert await running.ended() == 0
        assert running.events("leads") == [(1, pids[0])]
        assert sorted(running.events("asked")) == sorted(running.events("ends")) == [(1, pids[0]), (2, pids[1])]
        assert not any(map(is_alive, pids))


async def test_a_killed_process_is_replaced_and_another_leads(tmp_path: Path) -> None:
    """What killed it is on record."""
    async with crew(tmp_path) as running:
        first, second = await running.until_ready(2)
        os.kill(first, signal.SIGKILL)
        third = (await running.until_ready(3))[2]
        await running.until(lambda: len(running.events("leads")) == 2)
        assert running.events("leads")[1] in [(2, second), (1, third)]
        (died,) = running.reports("process_died")
        assert (died["process"], died["end"]) == (1, "killed, perhaps for lack of memory")
        assert 'workers_process_ends_total{reason="died"} 1' in (await get(running.port, "/metrics")).text
        assert is_running(second)


async def test_a_first_process_that_refuses_ends_the_supervisor(tmp_path: Path) -> None:
    """With its status, at once, and no other is started."""
    (tmp_path / "refuse").touch()
    async with crew(tmp_path, processes=3) as running:
        assert await running.ended() == 2
        assert len(running.reports("process_died")) == 1


async def test_processes_that_die_in_a_loop_end_the_supervisor(tmp_path: Path) -> None:
    """The status says that it failed, and the log how."""
    (tmp_path / "crash").touch()
    async with crew(tmp_path) as running:
        assert await running.ended() == 1
        (given_up,) = running.reports("gave_up")
        assert (given_up["deaths_in_a_row"], given_up["last"]) == (5, "exit status 3")
        assert {each["process"] for each in running.reports("process_died")} == {1}


async def test_one_place_that_dies_in_a_loop_does_not_end_the_others(tmp_path: Path) -> None:
    """A process that works is worth more than a status."""
    async with crew(tmp_path) as running:
        first, second = await running.until_ready(2)
        running.tell("crash")
        os.kill(second, signal.SIGKILL)
        await running.until(lambda: len(running.reports("process_died")) > 5)
        assert is_running(first)
        running.forget("crash")
        await running.until_ready(3)
        assert running.reports("gave_up") == []


async def test_a_process_that_never_gets_ready_is_killed(tmp_path: Path) -> None:
    """And counts as one that died."""
    (tmp_path / "never-ready").touch()
    async with crew(tmp_path, processes=1, start=0.2) as running:
        assert await running.ended() == 1
        assert {each["reason"] for each in running.reports("process_ended")} == {"late"}


@pytest.mark.parametrize("does", ["idles", "block"])
async def test_processes_end_by_themselves_when_the_supervisor_is_killed(tmp_path: Path, does: str) -> None:
    """In good order if they can; one whose event loop is blocked ends within its lease."""
    async with crew(tmp_path) as running:
        pids = await running.until_ready(2)
        if does == "block":
            running.tell("block", pids[1])
            await running.until(lambda: running.events("blocks"))
        running.process.kill()
        running.process.wait()
        await until(lambda: not any(map(is_running, pids)))
        assert len(running.events("ends")) == (2 if does == "idles" else 1)


async def test_a_rolling_restart_replaces_one_after_the_other(tmp_path: Path) -> None:
    """Each is asked to stop only once its successor works."""
    async with crew(tmp_path) as running:
        old = await running.until_ready(2)
        running.signal(signal.SIGHUP)
        await running.until(lambda: running.reports("restarted"))
        new = (await running.until_ready(4))[2:]
        assert running.events("ends") == [(1, old[0]), (2, old[1])]
        story = [line.split()[1:] for line in (tmp_path / "events").read_text().splitlines()]
        for before, after in zip(old, new, strict=True):
            assert story.index([str(after), "begins"]) < story.index([str(before), "asked"])
        assert not set(old) & set(new)
        assert running.reports("process_died") == []


async def test_a_version_that_does_not_start_replaces_nothing(tmp_path: Path) -> None:
    """The processes that run are left alone, and the next restart replaces them."""
    async with crew(tmp_path) as running:
        old = await running.until_ready(2)
        running.tell("crash")
        running.signal(signal.SIGHUP)
        await running.until(lambda: running.reports("restart_given_up"))
        assert all(map(is_running, old))
        assert running.events("asked") == []
        running.forget("crash")
        running.signal(signal.SIGHUP)
        await running.until(lambda: running.reports("restarted"))
        assert not any(map(is_running, old))


async def test_a_process_that_does_not_stop_in_time_is_killed(tmp_path: Path) -> None:
    """One whose event loop is blocked does not keep a restart, or a stop, from going on."""
    (tmp_path / "no-grace").touch()
    async with crew(tmp_path) as running:
        old = await running.until_ready(2)
        running.tell("block", old[0])
        await running.until(lambda: running.events("blocks"))
        running.signal(signal.SIGHUP)
        await running.until(lambda: running.reports("process_killed"))
        new = (await running.until_ready(3))[2]
        running.tell("block", new)
        await running.until(lambda: len(running.events("blocks")) == 2)
        running.signal(signal.SIGTERM)
        assert await running.ended() == 1
        assert {old[0], new} <= {each["pid"] for each in running.reports("process_killed")}


async def test_a_second_signal_is_handed_on_and_a_third_kills(tmp_path: Path) -> None:
    """Members may have a long grace; what had to be killed shows in the status."""
    async with crew(tmp_path) as running:
        running.tell("stubborn")
        await running.until_ready(2)
        for asked in (2, 4):
            running.signal(signal.SIGTERM)
            await running.until(lambda: len(running.events("asked")) == asked)  # noqa: B023 - is asked before the next
        running.signal(signal.SIGINT)
        assert await running.ended() == 1


async def test_ctrl_c_reaches_each_process_once(tmp_path: Path) -> None:
    """The terminal sends it to the whole group of processes, and a second one would skip the grace."""
    async with crew(tmp_path, command=(sys.executable,)) as running:
        pids = await running.until_ready(2)
        assert {os.getpgid(pid) for pid in pids} == set(pids)
        running.signal(signal.SIGINT)
        assert await running.ended() == 0
        assert len(running.events("asked")) == 2


async def test_a_process_that_grows_too_large_is_replaced(tmp_path: Path) -> None:
    """It is asked to stop, not killed; its jobs end or go back."""
    async with crew(tmp_path, processes=1, memory_limit=80 << 20) as running:
        (large,) = await running.until_ready(1)
        running.tell("grow", large)
        await running.until_ready(2)
        (found,) = running.reports("process_too_large")
        assert int(str(found["memory"])) > 80 << 20
        assert running.events("asked") == running.events("ends") == [(1, large)]


async def test_a_process_of_twice_the_size_is_killed(tmp_path: Path) -> None:
    async with crew(tmp_path, processes=1, memory_limit=40 << 20) as running:
        (large,) = await running.until_ready(1)
        running.tell("stubborn")
        running.tell("grow", large)
        await running.until(lambda: running.reports("process_killed"))
        await running.until_ready(2)
        assert (1, large) not in running.events("ends")


async def test_orphans_are_reaped(tmp_path: Path) -> None:
    """As process 1 in a container the supervisor inherits them; none stays a zombie."""
    program = (sys.executable, "-c", SUBREAPER, sys.executable)
    async with crew(tmp_path, command=program, processes=1) as running:
        (pid,) = await running.until_ready(1)
        running.tell("orphan", pid)

        def orphan() -> int | None:
            lines = (tmp_path / "events").read_text().splitlines()
            return next((int(line.partition("orphaned:")[2]) for line in lines if "orphaned:" in line), None)

        await running.until(orphan)
        await running.until(lambda: not is_alive(orphan() or 0))
        assert is_running(pid)
