"""The queues of earlier releases, on every storage: what waits in them is done, and what they keep can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.releases.queues import KINDS, QUEUE, WAITING, Place, with_place, written
from tests.patience import until
from workers import Job, JobState, Queue
from workers.storage import open_storage

VERSIONS = sorted({file.name.split("-")[1] for file in written("", "").parent.glob("queue-*.txt")})


async def work_off(place: Place) -> None:
    """A queue of today takes the place of the release's, and nothing has to be done for it."""
    ran: list[str] = []

    def work(job: Job) -> None:
        ran.append(job.payload)

    queue = Queue(open_storage(place.url, queue=QUEUE))
    queue.execute({"work": work})
    async with queue:
        assert await queue.get_result("done") == "this is done"
        await until(lambda: len(ran) == len(WAITING))
        assert ran == [*WAITING]
        refused, later = await queue.get_job("refused"), await queue.get_job("later")
        assert refused is not None
        assert (refused.status.state, refused.error and refused.error.message) == (JobState.FAILED, "as it should")
        assert later is None or later.status.state is JobState.SCHEDULED
        await queue.manage.retry(["refused"])
        if later is not None:
            await queue.manage.promote(["later"])
        again = ["that"] if later is None else ["later", "that"]
        await until(lambda: len(ran) == len(WAITING) + len(again))
    assert sorted(ran[len(WAITING) :]) == again


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
async def test_what_waits_in_a_releases_queue_is_done(version: str, kind: str, tmp_path: Path) -> None:
    """Once and in order; what failed and what is due in a century is there, and runs when it is told to."""

    async def take_over(place: Place) -> None:
        place.put(written(version, kind).read_text().removesuffix("\n"))
        await work_off(place)

    await with_place(kind, tmp_path, take_over)
