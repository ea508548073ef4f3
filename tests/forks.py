"""`pytest --forks 6`: the tests in six processes that begin as forks of one that has imported and collected them.

Collecting takes ten seconds of CPU and more, and a worker of xdist does it anew; a fork begins with what was collected.
Their reports come back to the process that forks, which tells of them as if the tests had run there.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Final
from warnings import WarningMessage

import pytest

_CONTEXT: Final = multiprocessing.get_context("fork")


@dataclass(slots=True)
class Fork:
    """A process that runs tests, seen from the one that forked it."""

    number: int
    connection: Connection
    process: ForkProcess
    given: deque[int] = field(default_factory=deque)
    """Indices of the test that it runs and of the one that comes next: which fixtures to keep depends on that."""


class Forks:
    """The side that hands out tests: those of `together` in turn to one process, all others to whichever is free."""

    def __init__(self, count: int, together: str) -> None:
        self._count = count
        self._together = together
        self._forks: list[Fork] = []
        self._left: deque[int] = deque()
        self._left_to_first: deque[int] = deque()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or not session.items:
            return None  # pytest's own loop says what is the matter
        for index in sorted(range(len(session.items)), key=lambda index: not _takes_long(session.items[index])):
            together = session.items[index].nodeid.startswith(self._together)
            (self._left_to_first if together else self._left).append(index)
        session.config.pluginmanager.getplugin("terminalreporter").showfspath = False
        _directory(session.config)  # is made, and emptied, once
        gc.collect()
        gc.freeze()  # no fork need look through what all of them share
        try:
            self._run(session)
        finally:
            for fork in self._forks:
                fork.connection.close()  # it ends after its test
            for fork in self._forks:
                fork.process.join()
        return True

    def _run(self, session: pytest.Session) -> None:
        for number in range(self._count):
            self._begin(session, number)
        while self._forks:
            for connection in wait([fork.connection for fork in self._forks]):
                fork = next(fork for fork in self._forks if fork.connection is connection)
                try:
                    kind, told = fork.connection.recv()
                except (EOFError, ConnectionResetError):
                    self._forks.remove(fork)
                    fork.process.join()
                    self._ended(session, fork)
                else:
                    self._hear(session, fork, kind, told)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)

    def _begin(self, session: pytest.Session, number: int) -> None:
        ours, theirs = _CONTEXT.Pipe()
        others = [ours, *(fork.connection for fork in self._forks)]
        process = _CONTEXT.Process(target=_work, args=(session, number, theirs, others))
        process.start()
        theirs.close()
        fork = Fork(number, ours, process)
        self._forks.append(fork)
        for _ in range(2):
            self._give(fork)

    def _give(self, fork: Fork) -> None:
        own = self._left_to_first if fork.number == 0 else ()
        source = own or self._left
        # Half of the processes begin at the other end: what takes long starts servers and processes of its own, which a
        # machine that runs six such tests at once would hold up beyond their leases.
        take = source.pop if fork.number % 2 else source.popleft
        index = take() if source else None
        if index is not None:
            fork.given.append(index)
        _send(fork.connection, index)

    def _hear(self, session: pytest.Session, fork: Fork, kind: str, told: Any) -> None:
        hook = session.config.hook
        if kind == "done":
            fork.given.popleft()
            self._give(fork)
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=told)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=told)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "finish":
            hook.pytest_runtest_logfinish(**told)

    def _ended(self, session: pytest.Session, fork: Fork) -> None:
        """One that was killed by its test is replaced; one that broke after its last fails the run."""
        if not fork.given:
            if fork.process.exitcode:
                session.shouldfail = f"a process of tests ended with {fork.process.exitcode} after its last one"
            return
        item = session.items[fork.given.popleft()]
        said = f"the process that ran this test ended: {fork.process.exitcode}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        (self._left_to_first if fork.number == 0 else self._left).extendleft(fork.given)
        self._begin(session, fork.number)


def _takes_long(item: pytest.Item) -> bool:
    """It begins before others do, so that at the end nobody waits for it alone."""
    return item.get_closest_marker("timeout") is not None


class Reporting:
    """The side of a fork: what is said of its tests is sent."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        _send(self._connection, ("finish", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        _send(self._connection, ("report", data))

    def pytest_warning_recorded(
        self, warning_message: WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        warning_message.source = None  # what leaked cannot be sent
        told = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        _send(self._connection, ("warning", told))


def _work(session: pytest.Session, number: int, connection: Connection, others: Iterable[Connection]) -> None:
    """Run each test that is given when its next is known; end when there is none, or nobody who gives."""
    for other in others:
        other.close()
    _be_apart(session.config, number)
    session.config.pluginmanager.register(Reporting(session.config, connection))
    index = _next(connection)
    while index is not None:
        following = _next(connection)
        item = session.items[index]
        nextitem = None if following is None else session.items[following]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        _send(connection, ("done", None))
        index = following


def _send(connection: Connection, message: object) -> None:
    with contextlib.suppress(BrokenPipeError):  # who has ended is noticed when something is read
        connection.send(message)


def _next(connection: Connection) -> int | None:
    try:
        index: int | None = connection.recv()
    except (EOFError, ConnectionResetError):
        return None
    return index


def _be_apart(config: pytest.Config, number: int) -> None:
    """Nothing is said on the terminal; the files of captured output and of tests are this process's own."""
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    made = _directory(config) / f"fork-{number}"
    made.mkdir(mode=0o700, exist_ok=True)
    config._tmp_path_factory._basetemp = made  # type: ignore[attr-defined]  # so that no two make directories in one


def _directory(config: pytest.Config) -> Path:
    found: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # as the fixture of that name does
    return found
