"""Activities by processes of ours to a server by Fedify, which verifies them and runs its listeners."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path

import pytest

from db import AttemptOutcome, DeliveryState, HoldReason, LinkState
from federation.activitypub.actors import ROTATION_AHEAD, Actors
from federation.activitypub.signatures import SignatureKind
from tests.acceptance.actors import ActorsProcess, Author
from tests.acceptance.site import numbered
from tests.acceptance.worker_process import WorkerProcess
from tests.interop.activitypub.peer import Fedify, fedify_server
from tests.patience import LONG_PATIENCE_SECONDS, eventually, until
from workers.clock import ManualClock, SystemClock

# What processes know of keys they look up anew each second instead of each minute.
LOOK_OFTEN = """
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from federation.activitypub import keys

keys.KEPT = timedelta(seconds=1)
"""
EARLY = 10
"""How many are sent before it is known that their server is away."""
SOON = timedelta(seconds=10)


@pytest.fixture
async def fedify() -> AsyncIterator[Fedify]:
    async with fedify_server() as server:
        yield server


@pytest.fixture
def serving(tmp_path: Path, place: dict[str, object]) -> Iterator[ActorsProcess]:
    process = ActorsProcess.at(place, tmp_path / "serving", site=LOOK_OFTEN)
    yield process
    process.kill()


@pytest.fixture
def environment(serving: ActorsProcess) -> dict[str, str]:
    return serving.environment


@pytest.fixture
async def author(fedify: Fedify, serving: ActorsProcess, worker: WorkerProcess) -> AsyncIterator[Author]:
    async with Author.present(serving, worker) as author:
        yield author


@pytest.mark.spread("place")
@pytest.mark.timeout(900)
async def test_what_happens_to_a_note_arrives_in_this_order(author: Author, fedify: Fedify, full: bool) -> None:
    """Each once, though the worker is killed all the while, and the server is away for the changes, then stumbles."""
    kills, names = (20, numbered("note", 120)) if full else (5, numbered("note", 30))
    chance, bob = random.Random(str(author.id)), fedify.follower()
    await author.sends(author.creates(names), bob)
    for _ in range(2 * kills // 5):
        await killed_over(author, fedify, chance.randrange(1, len(names) // kills))
    await author.worker.start()
    await until(lambda: none_left(author), patience=LONG_PATIENCE_SECONDS)

    await fedify.leave()
    ends = zip(author.updates(names), author.deletes(names), strict=True)
    await author.sends(chain.from_iterable(ends), bob)
    for _ in range(kills // 5):
        author.worker.kill()
        await author.worker.start()
    await link_until(author, fedify, LinkState.DOWN)

    await fedify.come_back()
    await author.links.look_now(fedify.url)
    await link_until(author, fedify, LinkState.UP)
    await fedify.stumble_over("Update")
    author.worker.kill()
    for _ in range(2 * kills // 5 - 1):
        await killed_over(author, fedify, chance.randrange(1, len(names) // kills))
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


async def link_until(author: Author, fedify: Fedify, state: LinkState) -> None:
    await eventually(lambda: author.links.find(fedify.url), lambda link: link.state is state)


async def all_held(author: Author) -> bool:
    """Whether all waits for the server."""
    return {row.held_reason for row in await author.rows()} == {HoldReason.SERVER}


@pytest.mark.spread("place")
@pytest.mark.timeout(900)
async def test_what_waited_for_a_server_goes_out_behind_one_canary(author: Author, fedify: Fedify, full: bool) -> None:
    """While it is away or answers by errors, one delivery at a time asks for it; then all arrive, each once."""
    names = numbered("note", 500 if full else 60)
    await fedify.leave()
    await author.sends(author.creates(names[:EARLY]), fedify.follower())
    await author.worker.start()
    await until(lambda: all_held(author))
    await author.sends(author.creates(names[EARLY:]), fedify.follower())
    await until(lambda: all_held(author))

    await fedify.refuse(500)
    await fedify.come_back()
    await author.links.look_now(fedify.url)
    await until(fedify.requests)
    await until(lambda: all_held(author))
    assert len({each.id for each in await fedify.requests()}) == 1

    await fedify.take_all()
    await author.links.look_now(fedify.url)
    await until(lambda: none_left(author), patience=LONG_PATIENCE_SECONDS)
    assert await objects_heard(fedify) == {f"{author.id}/notes/{name}": 1 for name in names}
    first, *others = [each.started_at for each in await author.attempts() if each.outcome is AttemptOutcome.DELIVERED]
    for number, at in enumerate(others, 2):
        assert number <= 2 ** (1 + (at - first).total_seconds()), "it got more than 1, 2, 4 ... a second"


@pytest.mark.spread("place")
@pytest.mark.timeout(600)
async def test_what_is_refused_because_we_are_not_to_be_seen_waits(author: Author, fedify: Fedify) -> None:
    """Nothing fails, first because our actor is away, then because the server remembers that; then all arrive."""
    author.serving.kill()
    names = numbered("note", 5)
    await author.sends(author.creates(names), fedify.follower())
    await author.worker.start()
    await until(lambda: all_wait(author, "OWN_ACTOR_UNREACHABLE"))
    assert {each.status for each in await fedify.requests()} == {401}
    author.worker.kill()

    await author.serving.start()
    await author.worker.start()
    await author.waited()
    await until(lambda: all_wait(author, "HTTP_401"))
    assert (await author.links.find(fedify.url)).state is LinkState.UP

    await fedify.forget_failures()
    await author.waited()
    await until(lambda: none_left(author))
    assert await objects_heard(fedify) == {f"{author.id}/notes/{name}": 1 for name in names}


@pytest.mark.spread("place")
@pytest.mark.timeout(600)
async def test_a_key_may_change_while_it_signs(author: Author, fedify: Fedify) -> None:
    """The server knows the former key by heart, and takes all that either of the two has signed."""
    await author.worker.start()
    sent = numbered("note", 1)
    await author.sends(author.creates(sent), fedify.follower())
    await until(lambda: none_left(author))
    (first,) = await fedify.requests()

    clock = ManualClock(SystemClock().now() - ROTATION_AHEAD + SOON)
    actors = Actors(ring=author.view.keys, bits=2048, clock=clock, own_url=author.serving.url)
    async with author.view.outbox.transaction() as session:
        later = await session.run_sync(actors.rotate, author.id)
    asked = await fedify.requests()
    while Counter(each.key for each in asked)[later.key_id] < 5:
        more = [f"note-{len(sent) + number}" for number in range(3)]
        await author.sends(author.creates(more), fedify.follower())
        sent += more
        await until(lambda: none_left(author))
        asked = await fedify.requests()
    # What the former one signed at the last moment may be looked at when it is shown no more: that is sent once more.
    assert {each.key for each in asked} == {first.key, later.key_id}
    assert {each.status for each in asked if each.key == later.key_id} == {202}, "it was used before it was to be seen"
    assert await objects_heard(fedify) == {f"{author.id}/notes/{name}": 1 for name in sent}


@pytest.mark.spread("place")
@pytest.mark.timeout(600)
async def test_a_server_is_asked_twice_until_it_is_known_what_it_takes(author: Author, fedify: Fedify) -> None:
    """Also by a process that begins later; and once more when it takes something else."""
    requests = []
    for number, kind in enumerate(3 * [SignatureKind.RFC9421] + 2 * [SignatureKind.CAVAGE]):
        await fedify.know([kind])
        before = len(await fedify.requests())
        if number in (0, 2):
            author.worker.kill()
            await author.worker.start()
        await author.sends(author.creates([f"note-{number}"]), fedify.follower())
        await until(lambda: none_left(author))
        requests.append(len(await fedify.requests()) - before)
    assert requests == [2, 1, 1, 2, 1]


@pytest.mark.spread("place")
@pytest.mark.timeout(600)
async def test_an_attempt_asks_once_but_where_the_signature_may_be_meant(author: Author, fedify: Fedify) -> None:
    """Whatever else a server answers, it hears of a delivery as often as there were attempts at it."""
    await author.worker.start()
    for status in (403, 404, 410, 500, 429):
        await fedify.refuse(status, {"Retry-After": "3600"} if status == 429 else {})
        bob = replace(fedify.follower(f"bob-{status}"), shared_inbox=None)
        (delivery,) = await author.sends(author.creates([f"note-{status}"]), bob)
        await until(lambda delivery=delivery: is_left_alone(author, delivery))
        asked = [each for each in await fedify.requests() if each.id.endswith(f"/note-{status}#create")]
        attempts = [each for each in await author.attempts() if each.delivery_id == delivery]
        assert [each.status for each in asked] == [status] * len(attempts)
        if status == 500:
            await fedify.take_all()
            await author.links.look_now(fedify.url)
            await link_until(author, fedify, LinkState.UP)
    assert await objects_heard(fedify) == {f"{author.id}/notes/note-500": 1}


async def is_left_alone(author: Author, delivery: str) -> bool:
    """Whether it is given up, or waits."""
    (row,) = [row for row in await author.rows() if row.id == delivery]
    return row.state in (DeliveryState.FAILED, DeliveryState.HELD) and row.held_reason is not HoldReason.BUSY


async def all_wait(author: Author, code: str) -> bool:
    """Whether all is held as a fault of ours, which is this one."""
    found = {(row.state, row.held_reason, row.error_code) for row in await author.rows()}
    assert DeliveryState.FAILED not in {state for state, _, _ in found}
    return found == {(DeliveryState.HELD, HoldReason.OURS, code)}


async def objects_heard(fedify: Fedify) -> dict[str | None, int]:
    """How often the listeners were told of each object."""
    return Counter(each.object for each in await fedify.heard())
