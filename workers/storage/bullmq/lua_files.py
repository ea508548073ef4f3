"""BullMQ's own Lua, read from the installed `bullmq` package, with ours in front of it and behind it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from bullmq.redis_connection import basePath, loadScript

from workers.errors import StorageError
from workers.storage.on_redis.scripts import joined

SCRIPTS: Final = (
    *("addStandardJob", "addDelayedJob", "addPrioritizedJob", "addParentJob", "moveToWaitingChildren"),
    *("moveToActive", "moveToFinished", "moveToDelayed", "retryJob", "moveJobFromActiveToWait", "extendLocks"),
    *("moveStalledJobsToWait", "getStateV2", "removeJob", "reprocessJob", "promote", "pause", "drain"),
    *("cleanJobsInSet", "updateProgress", "addJobScheduler", "updateJobScheduler", "removeJobScheduler", "addLog"),
)

FRONTS: Final = {
    "moveToActive": "before_claiming",
    "moveToFinished": "before_finishing",
    "moveToWaitingChildren": "before_suspending",
    "moveToDelayed": "before_delaying",
    "retryJob": "before_retrying",
    "moveJobFromActiveToWait": "before_releasing",
    "moveStalledJobsToWait": "before_recovering",
    "extendLocks": "before_renewing",
    "addJobScheduler": "before_declaring",
    "updateJobScheduler": "before_scheduling",
    "removeJobScheduler": "before_unscheduling",
    "drain": "before_draining",
}
"""The Lua in front of a script of BullMQ, so that the script does not begin what it cannot end."""

BEHIND: Final = {
    "addStandardJob": ("string.sub(KEYS[1], 1, -5)", "park"),
    "moveToActive": ("ARGV[1]", "park"),
    "moveToFinished": ("ARGV[7]", "park", "wake"),
    "moveToDelayed": ("ARGV[1]", "wake"),
    "retryJob": ("ARGV[1]", "park"),
    "moveJobFromActiveToWait": ("string.sub(KEYS[1], 1, -7)", "park"),
    "moveStalledJobsToWait": ("ARGV[2]", "park", "origin", "give_up"),
    "moveToWaitingChildren": ("ARGV[5]", "wake"),
    "addJobScheduler": ("ARGV[8]", "park"),
    "updateJobScheduler": ("ARGV[6]", "park"),
    "reprocessJob": ("string.sub(KEYS[4], 1, -5)", "park"),
    "promote": ("ARGV[1]", "park"),
    "removeJob": ("ARGV[3]", "wake"),
    "pause": ("string.sub(KEYS[3], 1, -5)", "park"),
    "drain": ("ARGV[1]", "spare"),
}
"""The Lua behind a script of BullMQ, whose answer stays: how it knows the prefix of the keys, then its files."""
IN_FRONT: Final = frozenset({"moveJobFromActiveToWait", "moveStalledJobsToWait"})
"""The scripts that put jobs in front of those that wait."""

RETRIED: Final = '"jobId", ARGV[4], "prev", "active"', '"jobId", ARGV[4], "prev", "active", "failed", "1"'
"""What `retryJob` tells, and what it tells here, so that our listeners know a retry from a release."""
STOPPED: Final = 'ARGV[3], ARGV[4], "prev", "active"', 'ARGV[3], ARGV[4], "prev", ARGV[11]'
"""What `moveToFinished` tells, and what `stop` does: where a job was that never was active."""

DEFINITION: Final = re.compile(r"^local (?:function|\w+ = function) .*?^end$", re.MULTILINE | re.DOTALL)
"""A function of BullMQ's Lua, which none of the lines outside of functions is needed for but that of `rcall`."""

BEFORE_CONTINUING: Final = """
-- In front of BullMQ's moveToDelayed, whose keys and arguments these are: its job did not fail, and goes on later.
-- ARGV[10...]: fields of what is over.
if redis.call('GET', KEYS[5] .. ':lock') == ARGV[4] then
  if not redis.call('LPOS', KEYS[2], ARGV[3], 'RANK', -1) then
    return -3
  end
  redis.call('HDEL', KEYS[5], unpack(ARGV, 10))
  redis.call('XADD', KEYS[6], 'MAXLEN', '~', 10000, '*', 'event', 'continued', 'jobId', ARGV[3])
end
"""


class BullMQScript:
    """A Lua script: its text, the SHA-1 it is called by, and how many keys it takes."""

    def __init__(self, text: str, key_count: int) -> None:
        self.text = text
        self.key_count = key_count
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def own(*parts: str) -> str:
    """Return Lua of ours: the files as they are, one after the other."""
    return joined(__package__, "foreign", *parts)


def packaged(name: str, before: str = "", telling: tuple[str, str] | None = None) -> BullMQScript:
    """Return one of BullMQ's Lua files, whose name ends with the number of keys.

    Lines of ours may come `before` it, and what `BEHIND` names comes behind it. `telling` replaces what it tells.
    """
    text, key_count = _read(name)
    if telling is not None:
        if text.count(telling[0]) != 1:
            raise StorageError(f"the installed bullmq package tells something else in {name!r}; use bullmq 3.4")
        text = text.replace(*telling)
    if name in BEHIND:
        prefix, *parts = BEHIND[name]
        head = f"local answer, P, IN_FRONT = theirs(), {prefix}, {str(name in IN_FRONT).lower()}\n"
        text = f"local function theirs()\n{text}\nend\n{head}{joined(__package__, *parts)}return answer\n"
    return BullMQScript(before + text, key_count)


def looped(name: str, key_count: int, *parts: str) -> BullMQScript:
    """Return a script of ours that calls one of BullMQ's as `theirs(KEYS, ARGV)` for each of many jobs.

    BullMQ's Lua defines dozens of functions; here it does so once, not for each job. Of the `parts`, the last makes
    `answers`, and what `BEHIND` names comes behind it, once.
    """
    text, _ = _read(name)
    functions = "\n".join(("local rcall = redis.call", joined(__package__, "opened"), *DEFINITION.findall(text)))
    theirs = f"local function theirs(KEYS, ARGV)\n{DEFINITION.sub('', text)}\nend\n"
    behind = joined(__package__, *BEHIND[name][1:])
    return BullMQScript(f"{functions}\n{theirs}{own('kinds', 'each', *parts)}{behind}return answers\n", key_count)


def _read(name: str) -> tuple[str, int]:
    """Return the text of one of BullMQ's Lua files, and its number of keys."""
    found = sorted(Path(basePath, "commands").glob(f"{name}-*.lua"))
    if len(found) != 1:
        raise StorageError(f"the installed bullmq package has {len(found)} scripts named {name!r}; use bullmq 3.4")
    return loadScript(found[0].name), int(found[0].stem.rpartition("-")[2])


@cache
def scripts() -> Mapping[str, BullMQScript]:
    """Return every script that this storage calls, by BullMQ's name for it.

    `continue` and `stop` are ours in front of one of them; `removeWaiting`, `guard`, `owner`, `fitForFlows`,
    `cancelled` and `declareLimits` are ours.
    """
    fronts = {name: own("kinds", front) for name, front in FRONTS.items()}
    fronts["moveToFinished"] = own("kinds", "unfit", FRONTS["moveToFinished"])
    ours = {
        "addMany": looped("addStandardJob", 9, "add_many"),
        "claimMany": looped("moveToActive", 11, "bull", "claim_many"),
        "exchange": looped("moveToFinished", 13, "faults", "unfit", "exchange"),
        "stop": packaged("moveToFinished", own("kinds", "unfit", FRONTS["moveToFinished"], "before_stopping"), STOPPED),
        "retryJob": packaged("retryJob", fronts["retryJob"], RETRIED),
        "cancelled": BullMQScript(joined(__package__, "cancelled"), 2),
        "continue": packaged("moveToDelayed", fronts["moveToDelayed"] + BEFORE_CONTINUING),
        "removeWaiting": BullMQScript(joined(__package__, "remove_waiting"), 8),
        "guard": BullMQScript(own("kinds", "bull", "guarded", "quarantine", "faults", "guard"), 1),
        "owner": BullMQScript(own("sample", "bull", "owner"), 1),
        "fitForFlows": BullMQScript(own("kinds", "fit_for_flows"), 1),
        "declareLimits": BullMQScript(own("kinds", "declare_limits"), 3),
    }
    return {name: packaged(name, fronts.get(name, "")) for name in SCRIPTS} | ours
