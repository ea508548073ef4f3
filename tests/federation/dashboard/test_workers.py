"""The workers of a node, as its page lists them."""

from __future__ import annotations

import os
import re
import socket

from federation.dashboard.node_site import NodeSite
from federation.runtime.composition import Federation
from tests.workers.dashboard.browsing import Person
from workers.jobs import new_worker_id
from workers.testing import steps


async def test_a_worker_is_found_by_its_host_and_process(federation: Federation, acting: NodeSite) -> None:
    """With since when it runs; of one that somebody named himself only the name is known."""
    storage = federation.delivery_queue.storage
    await federation.delivery_queue.start()
    for worker in (new_worker_id(), "chosen"):
        await steps.claim(storage, worker_id=worker)
    page = await Person(acting.site.app).sees("/workers")
    heads = re.findall(r"<th [^>]*>([\w ]+)</th>", page)
    assert heads == ["Queue", "Host", "Process", "Since", "Seen", "Holds", "Worker"]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*)</tr>", page) if "<td" in row]
    told = {row[-1].split(">")[1].split("<")[0]: row for row in rows}
    assert told["chosen"][1:4] == ["\u2013", "\u2013", "&ndash;"]
    [own] = [row for name, row in told.items() if name != "chosen"]
    assert own[1:3] == [socket.gethostname(), str(os.getpid())]
    assert "<time" in own[3]
