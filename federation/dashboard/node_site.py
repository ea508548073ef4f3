"""The dashboard of one node, from its parts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from db import ActionSource
from federation.admin.queues import all_queues
from federation.base.audit import Order, noted
from federation.dashboard.action_calls import action_calls
from federation.dashboard.actions_page import actions_part
from federation.dashboard.analytics_page import analytics_part
from federation.dashboard.blacklist_calls import blacklist_calls
from federation.dashboard.blacklist_page import blacklist_part
from federation.dashboard.bulk_page import bulk_part
from federation.dashboard.delivery_calls import delivery_calls
from federation.dashboard.delivery_pages import delivery_part
from federation.dashboard.findings import Examinations
from federation.dashboard.import_pages import ImportPages
from federation.dashboard.live_page import live_part
from federation.dashboard.orders import command
from federation.dashboard.overview_calls import overview_calls
from federation.dashboard.overview_page import overview_part
from federation.dashboard.scheduler_page import SchedulerPages
from federation.dashboard.server_calls import server_calls
from federation.dashboard.server_pages import server_part
from federation.dashboard.servers_page import servers_part
from federation.dashboard.texts_page import texts_part
from federation.dashboard.trouble import told
from workers import Queue
from workers.dashboard.access import Access
from workers.dashboard.catalog import QueueCatalog
from workers.dashboard.feed import INTERVAL
from workers.dashboard.queue_pages import queue_part
from workers.dashboard.site import Site, SitePart
from workers.dashboard.throttle import LoginThrottle
from workers.dashboard.visit import ActionTaken

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

TEMPLATES: Final = "federation.dashboard"


class NodeSite:
    """The dashboard of a node, whose connections and queues it uses: close this first.

    What deliveries say is shown only with `shows_texts`, to operators who ask for it.
    """

    def __init__(
        self,
        federation: Federation,
        *,
        access: Access,
        throttle: LoginThrottle | None = None,
        interval: timedelta = INTERVAL,
        shows_texts: bool = False,
    ) -> None:
        self._federation = federation
        self._shows_texts = shows_texts
        self._examinations = Examinations(federation)
        self._scheduler = SchedulerPages(federation)
        self._imports = ImportPages(federation)
        self.site = Site(
            self._parts(),
            title=urlsplit(federation.own_url or "").netloc or "This node",
            access=access,
            teller=told,
            record=self._record,
            throttle=throttle,
            interval=interval,
        )

    async def close(self) -> None:
        """End the streams, and what the pages have begun."""
        await self.site.close()
        await self._examinations.close()
        await self._scheduler.close()
        await self._imports.close()

    def _parts(self) -> list[SitePart]:
        federation, queues = self._federation, QueueCatalog(all_queues(self._federation))
        return [
            SitePart(templates=TEMPLATES),
            overview_part(federation, queues, self._examinations),
            servers_part(federation),
            server_part(federation),
            delivery_part(federation, shows_texts=self._shows_texts),
            texts_part(federation) if self._shows_texts else SitePart(),
            bulk_part(federation),
            live_part(federation),
            queue_part(queues, command=_queue_command, of_crons=_cron_command),
            self._scheduler.part(),
            blacklist_part(federation, self._imports),
            actions_part(federation),
            analytics_part(federation),
            SitePart(
                calls=(
                    *overview_calls(federation, queues, self._examinations),
                    *server_calls(federation),
                    *delivery_calls(federation),
                    *blacklist_calls(federation),
                    *self._scheduler.calls(),
                    *action_calls(federation),
                )
            ),
        ]

    async def _record(self, done: ActionTaken) -> None:
        """Write into the audit log what was done on the queues' pages; the node's own pages do that as they act."""
        source = ActionSource.API if done.by_api else ActionSource.DASHBOARD
        arguments = {"subject": done.subject, "problem": done.problem}
        order = Order(actor=done.by, source=source, action=done.action, arguments=arguments)
        note = noted(order, affected=done.affected)
        await self._federation.database.transact(lambda connection: connection.execute(note))


def _queue_command(verb: str, queue: Queue, ids: Sequence[str]) -> str:
    """Return the command that does the same; for single jobs there is none, and Python does it."""
    name = queue.storage.queue
    if verb in ("pause", "resume"):
        return command("queues", verb, name.removeprefix("federation-"))
    shown = ", ".join(repr(job_id) for job_id in ids[:3]) + (", ..." if len(ids) > 3 else "")
    return f"await queue.manage.{verb}([{shown}])  # in Python, on the queue {name!r}"


def _cron_command(verb: str, queue: Queue, cron: str) -> str:
    """Return the Python that does the same: the node's command has none for it."""
    method = "run_now" if verb == "run" else verb
    return f"await queue.crons.{method}({cron!r})  # in Python, on the queue {queue.storage.queue!r}"
