"""The versions of journals. A journal is of the lowest one that can say what is, or was, in it.

What a version does not know it would take for damage. So the step that first needs a newer one replaces the journal by
one of that version, which processes of older versions leave alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from workers.jobs import Completed, Continued, NewJob, Settlement

FIRST: Final = 1
WITH_DEPENDENTS: Final = 2
"""There are jobs that wait for others."""
WITH_LIMITS: Final = 3
"""There are limits, jobs with limit keys, fair keys or a priority above the default, or crons."""
NEWEST: Final = WITH_LIMITS

_WITH_NEXT: Final = (Completed, Continued)


def version_for(jobs: Iterable[NewJob]) -> int:
    """Return which version a journal needs that has these jobs."""
    version = FIRST
    for job in jobs:
        if job.limit_key is not None or job.fair_key is not None or job.priority < 0:
            return WITH_LIMITS
        if job.after:
            version = WITH_DEPENDENTS
    return version


def version_after(settlements: Iterable[Settlement]) -> int:
    """Return which version a journal needs that has what follows from these."""
    following = [one.then for one in settlements if isinstance(one, _WITH_NEXT) and one.then is not None]
    return version_for(following) if following else FIRST
