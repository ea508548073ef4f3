"""When there is something to do for whoever looks from time to time, by the database and the queues of a world."""

from __future__ import annotations

import contextlib
import math
import sqlite3

from federation.servers.link_rules import SKEW
from tests.simulation.database import Space
from tests.simulation.loop import Need
from tests.simulation.node import own_settings
from tests.simulation.plan import DAY
from tests.simulation.queue import Queues


class Needs:
    """When there is something to do for whoever looks from time to time."""

    space: Space
    queues: Queues
    """Both set before the loop runs."""

    def all(self) -> dict[str, Need]:
        return {
            "tending-LinkProbes.tick": Need(self._first_look, DAY),
            "tending-Releaser.tick": Need(lambda _: self.space.first_due(_RELEASED), DAY),
            "tending-Sightings.tick": Need(None, DAY),
            "tending-DatabaseClock.tick": Need(None, DAY),
            "sweep": Need(lambda _: min(self.space.first_due(_SWEPT), self._first_without_job()), DAY),
            "received": Need(lambda _: self._first_unhandled(), DAY),
            "range": Need(None, DAY),
            "purge": Need(None, 2 * DAY),
            "reap": Need(lambda _: self.queues.first_lease_end(), DAY),
            "tick": Need(lambda _: self.queues.first_recurrence(), DAY),
            "renew": Need(self._renewal, DAY),
            "look-for-unserved": Need(None, DAY),  # each process serves every name
        }

    def _first_look(self, now: float) -> float:
        """When the first look at a link is due; what was owed longer ago than ticks look back is left to sweeps."""
        probed, oldest = self.space.first_due(_PROBED), now - _SKEW
        return min((due for _, due in self.space.dues(_NEWS) if oldest <= due < probed), default=probed)

    def _first_without_job(self) -> float:
        """When the first ready delivery is missed in the queue."""
        dues = (due for job, due in self.space.dues(_READY) if not self.queues.has_open(job))
        return min(dues, default=math.inf)

    def _first_unhandled(self) -> float:
        """When the first activity of others is missed in the queue."""
        return min((due for job, due in self.space.dues(_RECEIVED) if not self.queues.has_task(job)), default=math.inf)

    def _renewal(self, _now: float) -> float:
        """When the first claim has lasted for a third of its lease, as long as workers go between two renewals."""
        return self.queues.first_lease_end() - own_settings().federation_lease.total_seconds() * 2 / 3


_SKEW = SKEW.total_seconds()
_FIRST_HELD = """NOT EXISTS (
    SELECT 1 FROM delivery_jobs AS former WHERE former.server_url = row.server_url
    AND former.wire = row.wire AND former.state = 'held'
    AND former.held_reason = 'server' AND (former.held_at < link.probed_at OR former.canary_at <= link.probed_at)
)"""
_PROBED = "SELECT min(next_probe_at) FROM server_links"
_NEWS = f"""
SELECT row.job_id, row.created_at FROM delivery_jobs AS row
JOIN server_links AS link ON link.server_url = row.server_url AND link.wire = row.wire
WHERE row.state = 'held' AND row.held_reason = 'server' AND link.state = 'down'
AND row.created_at > datetime(link.probed_at, '60 seconds') AND {_FIRST_HELD}
"""
_READY = """
SELECT job_id, datetime(coalesce(queued_at, created_at), iif(queued_at IS NULL, '30 seconds', '600 seconds'))
FROM delivery_jobs WHERE state = 'ready' AND settled_at IS NULL
"""
_RECEIVED = """
SELECT 'received-' || activity_hash || '.' || (attempts / 5), datetime(received_at, '60 seconds')
FROM activitypub_received AS row WHERE state = 'new' AND NOT EXISTS (
    SELECT 1 FROM activitypub_received AS older
    WHERE older.state = 'new' AND older.actor = row.actor AND older.number < row.number
)
"""
_RELEASED = "SELECT min(release_at) FROM server_links"
_SWEPT = f"""
SELECT min(moment) FROM (
    SELECT min(next_attempt_at) AS moment FROM delivery_jobs
    WHERE state = 'held' AND held_reason IN ('busy', 'ours', 'alone')
    UNION ALL
    SELECT coalesce(max(link.rest_until), min(link.since)) FROM delivery_jobs AS row
    JOIN server_links AS link ON link.server_url = row.server_url AND link.wire = row.wire
    WHERE row.state = 'held' AND row.held_reason IN ('rest', 'server') AND link.state = 'up'
    AND link.release_at IS NULL AND NOT link.operator_hold
    GROUP BY row.server_url, row.wire
    UNION ALL
    SELECT min(max(row.created_at, datetime(link.probed_at, '60 seconds'))) FROM delivery_jobs AS row
    JOIN server_links AS link ON link.server_url = row.server_url AND link.wire = row.wire
    WHERE row.state = 'held' AND row.held_reason = 'server' AND link.state = 'down' AND row.created_at > link.probed_at
    AND {_FIRST_HELD}
    UNION ALL
    SELECT min('2026-01-01 00:00:00') FROM delivery_jobs AS row JOIN blacklisted_servers AS rule
    ON rule.server_url = row.server_url WHERE row.state = 'held'
    UNION ALL
    SELECT '2026-01-01 00:00:00' WHERE NOT EXISTS (SELECT 1 FROM sweeps)
    UNION ALL
    SELECT max(datetime(min(created_at), '7 days'), coalesce((
        SELECT datetime(swept_at, spares_seconds || ' seconds') FROM sweeps
    ), '')) FROM delivery_jobs WHERE state = 'held'
)
"""


def note_sweep(space: Space) -> None:
    """Note the sweeps that were left out since the last one because they would have found nothing."""
    now = space.clock.now().strftime("%Y-%m-%d %H:%M:%S.%f")
    with contextlib.suppress(sqlite3.OperationalError):  # somebody is writing
        space.keeper.execute(_NOTED, (now, now, now))


_NOTED = """
UPDATE sweeps
SET spares_seconds = max(spares_seconds - 86400 * (julianday(?) - julianday(swept_at)), 0), swept_at = ?
WHERE julianday(?) BETWEEN julianday(swept_at) AND julianday(swept_at, '61 minutes')
"""
