"""An action on more deliveries than a page waits for: a job of the node, how far it is, and an end to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from starlette.responses import Response

from db import BulkVerb
from federation.admin.deliveries.bulk_jobs import BulkJobs, BulkProgress
from federation.dashboard.delivery_pages import DELIVERIES
from workers.dashboard.feed import Fragments, LiveSource, Parameters
from workers.dashboard.rendering import Templates
from workers.dashboard.site import SitePart
from workers.dashboard.text import grouped
from workers.dashboard.visit import Confirmation, Refusal, Visit

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

PAGE: Final = "/bulk"
_DOING: Final = {
    BulkVerb.RETRY: "Retrying deliveries",
    BulkVerb.DROP: "Dropping deliveries",
    BulkVerb.IMPORT: "Importing rules",
}


def bulk_address(job_id: int) -> str:
    """Return the page of a bulk job."""
    return f"{PAGE}?{urlencode({'id': job_id})}"


def bulk_part(federation: Federation) -> SitePart:
    """Return the page."""
    jobs = BulkJobs(federation)

    async def found(text: str) -> BulkProgress:
        job = await jobs.progress(int(text)) if text.isdecimal() and len(text) < 19 else None
        if job is None:
            raise Refusal(404, "There is no such job, or it ended long ago.")
        return job

    async def page(visit: Visit) -> Response:
        job = await found(visit.query.get("id", ""))
        shown = {"here": DELIVERIES.path, "heading": _DOING[job.verb], **_shown(job)}
        return visit.page("bulk.html", shown, live="bulk", parameters=(("id", str(job.id)),))

    async def cancel(visit: Visit) -> Response:
        job = await found(visit.field("id"))
        if not visit.is_confirmed:
            left = "" if job.total is None else f" {grouped(max(job.total - job.done, 0))} rows are left."
            asked = Confirmation(
                question="End this job where it is?",
                rows=f"What it has done stays done.{left}",
                verb="End it",
                back=bulk_address(job.id),
                is_grave=True,
            )
            return visit.confirm(asked)
        ended = await jobs.cancel(job.id)
        await visit.record("bulk cancel", str(job.id), int(ended))
        return visit.back(bulk_address(job.id), "It ends within seconds." if ended else "It had ended before.")

    def live(templates: Templates) -> LiveSource:
        async def read(parameters: Parameters) -> Fragments:
            job = await found(dict(parameters).get("id", ""))
            return {"bulk-live": templates.render("parts/bulk.html", **_shown(job))}

        return read

    return SitePart(pages={PAGE: page}, actions={"/bulk/cancel": cancel}, live={"bulk": live})


def _shown(job: BulkProgress) -> Mapping[str, object]:
    share = 0.0 if not job.total else min(job.done / job.total, 1.0)
    return {"job": job, "share": 1.0 if job.finished_at is not None and job.error is None else share}
