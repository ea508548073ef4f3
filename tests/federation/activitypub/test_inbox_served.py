"""Inboxes where they are served: on a node's own port, by the ASGI application, and by the plain function."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, MutableMapping
from datetime import timedelta
from typing import Any, Final

import httpx
import pytest
from sqlalchemy import select

import federation.sync
from db import ReceivedActivity, create_host_tables
from federation.activitypub.application import ActorsApp, asgi, respond
from federation.activitypub.inbox import MOST_OF_ACTIVITY
from federation.activitypub.key_documents import public_key
from federation.activitypub.signatures import Requested, SignatureKind, claims_in
from federation.node.limits import NEW_SERVERS_PER_CLIENT
from federation.runtime.composition import Federation
from federation.runtime.nodes import adopt, release
from tests.federation.activitypub.remote import BOB, RemoteActor
from tests.federation.activitypub.test_asgi import listening
from tests.federation.conftest import OWN_URL, MakeSettings
from tests.federation.protocol.vectors import A
from tests.misbehaving import MisbehavingServer, hang
from tests.misbehaving import respond as answered
from workers import JobState
from workers.clock import SystemClock

INBOX = "/users/alice/inbox"


@pytest.fixture
async def bob() -> AsyncIterator[RemoteActor]:
    async with MisbehavingServer() as server:
        server.default = answered(404)
        yield RemoteActor(server)


@pytest.fixture
async def node(make_settings: MakeSettings) -> AsyncIterator[Federation]:
    """This loop's node, behind a proxy on this machine."""
    node = Federation(make_settings(federation_activitypub=True, federation_trusted_proxies="127.0.0.1"))
    adopt(node)
    async with node.database.transaction() as session:
        await (await session.connection()).run_sync(create_host_tables)
    yield node
    release()
    await node.close()


@pytest.fixture
async def port(node: Federation) -> AsyncIterator[int]:
    async with listening(node.node_app()) as port:
        yield port


async def post(
    port: int, bob: RemoteActor, activity: object, *, path: str = INBOX, of: str = "192.0.2.1", **signing: Any
) -> httpx.Response:
    """Send what bob signs for us, as our proxy would."""
    body = json.dumps(activity).encode()
    headers = {**bob.signed(OWN_URL + path, body, SystemClock().now(), **signing), "X-Forwarded-For": of}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        return await client.post(path, content=body, headers=headers)


async def received(node: Federation) -> list[ReceivedActivity]:
    async with node.database.read() as session:
        return list((await session.execute(select(ReceivedActivity))).scalars())


@pytest.mark.parametrize("path", ["/inbox", INBOX, "/ap/v1/@alice/inbox?page=1"])
async def test_a_node_takes_activities(node: Federation, port: int, bob: RemoteActor, path: str) -> None:
    """Each once, with its job; what another key is said to have signed is refused."""
    activity = bob.activity()
    answers = [await post(port, bob, activity, path=path) for _ in range(2)]
    refused = await post(port, bob, activity, path=path, key_id=bob.id + "#other")
    assert [(each.status_code, each.content) for each in answers] == [(202, b"")] * 2
    assert refused.status_code == 401
    [row] = await received(node)
    assert (row.activity_id, json.loads(row.text)) == (activity["id"], activity)
    assert (await node.tasks_queue.counts())[JobState.QUEUED] == 1


def written(head: str, headers: dict[str, str], body: bytes) -> bytes:
    """A request as bytes; what is no header of the signature goes before those."""
    lines = [head, "X-Forwarded-For: 192.0.2.9", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + body


def chunked(body: bytes) -> bytes:
    """With an extension and a trailer, which mean nothing."""
    return b"".join(b"%x;a=b\r\n%b\r\n" % (len(each), each) for each in (body[:7], body[7:])) + b"0\r\nX: y\r\n\r\n"


ODD: Final = {
    "chunked": ("POST {path} HTTP/1.1", {"Host": "a.example", "Transfer-Encoding": "chunked"}, chunked),
    "HTTP/1.0": ("POST {path} HTTP/1.0", {"Host": "a.example", "Content-Length": "{length}"}, bytes),
    "trailing dot": ("POST {path} HTTP/1.1", {"Host": "a.example.", "Content-Length": "{length}"}, bytes),
    "port": ("POST {path} HTTP/1.1", {"Host": "A.example:443", "Content-Length": "{length}"}, bytes),
    "expects": (
        "POST {path} HTTP/1.1",
        {"Host": "a.example", "Content-Length": "{length}", "Expect": "100-continue", "Accept-Encoding": "gzip"},
        bytes,
    ),
}
"""Requests that are legal, and rare: what they begin with, headers that frame them, and what becomes of the body."""


@pytest.mark.parametrize("kind", list(SignatureKind))
@pytest.mark.parametrize("name", ODD)
async def test_requests_of_rare_forms_are_taken(
    node: Federation, port: int, bob: RemoteActor, name: str, kind: SignatureKind
) -> None:
    head, framing, sent = ODD[name]
    body = json.dumps(bob.activity()).encode()
    signed = bob.signed(OWN_URL + INBOX, body, SystemClock().now(), kind=kind)
    headers = {each: value.format(length=len(body)) for each, value in framing.items()} | signed
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(written(head.format(path=INBOX), {**headers, "Connection": "close"}, sent(body)))
    answer = await reader.read()
    writer.close()
    assert b"HTTP/1.1 202" in answer
    [row] = await received(node)
    assert json.loads(row.text) == bob.activity()


async def test_keys_are_asked_for_in_the_name_of_an_actor_that_is_shown(
    node: Federation, port: int, bob: RemoteActor
) -> None:
    """It is made when it is first needed; others verify our request by what we show of it."""
    assert (await post(port, bob, bob.activity())).status_code == 202
    [asked] = bob.server.requests
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        shown = (await client.get("/actor")).json()
    [claim] = claims_in(asked.headers)
    assert (shown["type"], claim.key_id) == ("Application", shown["publicKey"]["id"])
    requested = Requested.of("GET", bob.server.url + BOB, asked.headers, b"")
    claim.check_key(requested, public_key(shown["publicKey"]["publicKeyPem"]))
    assert {"date", "host", "(request-target)"} <= {*claim.covered}


async def test_a_large_activity_is_read_once_its_key_is_there(node: Federation, port: int, bob: RemoteActor) -> None:
    large = bob.activity(content="x" * 200_000)
    refused = await post(port, bob, large, key_id=bob.id + "/none#x")
    assert (refused.status_code, (await received(node))) == (401, [])
    assert (await post(port, bob, large)).status_code == 202
    assert (await post(port, bob, bob.activity(content="x" * MOST_OF_ACTIVITY))).status_code == 413


async def test_a_flood_of_keys_of_many_servers_spends_its_senders_budget(
    node: Federation, port: int, bob: RemoteActor
) -> None:
    """Ten an hour of servers that we do not know; another sender has his own, and what is known costs nothing."""
    assert (await post(port, bob, bob.activity())).status_code == 202
    key_ids = [f"http://127.0.0.1:{port}/users/{number}" for number in range(NEW_SERVERS_PER_CLIENT.requests + 2)]
    of = "192.0.2.77"
    answers = [await post(port, bob, bob.activity(id=each, actor=each), key_id=each, of=of) for each in key_ids]
    assert [each.status_code for each in answers] == [401] * NEW_SERVERS_PER_CLIENT.requests + [429] * 2
    assert answers[-1].headers["Retry-After"] == "3600"
    assert (await post(port, bob, bob.activity(3))).status_code == 202
    last = bob.activity(id=key_ids[-1], actor=key_ids[-1])
    assert (await post(port, bob, last, key_id=key_ids[-1], of="192.0.2.2")).status_code == 401


async def test_who_is_refused_again_and_again_is_barred(port: int, bob: RemoteActor) -> None:
    answers = [(await post(port, bob, {"type": 7})).status_code for _ in range(6)]
    assert answers == [400] * 5 + [429]


async def test_endpoints_are_no_inboxes(port: int, bob: RemoteActor) -> None:
    assert (await post(port, bob, bob.activity(), path="/users/alice")).status_code == 405
    assert (await post(port, bob, bob.activity(), path="/discover")).status_code == 400


@pytest.mark.parametrize("mount", ["", "/ap"])
async def test_a_mounted_application_takes_them(node: Federation, bob: RemoteActor, mount: str) -> None:
    """Below its mount the whole path is the target."""
    body = json.dumps(bob.activity()).encode()
    headers = bob.signed(f"{OWN_URL}{mount}/inbox", body, SystemClock().now())
    transport = httpx.ASGITransport(app=asgi(), root_path=mount, client=("93.184.216.34", 1))
    async with httpx.AsyncClient(transport=transport, base_url=OWN_URL) as client:
        taken = await client.post(f"{mount}/inbox", content=body, headers=headers)
        elsewhere = await client.post(f"{mount}/users/alice/inbox", content=body, headers=headers)
    assert (taken.status_code, elsewhere.status_code, len(await received(node))) == (202, 401, 1)


async def asked(
    bob: RemoteActor,
    parts: list[bytes],
    *,
    ends: str = "",
    announced: int | None = None,
    app: ActorsApp | None = None,
    hangs: asyncio.Event | None = None,
    by: str = "",
    forwarded_for: str = "",
) -> int:
    """The status for a body that comes in parts, and then not at all, or in the way that *ends* says."""
    headers = bob.signed(f"{OWN_URL}/inbox", b"".join(parts), SystemClock().now())
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    raw += [] if announced is None else [(b"content-length", str(announced).encode())]
    raw += [(b"X-Forwarded-For", forwarded_for.encode())] if forwarded_for else []
    messages: list[MutableMapping[str, Any]] = [
        {"type": "http.request", "body": part, "more_body": bool(ends) or part is not parts[-1]} for part in parts
    ]
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        if messages:
            return messages.pop(0)
        if ends == "hangs":
            if hangs is not None:
                hangs.set()
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/inbox", "query_string": b"", "headers": raw}
    scope["client"] = (by, 50_000) if by else None
    await (app or asgi())(scope, receive, send)
    return int(sent[0]["status"])


async def test_a_mounted_application_bounds_bodies(
    node: Federation, bob: RemoteActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In size, as announced and as sent, and in time."""
    body = json.dumps(bob.activity()).encode()
    assert await asked(bob, [body[:10], body[10:]]) == 202
    assert await asked(bob, [body], announced=MOST_OF_ACTIVITY + 1) == 413
    assert await asked(bob, [b" " * MOST_OF_ACTIVITY, b" "], ends="hangs") == 413
    assert await asked(bob, [body], ends="breaks off") == 408
    monkeypatch.setattr("federation.activitypub.application.BODY_TIMEOUT", timedelta(milliseconds=50))
    assert await asked(bob, [body], ends="hangs") == 408


async def test_a_mounted_application_reads_a_large_body_once_its_key_is_there(
    node: Federation, bob: RemoteActor
) -> None:
    """Of one whose key is not to be had it asks for no more after 64 KiB."""
    body = json.dumps(bob.activity(content="x" * 200_000)).encode()
    parts = [body[at : at + 32_768] for at in range(0, len(body), 32_768)]
    assert await asked(bob, parts) == 202
    bob.path = "/users/nobody"
    assert await asked(bob, parts[:3], ends="hangs") == 401
    assert await asked(bob, parts[:2], ends="breaks off") == 408


async def test_a_mounted_application_bounds_all_bodies_together(
    node: Federation, bob: RemoteActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that do not end keep others out for as long as they are waited for, and leave nothing behind."""
    body = json.dumps(bob.activity()).encode()
    monkeypatch.setattr("federation.activitypub.application.MOST_HELD", 3 * len(body) - 1)
    app, stuck = asgi(), [asyncio.Event() for _ in range(2)]
    waiting = [asyncio.create_task(asked(bob, [body], ends="hangs", app=app, hangs=each)) for each in stuck]
    for each in stuck:
        await each.wait()
    assert await asked(bob, [body], app=app) == 503
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await asked(bob, [body, b""], app=app) == 202
    assert await asked(bob, [body, b" " * 2 * len(body)], app=app) == 503
    assert await asked(bob, [body], app=app) == 202


async def test_a_mounted_application_limits_each_client(make_settings: MakeSettings, bob: RemoteActor) -> None:
    """By its address, or by the one that a named proxy forwards for; whoever is not known is let in."""
    limited = {"federation_inbound_per_client": "2", "federation_trusted_proxies": "10.0.0.1"}
    node = Federation(make_settings(federation_activitypub=True, **limited))
    adopt(node)
    body = json.dumps(bob.activity()).encode()
    try:
        for one, another in (
            ({"by": "8.8.8.8"}, {"by": "8.8.4.4"}),
            ({"by": "10.0.0.1", "forwarded_for": "9.9.9.9, 1.1.1.1"}, {"by": "10.0.0.1", "forwarded_for": "1.1.1.2"}),
            ({"by": "2606:4700::1"}, {}),
        ):
            assert [await asked(bob, [body], **one) for _ in range(3)] == [202, 202, 429], one
            assert await asked(bob, [body], **another) == 202
        for known in ({"by": "10.0.0.2", "forwarded_for": "8.8.8.8"}, {"by": "192.168.1.1"}):
            assert [await asked(bob, [body], **known) for _ in range(3)] == [202] * 3, known
    finally:
        release()
        await node.close()


@pytest.fixture
def plain(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, empty_environment: object) -> Iterator[None]:
    settings = make_settings(federation_activitypub=True)
    values = {"BETTER_AUTH_URL": OWN_URL, "DATABASE_URL": settings.database_url.get_secret_value()}
    for name, value in {**values, **A.env, "FEDERATION_ACTIVITYPUB": "1", "DEV_ALLOWED_HOSTNAMES": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    yield
    federation.sync.close()


async def test_the_plain_function_takes_them(plain: None, bob: RemoteActor) -> None:
    """As a view of Django hands them in."""
    body = json.dumps(bob.activity()).encode()
    headers = bob.signed(OWN_URL + INBOX, body, SystemClock().now())
    status, _, content = await asyncio.to_thread(respond, "POST", INBOX, headers, body)
    assert (status, content) == (202, b"")
    status, _, _ = await asyncio.to_thread(respond, "POST", INBOX, headers, body + b" ")
    assert status == 401


async def test_the_plain_function_keeps_its_thread_for_a_while_at_most(
    plain: None, bob: RemoteActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a key that hangs, which would take longer; its sender comes again."""
    monkeypatch.setattr("federation.activitypub.application.ANSWERED_WITHIN", timedelta(milliseconds=50))
    bob.server.routes[BOB] = hang()
    body = json.dumps(bob.activity()).encode()
    headers = bob.signed(OWN_URL + INBOX, body, SystemClock().now())
    status, told, _ = await asyncio.to_thread(respond, "POST", INBOX, headers, body)
    assert (status, told["Retry-After"]) == (503, "5")


def responded(bob: RemoteActor, headers: dict[str, str] | None = None, **signing: Any) -> int:
    """The status of what bob posts to alice, by way of this client if one is named."""
    client, actor = signing.pop("client", None), signing.get("key_id", bob.id)
    body = json.dumps(bob.activity(id=f"{actor}/1", actor=actor)).encode()
    signed = bob.signed(OWN_URL + INBOX, body, SystemClock().now(), **signing)
    status, _, _ = respond("POST", INBOX, signed | (headers or {}), body, client=client)
    return status


async def test_the_plain_function_limits_each_client(
    plain: None, bob: RemoteActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mounted application does: by its address, or by the one for which a named proxy asks."""
    monkeypatch.setenv("FEDERATION_INBOUND_PER_CLIENT", "2")
    monkeypatch.setenv("FEDERATION_TRUSTED_PROXIES", "10.0.0.1")

    def thrice(client: str | None, forwarded_for: str = "") -> list[int]:
        headers = {"X-Forwarded-For": forwarded_for} if forwarded_for else {}
        return [responded(bob, headers, client=client) for _ in range(3)]

    limited = [("8.8.8.8", ""), ("10.0.0.1", "9.9.9.9, 1.1.1.1"), ("2606:4700::1", "")]
    assert await asyncio.to_thread(lambda: [thrice(*each) for each in limited]) == [[202, 202, 429]] * 3
    others = [("8.8.4.4", ""), ("10.0.0.1", "1.1.1.2"), ("2606:4700:0:1::1", "")]
    assert await asyncio.to_thread(lambda: [thrice(*each)[0] for each in others]) == [202] * 3
    unknown = [("10.0.0.2", "8.8.8.8"), ("192.168.1.1", ""), ("", ""), (None, "8.8.8.8")]
    assert await asyncio.to_thread(lambda: [thrice(*each) for each in unknown]) == [[202] * 3] * 4


async def test_the_plain_function_fetches_so_many_keys_for_each_client(plain: None, bob: RemoteActor) -> None:
    """Of servers that we do not know; of another client's nothing is spent."""
    spends = NEW_SERVERS_PER_CLIENT.requests

    def flood(client: str) -> list[int]:
        names = (f"{bob.server.url}/users/{client}-{number}" for number in range(spends + 2))
        return [responded(bob, client=client, key_id=each) for each in names]

    assert await asyncio.to_thread(flood, "8.8.8.8") == [401] * spends + [429] * 2
    assert (await asyncio.to_thread(flood, "8.8.4.4"))[0] == 401
