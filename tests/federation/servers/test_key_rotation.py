"""Two whole nodes in this process: one changes its keys, and whatever breaks off on the way, deliveries arrive."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select, update
from sqlmodel import col

from db import BlacklistedServer, LinkState, Post, Server, ServerLink, create_host_tables
from federation.admin import keys as admin
from federation.app import Federation
from federation.base.errors import ConfigurationError
from federation.base.jobs import POST_JOB, FederationDeliveryJob
from federation.base.own_keys import begin_rotation
from federation.base.settings import Settings, write_env_file
from federation.cli.output import progress
from federation.delivery.errors import PermanentFailure
from federation.delivery.exchange import Exchange, Report
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.node.posts import POSTS_PATH
from federation.protocol.json_text import dump_json
from federation.protocol.keys import KeyRing
from federation.protocol.rotation import ROTATE_CONFIRM_PATH, ROTATE_INIT_PATH
from federation.protocol.sealing import seal
from federation.recurring_jobs import key_rotation_of, recurring_jobs
from federation.servers.key_rotation import KeyRotation
from tests.acceptance.site import post
from tests.federation.node.remote_server import RemoteServer
from tests.federation.protocol.vectors import A, B

A_URL, B_URL = "https://a.example", "https://b.example"
ASKED = (ROTATE_INIT_PATH, ROTATE_CONFIRM_PATH)

Behaviour = Callable[[httpx.Request], httpx.Response | None]


class Cut(httpx.ConnectError):
    """The connection broke."""


@dataclass(slots=True)
class Net(httpx.AsyncBaseTransport):
    """Brings requests to the nodes of this process. `before` may answer in a node's place, or raise; `after` may raise
    when the node has answered.
    """

    nodes: dict[str, httpx.ASGITransport] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    before: Behaviour | None = None
    after: Behaviour | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request.url.path)
        if self.before is not None and (answer := self.before(request)) is not None:
            return answer
        response = await self.nodes[request.url.host].handle_async_request(request)
        if self.after is not None:
            self.after(request)
        return response

    async def aclose(self) -> None:
        """Nothing is to be closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A, whose keys are in `.env`, and B, who know each other."""

    a: Federation
    b: Federation
    net: Net

    @property
    def rotation(self) -> KeyRotation:
        found = key_rotation_of(self.a)
        assert found is not None
        return found

    async def rotate(self) -> admin.RotationState:
        return await admin.rotate(self.a, only=None, progress=progress)

    async def deliver(self, sender: Federation, name: str) -> None:
        """A post called *name* from one to the other, at the first attempt."""
        to = B_URL if sender is self.a else A_URL
        report = Report(
            delivery=FederationDeliveryJob.model_validate(
                {"targetUrl": to + POSTS_PATH, "serverUrl": to, "payload": "{}", "deliveryJobId": name}
            ),
            payload=post(sender.own_url or "", name),
            started_at=datetime.now(UTC),
            started=0.0,
        )
        await exchange(sender)(POST_JOB, report)

    async def both_ways(self, name: str) -> None:
        """Posts arrive both ways, each at its first attempt."""
        for sender, receiver in ((self.a, self.b), (self.b, self.a)):
            await self.deliver(sender, name)
            async with receiver.database.read() as session:
                found = select(Post).where(col(Post.federation_post_id) == name)
                assert (await session.execute(found)).scalar_one_or_none() is not None

    async def key_at_b(self) -> str:
        known = await self.b.registry.find(A_URL)
        assert known is not None
        return known.public_key

    async def known_by_b(self) -> Server:
        async with self.a.database.read() as session:
            return (await session.execute(select(Server).where(col(Server.url) == B_URL))).scalar_one()


def exchange(node: Federation) -> Exchange:
    return Exchange(
        own_url=node.own_url,
        keys=node.keys,
        registry=node.registry,
        discover=node.discovery,
        guard=node.guard,
        fetch=node.fetch,
    )


def written() -> str:
    return Path(".env").read_text()


def databases(directory: Path) -> bytes:
    return b"".join(file.read_bytes() for file in directory.glob("*.sqlite3*"))


def newest(node: Federation) -> str:
    return ring(node).pairs(now=True)[0].signing.public_text


def ring(node: Federation) -> KeyRing:
    assert node.keys is not None
    return node.keys


@pytest.fixture
async def pair(empty_environment: Path, migrated_file: Path, tmp_path: Path) -> AsyncIterator[Pair]:
    for name in "ab":
        shutil.copy(migrated_file, tmp_path / f"{name}.sqlite3")
    urls = {name: f"sqlite:///{tmp_path}/{name}.sqlite3" for name in "ab"}
    write_env_file(Path(".env"), {"BETTER_AUTH_URL": A_URL, "DATABASE_URL": urls["a"], **A.env})
    net = Net()
    async with AsyncExitStack() as stack:
        nodes = []
        for settings in (
            Settings.load(),
            Settings.from_values({"BETTER_AUTH_URL": B_URL, "DATABASE_URL": urls["b"], **B.env}),
        ):
            node = Federation(settings, client=FederationClient(AddressGuard(frozenset()), net))
            stack.push_async_callback(node.close)
            net.nodes[(node.own_url or "").removeprefix("https://")] = httpx.ASGITransport(node.node_app())
            nodes.append(node)
            async with node.database.transaction() as session:
                await (await session.connection()).run_sync(create_host_tables)
        a, b = nodes
        for node, url, of in ((a, B_URL, B), (b, A_URL, A)):
            await node.registry.register(
                url=url,
                public_key=of.keys.signing.public_text,
                encryption_public_key=of.keys.encryption.public_text,
            )
        yield Pair(a=a, b=b, net=net)


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


def cut_at(path: str) -> Behaviour:
    def cut(request: httpx.Request) -> None:
        if request.url.path == path:
            raise Cut("cut")

    return cut


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


async def shown(pair: Pair) -> str:
    async with httpx.AsyncClient(transport=pair.net) as client:
        return str((await client.get(f"{A_URL}/discover")).json()["publicKey"])


async def register_dead(pair: Pair, number: int) -> None:
    """Servers that answer nothing."""
    for each in range(number):
        await pair.a.registry.register(
            url=f"https://dead-{each}.example", public_key=f"k{each}", encryption_public_key=f"e{each}"
        )
    pair.net.before = lambda request: refuse(request) if request.url.host.startswith("dead") else None


def refuse(request: httpx.Request) -> httpx.Response:
    raise Cut("nobody there", request=request)


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (404, b'{"detail":"Not Found"}', "NOT_SUPPORTED"),
        (404, b"<html>", "NOT_SUPPORTED"),
        (403, b'{"error":"blacklisted"}', "BLACKLISTED_THERE"),
        (409, b'{"error":"already pending"}', "ROTATION_PENDING"),
        (429, b'{"error":"too often"}', "RATE_LIMITED"),
        (400, b'{"error":"no"}', "HTTP_400"),
        (500, b"", "HTTP_500"),
        (200, b"", "BAD_CHALLENGE"),
        (200, b'{"signingOldChallenge":"x"}', "BAD_CHALLENGE"),
    ],
)
async def test_a_server_that_does_not_take_part_keeps_the_old_pair(
    pair: Pair, status: int, body: bytes, problem: str
) -> None:
    """It is told, with a code, and deliveries go on with the keys it knows."""
    pair.net.before = lambda request: (
        httpx.Response(status, content=body) if request.url.path == ROTATE_INIT_PATH else None
    )

    state = await pair.rotate()

    assert [(each.url, each.problem) for each in state.waiting] == [(B_URL, problem)]
    assert await pair.key_at_b() == A.keys.signing.public_text
    await pair.both_ways("after")


@pytest.mark.parametrize("member", ["signingOldChallenge", "signingNewChallenge"])
async def test_nothing_but_a_challenge_is_signed(pair: Pair, member: str) -> None:
    """A server that wants an activity signed in our name gets nothing."""
    await assert_not_solved(pair, {member: post(A_URL, "forged")})


@pytest.mark.parametrize("member", ["encryptionOldChallenge", "encryptionNewChallenge"])
async def test_nothing_but_a_challenge_is_opened(pair: Pair, member: str) -> None:
    """A server that holds what another one had sealed to us does not get to read it."""
    begin_rotation(Path(".env"))
    new, old = ring(pair.a).pairs(now=True)
    recipient = old if member == "encryptionOldChallenge" else new
    await assert_not_solved(pair, {member: seal("a letter", recipient.encryption.public).to_wire()})


async def assert_not_solved(pair: Pair, posed: dict[str, object]) -> None:
    begin_rotation(Path(".env"))
    async with httpx.AsyncClient(transport=pair.net) as client:
        new = ring(pair.a).pairs(now=True)[0]
        body = {
            "url": A_URL,
            "newSigningPublicKey": new.signing.public_text,
            "newEncryptionPublicKey": new.encryption.public_text,
        }
        answer = (await client.post(f"{B_URL}{ROTATE_INIT_PATH}", json=body)).json()
    forged = dump_json({**answer, **posed}).encode()
    pair.net.before = lambda request: (
        httpx.Response(200, content=forged) if request.url.path == ROTATE_INIT_PATH else None
    )
    pair.net.seen.clear()

    state = await pair.rotate()

    assert [each.problem for each in state.waiting] == ["BAD_CHALLENGE"]
    assert ROTATE_CONFIRM_PATH not in pair.net.seen


async def test_a_server_that_forgot_us_gets_to_know_the_pair_that_is_shown(pair: Pair) -> None:
    """There is nothing to replace: it is asked to register us."""
    async with pair.b.database.transaction() as session:
        await session.delete((await session.execute(select(Server))).scalar_one())
    pair.b.registry.forget(A_URL)

    state = await pair.rotate()

    known = await pair.b.registry.find(A_URL)
    assert known is not None
    assert known.public_key == await shown(pair)
    assert [each.problem for each in state.waiting] == ["UNKNOWN_THERE"]
    await pair.both_ways("after")


async def test_servers_that_were_away_are_asked_when_their_link_is_back(pair: Pair) -> None:
    """Neither before, nor those that nobody has asked yet."""
    pair.net.before = refuse
    await pair.rotate()
    pair.net.before = None
    await set_link(pair, LinkState.DOWN)
    assert await pair.rotation() == {"asked": 0, "confirmed": 0}
    await set_link(pair, LinkState.UP)
    await register_dead(pair, 1)

    assert await pair.rotation() == {"asked": 1, "confirmed": 1}
    assert (await pair.known_by_b()).knows_key == newest(pair.a)


async def set_link(pair: Pair, state: LinkState) -> None:
    async with pair.a.database.transaction() as session:
        await session.merge(ServerLink(server_url=B_URL, state=state, since=datetime.now(UTC)))


async def test_the_old_pair_is_dropped_when_nobody_has_needed_it_for_ten_minutes(pair: Pair) -> None:
    """By the recurring job, and not before."""
    [job] = [job for job in recurring_jobs(pair.a) if job.name == "key-rotation"]
    await pair.rotate()
    assert (await job.run())["dropped"] is False
    async with pair.a.database.transaction() as session:
        await session.execute(update(Server).values(rotation_tried_at=datetime.now(UTC) - timedelta(minutes=11)))

    assert (await job.run())["dropped"] is True

    assert len(ring(pair.a).pairs(now=True)) == 1
    await pair.both_ways("after")
    assert (await job.run())["dropped"] is False


async def test_a_blacklisted_server_needs_no_pair(pair: Pair) -> None:
    """It is not asked, and keeps nobody from dropping the old one."""
    async with pair.a.database.transaction() as session:
        session.add(BlacklistedServer(server_url=B_URL, created_at=datetime.now(UTC), reason="test"))
    pair.a.registry.forget(B_URL)

    state = await pair.rotate()

    assert state.waiting == []
    assert pair.net.seen == []
    assert await pair.rotation.is_over()


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
