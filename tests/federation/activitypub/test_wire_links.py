"""What a link remembers for this wire: the kind of signature that got through, and whether pages are its answers."""

from __future__ import annotations

from db import Database
from federation.activitypub.activities import WIRE
from federation.servers.links import Links
from workers.clock import ManualClock

URL = "https://b.example"


def links_on(database: Database) -> Links:
    return Links(database, None, wire=WIRE, clock=ManualClock())


async def test_a_signature_is_written_only_when_it_is_another_one(database: Database) -> None:
    """Whatever else is known stays; and nothing is asked of a database that is closed by now."""
    links = links_on(database)
    await links.rejected(URL, "HTTP_403")
    await links.set_signature(URL, "rfc9421")
    link = await links_on(database).find(URL)
    assert (link.signature, link.rejections) == ("rfc9421", 1)
    await links_on(database).succeeded(URL)
    assert (await links_on(database).find(URL)).signature == "rfc9421"
    assert (await links_on(database).of("sealed").find(URL)).signature is None
    await database.close()
    await links.set_signature(URL, "rfc9421")


async def test_the_first_acknowledgment_decides_whether_pages_are_answers(database: Database) -> None:
    """Also for a process that has not heard of it yet."""
    late = links_on(database)
    await late.view(URL)
    await links_on(database).succeeded(URL)
    assert not await late.may_answer_by_page(URL)
    assert await late.may_answer_by_page("https://c.example")
    await late.succeeded("https://c.example")
    assert await links_on(database).may_answer_by_page("https://c.example")
