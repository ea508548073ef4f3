"""Activities by processes of ours to a server by Fedify, which verifies them and runs its listeners."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from db import DeliveryState, LinkState
from federation.base.settings.settings import Settings
from federation.runtime import nodes
from federation.runtime.composition import Federation
from tests.acceptance.actors import ActorsProcess, Author
from tests.acceptance.site import numbered
from tests.acceptance.worker_process import WorkerProcess
from tests.federation.protocol.vectors import A
from tests.interop.activitypub.peer import Fedify, fedify_server
from tests.patience import LONG_PATIENCE_SECONDS, eventually, until

SHORT = {
    "FEDERATION_ACTIVITYPUB": "1",
    "FEDERATION_ACTIVITYPUB_HTTP": "1",
    "FEDERATION_LEASE": "1s",
    "FEDERATION_DELIVERY_ATTEMPTS": "6",
    "FEDERATION_DELIVERY_BACKOFF": "50ms",
    "FEDERATION_MAX_STALLS": "100",
    "FEDERATION_OUTBOX_INTERVAL": "1s",
    "FEDERATION_PROBE_INTERVAL": "500ms",
}
"""Retries and looks at servers follow each other quickly."""


@pytest.fixture
async def fedify() -> AsyncIterator[Fedify]:
    async with fedify_server() as server:
        yield server


@pytest.fixture
def serving(tmp_path: Path, place: dict[str, object]) -> Iterator[ActorsProcess]:
    settings = {name.upper(): str(value) for name, value in place.items()}
    process = ActorsProcess(
        name="a",
        keys=A.keys,
        directory=tmp_path / "serving",
        database_url=settings.pop("DATABASE_URL"),
        settings={**SHORT, **settings},
        command=("node", "serve"),
    )
    yield process
    process.kill()


@pytest.fixture
def environment(serving: ActorsProcess) -> dict[str, str]:
    return serving.environment


@pytest.fixture
async def author(
    fedify: Fedify, serving: ActorsProcess, worker: WorkerProcess, environment: dict[str, str]
) -> AsyncIterator[Author]:
    """She is to be seen, and nothing is sent yet."""
    view = Federation(Settings.from_values(environment))
    nodes.adopt(view)
    found = Author(serving=serving, worker=worker, view=view)
    await found.joins()
    await serving.start()
    yield found
    nodes.release()
    await view.close()


@pytest.mark.spread("place")
@pytest.mark.timeout(900)
async def test_what_happens_to_a_note_arrives_in_this_order(author: Author, fedify: Fedify, full: bool) -> None:
    """Each once, though the worker is killed all the while, and the server is away when the notes are changed."""
    kills, names = (20, numbered("note", 300)) if full else (5, numbered("note", 75))
    chance, bob = random.Random(str(author.id)), fedify.follower()
    await author.sends(author.creates(names), bob)
    for _ in range(2 * kills // 5):
        await killed_over(author, fedify, chance.randrange(1, 2 * len(names) // kills))
    await author.worker.start()
    await until(lambda: none_left(author), patience=LONG_PATIENCE_SECONDS)

    await fedify.leave()
    await author.sends(author.updates(names), bob)
    for _ in range(kills // 5):
        author.worker.kill()
        await author.worker.start()
    await until(lambda: all_held(author))
    assert (await author.links.find(fedify.url)).state is LinkState.DOWN
    await author.sends(author.deletes(names), bob)

    await fedify.come_back()
    await author.links.look_now(fedify.url)
    before = len(await fedify.requests())
    await eventually(fedify.requests, lambda found: len(found) > before)
    author.worker.kill()
    for _ in range(2 * kills // 5 - 1):
        await killed_over(author, fedify, chance.randrange(1, 2 * len(names) // kills))
    await author.worker.start()
    await until(lambda: none_left(author), patience=LONG_PATIENCE_SECONDS)

    told = defaultdict(list)
    for each in await fedify.heard():
        told[each.object].append(each.type)
    assert told == {f"{author.id}/notes/{name}": ["Create", "Update", "Delete"] for name in names}
    assert author.worker.terminate() == 0


async def killed_over(author: Author, fedify: Fedify, number: int) -> None:
    """A new worker is killed as soon as so many more requests have reached the server."""
    before = len(await fedify.requests())
    await author.worker.start()
    await eventually(fedify.requests, lambda found: len(found) >= before + number)
    author.worker.kill()
    assert await author.rows(), "there was nothing left to do when it was killed"


async def none_left(author: Author) -> bool:
    return not await author.rows()


async def all_held(author: Author) -> bool:
    return {row.state for row in await author.rows()} == {DeliveryState.HELD}
