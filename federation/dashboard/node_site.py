"""The dashboard of one node, from its parts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from db import ActionSource
from db.errors import is_outage, local_cause
from federation.admin.queues import all_queues
from federation.base.audit import Order, noted
from federation.base.errors import ConfigurationError, Unreachable
from federation.dashboard import activity_pages, blacklist_page, delivery_calls, servers_page
from federation.dashboard.actions_page import actions_part
from federation.dashboard.analytics_page import analytics_part
from federation.dashboard.blacklist_page import blacklist_part
from federation.dashboard.bulk_page import bulk_part
from federation.dashboard.delivery_pages import delivery_part
from federation.dashboard.findings import Examinations
from federation.dashboard.import_pages import ImportPages
from federation.dashboard.live_page import live_part
from federation.dashboard.orders import command
from federation.dashboard.overview_page import overview_part
from federation.dashboard.scheduler_page import SchedulerPages
from federation.dashboard.server_pages import server_part
from federation.dashboard.servers_page import servers_part
from federation.dashboard.texts_page import texts_part
from workers import Queue
from workers.dashboard import catalog
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
CALLS: Final = (servers_page, delivery_calls, activity_pages, blacklist_page)


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
            teller=self._told,
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
            activity_pages.activity_part(federation),
            activity_pages.received_part(federation),
            bulk_part(federation),
            live_part(federation),
            queue_part(queues, command=_queue_command, of_crons=_cron_command),
            self._scheduler.part(),
            blacklist_part(federation, self._imports),
            actions_part(federation),
            analytics_part(federation),
            SitePart(calls=[route for each in CALLS for route in each.api.routes], gives=(federation,)),
        ]

    def _told(self, error: Exception) -> str | None:
        """Say what is wrong; None for what is a fault of ours."""
        if isinstance(error, SQLAlchemyError):
            return database_away(error, self._federation.settings.database_url.get_secret_value())
        if isinstance(error, Unreachable | ConfigurationError):
            return _sentence(str(error))
        return catalog.told(error)

    async def _record(self, done: ActionTaken) -> None:
        """Write into the audit log what was done on the queues' pages; the node's own pages do that as they act."""
        source = ActionSource.API if done.by_api else ActionSource.DASHBOARD
        arguments = {"subject": done.subject, "problem": done.problem}
        order = Order(actor=done.by, source=source, action=done.action, arguments=arguments)
        note = noted(order, affected=done.affected)
        await self._federation.database.transact(lambda connection: connection.execute(note))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


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


AWAY: Final = "The database does not answer"


def database_away(error: SQLAlchemyError, url: str) -> str:
    """Say why a page shows nothing, by the error's type; its text may quote a row. The password is not in it."""
    cause, kind = local_cause(error), type(error.__cause__ or error).__name__
    if cause is None and not is_outage(error):
        return (
            f"The database answers, and refuses what this page asks ({kind}). {_which(url)}."
            " `federation upgrade` makes tables that it lacks, `federation doctor` looks at them."
        )
    why = f": {cause.rstrip('?')}" if cause else f" ({kind})"
    return f"{AWAY}{why}. {_which(url)}: is it there, and may this process use it? `federation doctor` looks, too."


def _which(text: str) -> str:
    url = make_url(text)
    if url.get_backend_name() == "sqlite":
        return f"It is the file {Path(url.database or '').absolute()}, by DATABASE_URL"
    host = url.host or url.query.get("host", "this machine")
    return f"It is {url.database or 'that of its user'} at {host}:{url.port or 5432}, by DATABASE_URL"
