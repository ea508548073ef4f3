"""Our calls of BullMQ's scripts, against those of the installed package's own argument builders."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import bullmq
import msgpack
import pytest
from bullmq.redis_connection import SCRIPT_DEFINITIONS, RedisConnection
from bullmq.scripts import Scripts
from redis.asyncio import Redis

from workers.storage.bullmq.lua_files import SCRIPTS, packaged, scripts
from workers.storage.bullmq.scripts import BullMQScripts, Command, Finish

OURS = BullMQScripts("q", "bull")
NOW = 1_800_000_000_000


class Recorder:
    """The package's `Scripts`, writing down which script it would call with what; a queue for the package's `Job`."""

    qualifiedName = "bull:q"  # noqa: N815 - the package's spelling

    def __init__(self) -> None:
        self.opts: dict[str, object] = {}
        self.backend = self
        self.redisConnection = RedisConnection(Redis(decode_responses=True), skipVersionCheck=True)
        self.redisConnection.commands = {name: self._record(name) for name in SCRIPT_DEFINITIONS}
        self.redisConnection.version = "7.0.0"
        self.scripts: Any = Scripts("bull", "q", self.redisConnection)
        self.called: list[object] = []

    def _record(self, name: str) -> Callable[..., Coroutine[None, None, int]]:
        async def call(keys: Sequence[str], args: Sequence[object], client: object = None) -> int:
            self.called = [scripts()[name].sha, len(keys), *keys, *args]
            return 0

        return call

    def job(self, **options: object) -> Any:
        return bullmq.Job(self, "name", {"x": 1}, {"timestamp": NOW, "jobId": "id", **options})


CASES: dict[str, tuple[Command, Callable[[Recorder], Any]]] = {
    "delay": (
        OURS.delay("id", "t", delay_ms=50, counted=True, fields={"a": "b"}, now_ms=NOW),
        lambda their: their.scripts.moveToDelayed("id", NOW, 50, "t", {"fieldsToUpdate": {"a": "b"}}),
    ),
    "delay uncounted": (
        OURS.delay("id", "t", delay_ms=50, counted=False, fields={}, now_ms=NOW),
        lambda their: their.scripts.moveToDelayed("id", NOW, 50, "t", {"skipAttempt": True}),
    ),
    "retry": (
        OURS.retry("id", "t", lifo=False, fields={"a": "b"}, now_ms=NOW),
        lambda their: their.scripts.retryJob("id", False, "t", {"fieldsToUpdate": {"a": "b"}}),
    ),
    "retry first": (
        OURS.retry("id", "t", lifo=True, fields={"a": "b"}, now_ms=NOW),
        lambda their: their.scripts.retryJob("id", True, "t", {"fieldsToUpdate": {"a": "b"}}),
    ),
    "extend": (
        OURS.extend(["a", "b"], ["t", "u"], 30_000),
        lambda their: their.scripts.extendJobLocks(["a", "b"], ["t", "u"], 30_000),
    ),
    "progress": (OURS.progress("id", '{"x":1}'), lambda their: their.scripts.updateProgress("id", {"x": 1})),
    "suspend": (OURS.suspend("id", "t", NOW), lambda their: their.scripts.moveToWaitingChildren("id", "t", {})),
    "remove scheduler": (OURS.remove_scheduler("s"), lambda their: their.scripts.removeJobScheduler("s")),
    "state": (OURS.state("id"), lambda their: their.scripts.getState("id")),
    "remove": (OURS.remove("id")[1], lambda their: their.scripts.remove("id", False)),
    "pause": (OURS.pause(), lambda their: their.scripts.pause(True)),
    "resume": (OURS.resume(), lambda their: their.scripts.pause(False)),
    "drain": (OURS.drain(), lambda their: their.scripts.drain(True)),
    "clean": (OURS.clean("failed", NOW, 7), lambda their: their.scripts.cleanJobsInSet("failed", 0, 7)),
    "reprocess": (
        OURS.reprocess("id"),
        lambda their: their.scripts.reprocessJob(
            their.job(), "failed", {"resetAttemptsMade": True, "resetAttemptsStarted": True}
        ),
    ),
}


@pytest.mark.parametrize(("ours", "call_theirs"), CASES.values(), ids=CASES.keys())
async def test_arguments_are_the_packages_own(ours: Command, call_theirs: Callable[[Recorder], Any]) -> None:
    """The script, its keys and its arguments are those the package would pass."""
    their = Recorder()
    await call_theirs(their)
    assert _readable(ours[1:]) == _readable(their.called)


@pytest.mark.parametrize(
    ("script", "options"),
    [("addStandardJob", {}), ("addDelayedJob", {"delay": 70}), ("addPrioritizedJob", {"priority": 3})],
)
async def test_adding_passes_what_the_script_reads(script: str, options: dict[str, object]) -> None:
    """The package adds a time that its scripts do not read; the rest is the same."""
    their = Recorder()
    job = their.job(**options)
    await getattr(their.scripts, script)(job, NOW)
    ours = _readable(OURS.add("id", "name", '{"x":1}', job.opts, NOW)[1:])
    assert ours == _readable(their.called[:-1])


async def test_adding_with_a_parent_passes_what_the_package_passes() -> None:
    """A parent that is a child itself says of its parent what the package's job says."""
    their = Recorder()
    job = their.job(parent={"id": "p", "queue": "bull:other"}, failParentOnFailure=True)
    await their.scripts.addParentJob(job)
    options = {"fpof" if name == "failParentOnFailure" else name: value for name, value in job.opts.items()}
    parent = {"id": "p", "queueKey": "bull:other", "fpof": True}
    command = OURS.add("id", "name", '{"x":1}', options, NOW, parent=parent, awaits=True)
    assert _readable(command[1:]) == _readable(their.called)


async def test_claiming_passes_what_the_package_passes() -> None:
    """The keys and times are the package's; our script makes the rest of its arguments."""
    their = Recorder()
    await their.scripts.moveToActive("t", {"lockDuration": 30_000})
    ours, theirs = _readable(OURS.claim("w:", 30_000, NOW, count=2)[2:]), _readable(their.called[1:])
    assert ours == [*theirs[:-1], "w:", 30_000, 2, 0]


@pytest.mark.parametrize(("target", "value"), [("completed", '{"x":1}'), ("failed", "why")])
async def test_finishing_passes_what_the_script_reads(target: str, value: str) -> None:
    """Ends of jobs are the package's calls but for options that its script does not read."""
    their = Recorder()
    build = their.scripts.moveToCompletedArgs if target == "completed" else their.scripts.moveToFailedArgs
    keys, arguments = build(their.job(attempts=4), {"x": 1} if target == "completed" else value, {"age": 9}, "t", False)
    ending = Finish(raw="id", token="t", target=target, value=value, keep={"age": 9}, max_attempts=4, fields={})
    ours, theirs = _readable(OURS.finish(ending, NOW)[3:-1]), _readable([*keys, *arguments])
    assert ours[:-1] == theirs[:-1]
    assert ours[-1].items() <= theirs[-1].items()


@pytest.mark.parametrize(("looping", "name"), [("claimMany", "moveToActive"), ("exchange", "moveToFinished")])
def test_a_loop_over_a_script_defines_its_functions_once(looping: str, name: str) -> None:
    """The package's functions come before the one that runs for each job, and read nothing of one job."""
    functions, _, loop = scripts()[looping].text.partition("local function theirs(KEYS, ARGV)\n")
    theirs, _, _ = packaged(name).text.partition("\nend\nlocal answer")
    _, _, theirs = theirs.partition("local function theirs()\n")
    definition = re.compile(r"^local (?:function \w+|\w+ = function).*", re.M)
    assert definition.findall(functions) == definition.findall(theirs)
    assert "\nlocal function" not in loop.partition("local KINDS")[0].partition("-- Return what is wrong")[0]
    assert not re.search(r"\b(KEYS|ARGV)\b", functions)


async def test_recovering_passes_what_the_package_passes() -> None:
    """The package's limit of stalls is the larger of two, which follow for the script behind the package's."""
    their = Recorder()
    await their.scripts.moveStalledJobsToWait(3, 1)
    for ours, foreign in ((3, 1), (1, 3)):
        called = _readable(OURS.recover(ours, NOW, foreign=foreign)[1][1:])
        assert (called[:-2], called[-2:]) == (_readable(their.called), [ours, foreign])


async def test_scheduling_passes_what_the_package_passes() -> None:
    """The lines in front have one argument of their own."""
    their = Recorder()
    await their.scripts.updateJobSchedulerNextMillis("s", NOW, '{"x":1}', {"attempts": 3}, "id")
    command = OURS.schedule("s", "id", '{"x":1}', {"attempts": 3}, next_ms=NOW, why_not="", now_ms=NOW)
    assert _readable(command[1:]) == [*_readable(their.called), ""]


async def test_declaring_passes_what_the_package_passes() -> None:
    """The lines in front have three arguments of their own."""
    their, recurs, options = Recorder(), {"name": "n", "every": 5}, {"attempts": 3, "delay": 1}
    await their.scripts.addJobScheduler("s", NOW, '{"x":1}', {"attempts": 3}, recurs, options)
    command = OURS.add_scheduler(
        "s", '{"x":1}', {"attempts": 3}, recurs, options, next_ms=NOW, now_ms=NOW, seen=("a", "b", "c")
    )
    assert _readable(command[1:]) == [*_readable(their.called), "a", "b", "c"]


def test_continuing_is_delaying_with_more_to_say() -> None:
    """The script in front has arguments of its own behind those of BullMQ's."""
    delaying = OURS.delay("id", "t", delay_ms=50, counted=False, fields={"a": "b"}, now_ms=NOW)
    continuing = OURS.go_on("id", "t", delay_ms=50, fields={"a": "b"}, over=["c", "d"], now_ms=NOW)
    assert continuing[2:] == (*delaying[2:], "", "c", "d")
    assert scripts()["continue"].text.endswith(packaged("moveToDelayed").text)
    assert scripts()["moveToDelayed"].text.endswith(packaged("moveToDelayed").text)


def test_promoting_passes_what_the_script_reads() -> None:
    """The package passes four keys too many; ours end with the script's."""
    keys, arguments = Recorder().scripts.promoteArgs("id")
    assert OURS.promote("id")[3:] == (*keys[:9], *arguments)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_command_has_as_many_keys_as_its_script(name: str) -> None:
    """The number in the script's file name is the number of keys its header lists."""
    script = scripts()[name]
    assert f"KEYS[{script.key_count}]" in script.text
    assert f"KEYS[{script.key_count + 1}]" not in script.text


def _readable(parts: Sequence[object]) -> list[Any]:
    """Packed arguments opened, and every time the same."""
    opened = [msgpack.unpackb(part) if isinstance(part, bytes) else part for part in parts]
    return ["now" if isinstance(part, int) and part > 1_000_000_000_000 else part for part in opened]
