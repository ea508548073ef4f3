"""Two whole nodes in this process: one changes its keys, and whatever breaks off on the way, deliveries arrive."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from sqlalchemy import update
from sqlmodel import col

from db import Server
from federation.admin import keys as admin
from federation.base.errors import ConfigurationError
from federation.cli.output import progress
from federation.delivery.errors import PermanentFailure
from federation.node.posts import POSTS_PATH
from federation.protocol.rotation import ROTATE_CONFIRM_PATH, ROTATE_INIT_PATH
from tests.federation.node.remote_server import RemoteServer
from tests.federation.protocol.vectors import A, B
from tests.federation.servers.two_nodes import (
    A_URL,
    ASKED,
    B_URL,
    Cut,
    Pair,
    cut_at,
    newest,
    register_dead,
    shown,
)


async def test_a_rotation_is_two_requests_and_deliveries_go_on(pair: Pair) -> None:
    """Before, after, and once the old pair is gone; each at the first attempt."""
    await pair.both_ways("before")

    state = await pair.rotate()

    assert (state.confirmed, state.waiting, state.old_kept, state.restart_needed) == (1, [], True, False)
    assert await pair.key_at_b() == newest(pair.a) == (await pair.known_by_b()).knows_key
    assert await pair.key_at_b() != A.keys.signing.public_text
    assert [path for path in pair.net.seen if path in ASKED] == [*ASKED]
    await pair.both_ways("after")
    state = await admin.forget_old(pair.a)
    assert not state.old_kept
    await pair.both_ways("later")


async def test_servers_that_are_gone_have_no_say(pair: Pair) -> None:
    """Registries are full of them, and whoever looks is not one of them."""
    await register_dead(pair, 5)
    async with pair.a.database.transaction() as session:
        await session.execute(update(Server).where(col(Server.url) != B_URL).values(is_healthy=False))

    await pair.rotate()

    assert await shown(pair) == newest(pair.a)


async def test_who_says_who_it_is_is_shown_the_pair_that_it_knows(pair: Pair) -> None:
    """So B, which has confirmed while most have not, goes on knowing A whenever it looks."""
    await register_dead(pair, 3)
    await pair.rotate()
    assert await shown(pair) == A.keys.signing.public_text
    known = await pair.b.registry.find(A_URL)
    assert known is not None

    assert (await pair.b.probe.look(known)).well
    assert not await pair.b.discovery.look_again(A_URL, None)
    assert (await pair.b.discovery.learn(A_URL)).public_key == newest(pair.a)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_rotation_that_breaks_off_anywhere_goes_on_with_the_same_keys(pair: Pair, path: str, when: str) -> None:
    """Lost requests and lost answers: deliveries arrive in between, and the next run ends what the first began."""

    def cut(request: httpx.Request) -> None:
        if request.url.path == path:
            raise Cut("cut")

    setattr(pair.net, when, cut)
    broken = await pair.rotate()
    keys = newest(pair.a)
    await pair.both_ways("between")
    # B's row in A's registry says so by itself where a delivery has shown it.
    confirmed_by_delivery = when == "after" and path == ROTATE_CONFIRM_PATH
    assert [each.url for each in broken.waiting] == [B_URL]
    assert ((await pair.known_by_b()).knows_key == keys) is confirmed_by_delivery

    setattr(pair.net, when, None)
    state = await pair.rotate()

    assert newest(pair.a) == keys == await pair.key_at_b()
    assert state.waiting == []
    await pair.both_ways("after")


async def test_a_lost_confirmation_is_found_by_asking_again(pair: Pair) -> None:
    """Without any delivery in between: B says that it has these keys."""
    pair.net.after = cut_at(ROTATE_CONFIRM_PATH)
    await pair.rotate()
    pair.net.after = None
    pair.net.seen.clear()

    state = await pair.rotate()

    assert state.waiting == []
    assert pair.net.seen == [ROTATE_INIT_PATH]


async def test_what_was_sealed_to_the_old_pair_is_opened_and_acknowledged_by_it(pair: Pair) -> None:
    """B had begun a follow when it confirmed: the acknowledgment is signed by the key it read then."""
    b = RemoteServer(url=B_URL, keys=B.keys)
    old, body = A.keys, b.delivery(b.post("under-way"), "FEDERATE_POST", A.keys)
    await pair.rotate()

    async with httpx.AsyncClient(transport=pair.net) as client:
        response = await client.post(A_URL + POSTS_PATH, content=body, headers=b.headers())

    b.read_post_ack(response, by=old)


async def test_one_server_is_asked_first(pair: Pair) -> None:
    """`--only` begins the rotation, and what is shown to all others is the pair that most know."""
    await register_dead(pair, 3)

    state = await admin.rotate(pair.a, only=B_URL, progress=progress)

    assert (state.confirmed, len(state.waiting)) == (1, 3)
    assert {each.problem for each in state.waiting} == {None}
    assert await shown(pair) == A.keys.signing.public_text
    await pair.both_ways("after")


async def test_what_most_servers_know_is_shown(pair: Pair) -> None:
    """The new pair, once half of them have it."""
    await register_dead(pair, 1)

    await pair.rotate()

    assert await shown(pair) == newest(pair.a)


def written() -> str:
    return Path(".env").read_text()


def databases(directory: Path) -> bytes:
    return b"".join(file.read_bytes() for file in directory.glob("*.sqlite3*"))


async def test_keys_in_the_environment_are_told(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written, and every variable that has to be set is named."""
    for name, value in A.env.items():
        monkeypatch.setenv(name, value)
    before = written()

    with pytest.raises(ConfigurationError) as error:
        await pair.rotate()

    assert [problem.partition(":")[0] for problem in error.value.problems] == list(A.env)
    assert written() == before


async def test_a_process_that_lacks_the_pair_says_so(pair: Pair) -> None:
    """One that has its keys from the environment: the delivery is ours to hold, not the server's to refuse."""
    await pair.a.registry.note_knows(B_URL, "a key of another process")

    with pytest.raises(PermanentFailure) as error:
        await pair.deliver(pair.a, "post")

    assert error.value.code == "NO_OWN_KEYS"


async def test_no_secret_is_in_a_database(pair: Pair, tmp_path: Path) -> None:
    """Nor in what the command tells."""
    state = await pair.rotate()
    secrets = [line.partition('"')[2].rstrip('"') for line in written().splitlines() if "PRIVATE" in line]
    stored = databases(tmp_path)

    assert len(secrets) == 4
    assert not any(secret.encode() in stored or secret in repr(state) for secret in secrets)
