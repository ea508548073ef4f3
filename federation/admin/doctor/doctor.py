"""Examines everything that a node needs, once: what is in order, what is not, and what to do about it.

Each check is independent and changes nothing, so the doctor may run at any time, beside a running node.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from db.errors import local_cause
from db.poolers import LentSessionsError
from federation.admin.doctor import checks, time_checks
from federation.admin.doctor.activitypub_checks import actors, own_actor, received
from federation.admin.doctor.checks import Found, Verdict, failure, given_up, queue_setting
from federation.base.errors import ConfigurationError, NoNodeHere, Unreachable
from federation.base.settings.misspelt import without_effect
from federation.base.settings.reach import PATIENCE
from federation.base.settings.settings import Settings
from federation.runtime.composition import Federation
from workers import StorageError, StorageUnavailable, WorkersError

CLOSING: Final = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found, and what to do about it."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""


async def examine() -> list[Finding]:
    """Run every check on the node that this process's environment and working directory describe."""
    return [
        *(Finding(check="settings", verdict=Verdict.WARNING, found=told, advice="mend or remove it")
          for told in without_effect()),
        *await _examine_settings(),
    ]  # fmt: skip


async def _examine_settings() -> list[Finding]:
    try:
        settings = Settings.load_node()
    except NoNodeHere as nothing:
        return [Finding(check="settings", verdict=Verdict.FAILURE, found=nothing.found, advice=nothing.advice)]
    except ConfigurationError as error:
        return [
            Finding(check="settings", verdict=Verdict.FAILURE, found=problem, advice="mend .env or the environment")
            for problem in error.problems
        ]
    federation = Federation(settings)
    try:
        found = [Finding(check="settings", verdict=Verdict.OK, found=f"this node is {federation.own_url}")]
        found += [Finding(check="keys", verdict=Verdict.OK, found="both pairs fit together")]
        return found + await examine_node(federation)
    finally:
        with contextlib.suppress(TimeoutError):  # what does not answer may take long to close, too
            async with asyncio.timeout(CLOSING.total_seconds()):
                await federation.close()


async def examine_node(federation: Federation) -> list[Finding]:
    """Run every check of a node whose settings are in order.

    They run side by side: what does not answer costs its patience once, not once for each check.
    """
    until = asyncio.get_running_loop().time() + PATIENCE.total_seconds()
    look = partial(_run, federation=federation, until=until)
    async with asyncio.TaskGroup() as group:
        has_actors = federation.activitypub is not None
        queues_, server, files, discover = (
            group.create_task(look(check, of))
            for check, of in (
                ("queues", checks.queues),
                ("storage", checks.queue_server),
                ("open files", checks.open_files),
                ("/discover", checks.discover),
            )
        )
        database = await look("database", checks.database)
        of_database = [
            group.create_task(look(check, of)) if database.verdict is not Verdict.FAILURE else None
            for check, of in (
                ("writes", checks.writes),
                ("host", checks.host),
                ("peer keys", checks.known_keys),
                ("sharing", checks.sharing),
                ("proxies", checks.proxies),
                ("clock", time_checks.clock),
                ("scheduler", time_checks.scheduler),
                ("sweeps", time_checks.sweeps),
                ("backlog", checks.backlog),
                ("given up", given_up),
                ("claims", checks.claims),
                *(_OF_ACTORS if has_actors else ()),
            )
        ]
    writes, host, known_keys, *others = of_database
    tasks = [writes, host, known_keys, queues_, server, files, *others, discover]
    return [database, *(task.result() for task in tasks if task is not None)]


_OF_ACTORS: Final = (("actors", actors), ("own actor", own_actor), ("received", received))


async def _run(
    check: str, look: Callable[[Federation], Awaitable[Found]], *, federation: Federation, until: float
) -> Finding:
    try:
        async with asyncio.timeout_at(until):
            found = await look(federation)
    except Unreachable as error:
        found = failure(str(error), "start it, or let us use it, or mend the setting")
    except LentSessionsError as error:
        found = failure(str(error), "mend DATABASE_URL")
    except StorageUnavailable as error:
        found = failure(str(error), f"is {queue_setting(federation)} right, and the server up?")
    except StorageError as error:
        found = failure(str(error), "`federation upgrade`, if it has no tables yet")
    except WorkersError as error:
        found = failure(str(error), f"mend {queue_setting(federation)}")
    except TimeoutError:
        text = f"no answer within {PATIENCE.total_seconds():.0f} s"
        found = failure(text, "is the setting right, and the server up and not overloaded?")
    except SQLAlchemyError as error:
        kind = type(error).__name__
        found = failure(f"the database failed: {local_cause(error) or kind}", "look at the database's own log")
    return Finding(check=check, verdict=found.verdict, found=found.found, advice=found.advice)


def worst(findings: Sequence[Finding]) -> Verdict:
    """Return the worst verdict among the findings."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index)
