"""The ASGI application under a server, below mounts, and alone; and the plain function, in its caller's thread."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import socket
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.test import RequestFactory
from fastapi import FastAPI
from starlette.types import ASGIApp
from structlog.testing import capture_logs

import federation
import federation.sync
from federation.activitypub.application import asgi, respond
from federation.activitypub.documents import ACTIVITY_JSON, COLLECTIONS, Software, Usage
from federation.base.errors import ConfigurationError
from federation.node.server import NodeServer
from federation.runtime.composition import Federation
from federation.runtime.nodes import get_federation
from tests.federation.activitypub.stored import add_actor
from tests.federation.conftest import OWN_URL
from tests.federation.protocol.vectors import A
from tests.federation.sync.conftest import configure_django
from tests.patience import PATIENCE_SECONDS, until

ALICE = f"{OWN_URL}/users/alice"
BELOW = f"{OWN_URL}/ap/users/alice"
AT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def environment(empty_environment: Path, database_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of a node with actors."""
    values = {"BETTER_AUTH_URL": OWN_URL, **A.env, "DATABASE_URL": f"sqlite:///{database_file}"}
    for name, value in {**values, "FEDERATION_ACTIVITYPUB": "1"}.items():
        monkeypatch.setenv(name, value)
    yield
    federation.sync.close()


@pytest.fixture
async def node(environment: None) -> AsyncIterator[Federation]:
    """This loop's node, which has two actors. What it opens is closed."""
    node = get_federation()
    await add_actor(node.database, ALICE, at=AT)
    await add_actor(node.database, BELOW, at=AT + timedelta(days=1))
    yield node
    await federation.close_federation()


def client(app: ASGIApp, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app, **options), base_url=OWN_URL)


async def test_actors_are_served_by_the_node_of_the_loop(node: Federation) -> None:
    app = asgi(
        total=lambda url, name: 3 if name == "outbox" else None,
        usage=lambda: Usage(users=2),
        software=Software(name="notes", version="1"),
    )
    async with client(app) as asking:
        actor = await asking.get("/users/alice", headers={"Accept": ACTIVITY_JSON})
        finger = await asking.get("/.well-known/webfinger", params={"resource": "acct:alice@a.example"})
        info = await asking.get("/nodeinfo/2.1")
        totals = [(await asking.get(f"/users/alice/{name}")).json()["totalItems"] for name in COLLECTIONS]
        head = await asking.head("/users/alice")
        post = await asking.post("/users/alice", content=b"x" * 100_000)
    assert (actor.status_code, actor.json()["id"]) == (200, ALICE)
    assert finger.json()["links"][0]["href"] == ALICE
    assert (info.json()["software"]["name"], info.json()["usage"]) == ("notes", {"users": {"total": 2}})
    assert totals == [3, 0, 0]
    assert (head.status_code, head.content, head.headers["Content-Length"]) == (
        200,
        b"",
        actor.headers["Content-Length"],
    )
    assert (post.status_code, post.headers["Allow"]) == (405, "GET, HEAD")


async def test_several_accepts_are_one(node: Federation) -> None:
    headers = [("Accept", "text/html"), ("Accept", "application/ld+json")]
    async with client(asgi()) as asking:
        answer = await asking.get("/users/alice", headers=headers)
        refused = await asking.get("/users/alice", headers=headers[:1])
    assert answer.headers["Content-Type"].startswith("application/ld+json")
    assert refused.status_code == 406


async def test_the_whole_path_is_the_actors_below_a_mount(node: Federation) -> None:
    """What is well known is found there as well, and NodeInfo says where it is."""
    app = FastAPI()
    app.mount("/ap", asgi())
    app.mount("/.well-known", asgi())
    async with client(app) as asking:
        actor = await asking.get("/ap/users/alice")
        assert (await asking.get("/ap/.well-known/webfinger")).status_code == 400
        assert (await asking.get("/.well-known/webfinger")).status_code == 400
        below = (await asking.get("/ap/.well-known/nodeinfo")).json()["links"][0]["href"]
        at_host = (await asking.get("/.well-known/nodeinfo")).json()["links"][0]["href"]
        assert (await asking.get(below)).status_code == 200
        assert (await asking.get("/ap/ap/users/alice")).status_code == 404
    assert actor.json()["id"] == BELOW
    assert (below, at_host) == (f"{OWN_URL}/ap/nodeinfo/2.1", f"{OWN_URL}/nodeinfo/2.1")


@pytest.mark.parametrize("path", ["/users/alice", "/ap/users/alice"])
async def test_a_mount_that_the_path_lacks_is_put_before_it(node: Federation, path: str) -> None:
    """As servers have it that read `root_path` in the older way; and nothing needs the path as it was sent."""
    scope = {"type": "http", "method": "GET", "path": path, "root_path": "/ap", "query_string": b"", "headers": []}
    assert (await answer_of(asgi(), scope))["id"] == BELOW


@pytest.mark.parametrize("raw", [{}, {"raw_path": None}])
async def test_a_path_that_was_decoded_is_written_as_actors_are(node: Federation, raw: dict[str, None]) -> None:
    """By a server that has it in no other form, such as those that serve functions of a cloud."""
    url = f"{OWN_URL}/@ann;a=b/(c),!$&'*+:~._-"
    await add_actor(node.database, url, at=AT)
    for mount in ("", "/@ann;a=b"):
        path = url.removeprefix(OWN_URL)
        scope = {"type": "http", "method": "GET", "path": path, "root_path": mount, "query_string": b"", "headers": []}
        assert (await answer_of(asgi(), scope | raw))["id"] == url


async def answer_of(app: ASGIApp, scope: MutableMapping[str, Any]) -> Any:
    """The JSON that the application answers; it does not ask for a body."""
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nobody reads a body")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return json.loads(sent[1]["body"])


async def test_a_slash_that_was_encoded_stays_so(node: Federation) -> None:
    """Servers hand over a decoded path, too, which would name another actor."""
    async with client(asgi()) as asking:
        for path in ("/users%2Falice", "/users/al%69ce", "/users/alice%00"):
            assert (await asking.get(path)).status_code == 404, path


async def test_lifespan_and_other_scopes_are_answered(node: Federation) -> None:
    """A websocket is closed."""
    assert await live(asgi()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await asgi()({"type": "websocket"}, None, send)  # type: ignore[arg-type] # nothing is received
    assert sent == [{"type": "websocket.close"}]
    with pytest.raises(ValueError, match="carrier"):
        await asgi()({"type": "carrier"}, None, send)  # type: ignore[arg-type] # as above


async def live(app: ASGIApp) -> list[str]:
    """What the application says at its server's start and end."""
    messages = iter(("lifespan.startup", "lifespan.shutdown"))
    sent: list[str] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": next(messages)}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    return sent


async def test_a_node_that_serves_no_actors_says_so_at_the_start(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request gets no detail, as it may be anybody's; the log names the setting."""
    monkeypatch.delenv("FEDERATION_ACTIVITYPUB")
    assert await live(asgi()) == ["lifespan.startup.failed"]
    with capture_logs() as logs:
        async with client(asgi()) as asking:
            answer = await asking.get("/users/alice")
    assert (answer.status_code, answer.json()) == (500, {"error": "Internal error"})
    assert [line["event"] for line in logs] == ["inbound_failed"]
    assert "FEDERATION_ACTIVITYPUB=1" in logs[0]["problems"][0]
    await federation.close_federation()


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[int]:
    """A server on a port."""
    server = NodeServer(app, grace=timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started)
            yield listener.getsockname()[1]
        finally:
            server.request_stop()
            await serving


async def test_a_server_serves_it(node: Federation) -> None:
    """Requests of strangers, one after the other on a connection; what is no request ends it."""
    async with listening(asgi()) as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as asking:
            actor = await asking.get("/users/alice", headers={"Host": "b.example"})
            assert (actor.status_code, actor.json()["id"]) == (200, ALICE)
            assert (await asking.head("/users/alice")).content == b""
            assert (await asking.post("/users/alice", content=b"x" * 1_000_000)).status_code == 405
            assert (await asking.get("/users/" + "a" * 4000)).status_code == 414
        for target in (b"/users/alice\x00", b"//b.example/users/alice", b"/" + b"a" * 65536, b"https://b.example/"):
            status = await raw_status(port, b"GET " + target + b" HTTP/1.1\r\nHost: a.example\r\n\r\n")
            assert status in (b"400", b"404", b"414", b""), target


async def raw_status(port: int, request: bytes) -> bytes:
    """The status of the answer, empty where the connection ends without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            writer.write(request)
            line = await reader.readline()
    except ConnectionError:
        line = b""
    finally:
        writer.transport.abort()
    return line.split(b" ")[1] if line else b""


async def test_plain_code_answers_in_its_own_thread(node: Federation) -> None:
    """The application's functions run where their caller is; many may call at once."""
    asked: list[tuple[int, int]] = []
    answers: list[tuple[int, dict[str, str], bytes]] = []

    def actor(url: str) -> dict[str, object]:
        asked.append((caller.ident or 0, threading.get_ident()))
        return {"id": url, "name": "Alice"}

    def ask() -> None:
        headers = {"accept": ACTIVITY_JSON}
        answers.append(respond("GET", "/users/alice", headers, b"", actor=actor))

    caller = threading.Thread(target=ask)
    caller.start()
    await until(lambda: not caller.is_alive())
    (status, headers, body) = answers[0]
    assert (status, headers["Content-Type"], json.loads(body)["name"]) == (200, ACTIVITY_JSON, "Alice")
    assert asked == [(caller.ident, caller.ident)]
    several = [threading.Thread(target=ask) for _ in range(8)]
    for thread in several:
        thread.start()
    await until(lambda: not any(thread.is_alive() for thread in several))
    assert [status for status, _, _ in answers] == [200] * 9


async def test_plain_code_may_have_coroutine_functions_and_failing_ones(node: Federation) -> None:
    async def find(account: str) -> str:
        return ALICE

    def broken(url: str) -> dict[str, object]:
        raise ZeroDivisionError(url)

    finger = "/.well-known/webfinger?resource=acct:x@y.example"
    assert json.loads((await asyncio.to_thread(respond, "GET", finger, {}, find=find))[2])["aliases"] == [ALICE]

    async def total(url: str, name: str) -> int:
        return 3

    answer = await asyncio.to_thread(
        respond, "GET", "/users/alice/outbox", {}, total=total, actor=lambda url: {"id": url}
    )
    assert json.loads(answer[2])["totalItems"] == 3
    info = await asyncio.to_thread(respond, "GET", "/nodeinfo/2.1", {}, usage=lambda: Usage(local_posts=1))
    assert json.loads(info[2])["usage"]["localPosts"] == 1
    status, _, body = await asyncio.to_thread(respond, "HEAD", "/users/alice", {}, actor=broken)
    assert (status, body) == (500, b"")


def test_plain_code_without_a_node_that_serves_is_told(environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDERATION_ACTIVITYPUB")
    with pytest.raises(ConfigurationError, match="FEDERATION_ACTIVITYPUB=1"):
        respond("GET", "/users/alice", {})


MANUAL = Path(__file__).parents[3] / "docs" / "activitypub.md"


def blocks(begin: str, end: str) -> list[str]:
    """The programs of a part of the page."""
    part = MANUAL.read_text().partition(begin)[2].partition(end)[0]
    return [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", part, re.M)]


async def test_the_programs_of_the_manual_serve(node: Federation) -> None:
    """That for ASGI, and the view for Django with the same function. What sends is run, too."""
    send = blocks("## Send an activity", "## What others send")[0]
    serve, view = blocks("**In an ASGI application.**", "**On a node's own port.**")
    shown: dict[str, Any] = {}
    await eval(compile(send, str(MANUAL), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), shown)
    assert (len(shown["sent"].delivery_ids), shown["sent"].skipped) == (1, ())
    exec(serve, shown)
    exec(view, shown)
    async with client(shown["app"]) as asking:
        answer = await asking.get("/users/alice")
    assert (answer.status_code, answer.json()["outbox"]) == (200, f"{ALICE}/outbox")
    configure_django()
    request = RequestFactory().get("/users/alice", headers={"accept": ACTIVITY_JSON})
    response = await asyncio.to_thread(shown["view"], request)
    assert (response.status_code, json.loads(response.content)) == (200, answer.json())
    assert response.headers["Vary"] == "Accept"
