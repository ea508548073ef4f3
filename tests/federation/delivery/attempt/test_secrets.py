"""What must not leak: keys, payloads, bodies and answers, in whatever a delivery, out or in, logs, stores or raises."""

from __future__ import annotations

import json
import logging
import ssl
import traceback
from base64 import b64encode
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

import httpx
import pytest
import structlog
from sqlalchemy import text, update
from sqlmodel import col

from db import Database, Server, create_host_tables
from federation.base.queues.job_data import FederationDeliveryJob
from federation.base.settings.settings import Settings
from federation.delivery.attempt.decision import Report
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from federation.node.clients import ClientStanding
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from federation.sealed.peers.registry import KnownServer
from tests.federation.delivery.harness import Site, follow_payload, job_data, post_payload
from tests.federation.http.conftest import ScriptedResolver
from tests.federation.node.remote_server import RemoteServer
from tests.federation.protocol.vectors import A, B
from tests.misbehaving import garbage, reset_mid_body, respond
from tests.peer import POSTS_PATH, Answer, Peer, acquaint, introduce, json_answer
from tests.relaying_peer import RelayingPeer
from workers import JobState

PLAINTEXT = "canary-in-the-plaintext"
ANSWER = "canary-in-the-answer"
KEYS = [pair.secret for vector in (A, B) for pair in (vector.keys.signing, vector.keys.encryption)]
SECRETS = (
    PLAINTEXT,
    ANSWER,
    *(b64encode(key).decode() for key in KEYS),
    *(key.hex() for key in KEYS),
    *(repr(key)[2:-1] for key in KEYS),
)
SENDER_COLUMNS = {
    "url": "url",
    "publicKey": "public_key",
    "encryptionPublicKey": "encryption_public_key",
}
UNREACHABLE = "http://c.example"
SEALED_CHARACTERS = 60
"""Longer than a key in base64, so that a text of this length in a body is sealed, or a signature."""


@pytest.fixture(autouse=True)
def _unconfigured_logging(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """structlog as a host application finds it, which prints to stdout; the standard library's from INFO up."""
    structlog.reset_defaults()
    caplog.set_level(logging.INFO)
    for package in ("workers", "federation", "db"):
        caplog.set_level(logging.DEBUG, logger=package)
    yield
    structlog.reset_defaults()


async def dump(database: Database, *tables: str) -> str:
    """Every column of these tables but the payloads, which must be kept to be delivered."""
    lines: list[str] = []
    async with database.read() as session:
        for table in tables:
            for row in (await session.execute(text(f"SELECT * FROM {table}"))).mappings():
                lines += [f"{name}={value}" for name, value in row.items() if name != "payload"]
    return "\n".join(lines)


async def traces(site: Site, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> str:
    """Everything deliveries left behind: output, logs, events, failures, rows."""
    await site.federation.attempts.close()
    errors = [event.error for event in site.events if event.error is not None]
    output = capfd.readouterr()
    return "\n".join(
        [
            output.out,
            output.err,
            caplog.text,
            *("".join(traceback.format_exception(error)) for error in errors),
            await dump(
                site.federation.database, "workers_jobs", "delivery_attempts", "delivery_jobs", "server_health_events"
            ),
        ]
    )


def sealed_texts(body: bytes) -> Iterator[str]:
    """The beginnings of what a body carries sealed or signed."""

    def within(value: object) -> Iterator[str]:
        if isinstance(value, str) and len(value) > SEALED_CHARACTERS:
            yield value[:SEALED_CHARACTERS]
        for part in value.values() if isinstance(value, dict) else ():
            yield from within(part)

    yield from within(json.loads(body))


def assert_clean(found: str, bodies: Iterable[bytes] = ()) -> None:
    """Nothing of our secrets is in what was found, and nothing of these bodies."""
    assert [secret for secret in SECRETS if secret in found] == []
    sealed = [text for body in bodies for text in sealed_texts(body)]
    assert [text for text in sealed if text in found] == []


async def test_no_outcome_leaks(
    site: Site, peer: Peer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Delivered, refused, cut off, answered with junk: the content stays out of every trace."""

    def unsigned(answer: Answer) -> object:
        return json_answer({**answer.ack(plaintext=json.dumps({"following": ANSWER})), "signature": ANSWER})

    honest = peer.render
    shapes = [
        honest,
        unsigned,
        lambda _: json_answer({"hello": ANSWER}),
        lambda _: json_answer(ANSWER),
    ]
    jobs: list[str] = []
    for number, shape in enumerate(shapes):
        for name in ("deliver-post", "deliver-follow"):
            peer.render = shape  # type: ignore[assignment] # one of them is typed more loosely
            data = job_data(f"{name}-{number}", peer.url, payload=post_payload(f"{name}-{number}", text=PLAINTEXT))
            jobs.append(await site.owe_raw(data, name=name, row=f"{name}-{number}"))
            await site.ended(jobs[-1])
    peer.render = honest
    peer.server.upcoming += [
        respond(500, {"X-Reason": ANSWER}, ANSWER.encode()),
        respond(200, {}, b"{" + ANSWER.encode()),
        reset_mid_body(),
        garbage(),
        respond(429, {"Retry-After": ANSWER}, ANSWER.encode()),
    ]
    for number in range(3):
        data = job_data(f"broken-{number}", peer.url, payload=post_payload(f"broken-{number}", text=PLAINTEXT))
        jobs.append(await site.owe_raw(data, row=f"broken-{number}"))
    await site.ended(*jobs)

    assert len(peer.applied) > 0
    found = await traces(site, caplog, capfd)
    assert "delivery_attempt" in found
    assert len(peer.deliveries) > len(shapes)
    assert_clean(found, [request.body for request in peer.deliveries])


async def test_wrong_keys_do_not_leak(
    site: Site, peer: Peer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Acknowledgments for somebody else, signed by somebody else, or by nobody; a registered key that is none."""
    shapes = [
        lambda answer: json_answer(answer.ack(plaintext=PLAINTEXT, recipient_key=B.keys.encryption.public)),
        lambda answer: json_answer(answer.ack(signing_secret=A.keys.signing.secret)),
        lambda answer: json_answer({**answer.ack(), "data": {"ciphertext": ANSWER}}),
    ]
    fates = []
    for number, shape in enumerate(shapes):
        peer.render = shape
        data = job_data(f"row-{number}", peer.url, payload=follow_payload(f"follow-{number}"))
        fates.append(await site.outcome(await site.owe_raw(data, name="deliver-follow", row=f"row-{number}")))
    async with site.federation.database.transaction() as session:
        damage = update(Server).where(col(Server.url) == peer.url).values(encryption_public_key=ANSWER)
        await session.execute(damage)
    site.federation.registry.forget(peer.url)
    data = job_data("row-9", peer.url, payload=post_payload("post-9", text=PLAINTEXT))
    last = await site.outcome(await site.owe_raw(data, row="row-9"), row="row-9")

    assert {fate.state for fate in fates} == {JobState.FAILED}
    assert set(last.codes) == {"KEY_MATERIAL"}
    found = await traces(site, caplog, capfd)
    assert "INVALID_ACK_SIGNATURE" in found
    assert_clean(found, [request.body for request in peer.deliveries])


async def test_relays_do_not_leak(
    settings: Settings,
    ssl_context: ssl.SSLContext,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What peers are given, and what they say, however they fail."""
    guard = AddressGuard(settings.dev_allowed_hostnames)
    transport = ConnectionPool(guard, ssl_context=ssl_context, resolver=ScriptedResolver())
    federation = Federation(settings, client=FederationClient(guard, transport))
    target = RelayingPeer(generate_own_keys())
    await federation.registry.register(
        url=UNREACHABLE,
        public_key=target.keys.signing.public_text,
        encryption_public_key=target.keys.encryption.public_text,
    )
    introduce(target, federation.own_url or "")
    refusal = {"error": ANSWER, "code": ANSWER, "details": {"code": ANSWER, "text": ANSWER}}
    async with RelayingPeer() as relay, Site(federation) as site:
        relay.reaches[UNREACHABLE] = target
        await acquaint(federation, relay)
        relay.server.upcoming += [
            respond(502, {"X-Reason": ANSWER}, json.dumps(refusal).encode()),
            respond(200, {}, ANSWER.encode()),
            respond(429, {"Retry-After": ANSWER}, ANSWER.encode()),
        ]
        data = job_data("row-1", UNREACHABLE, payload=post_payload("post-1", text=PLAINTEXT))
        fate = await site.outcome(await site.owe_raw(data, row="row-1"), row="row-1")
        found = await traces(site, caplog, capfd)
    await federation.close()

    assert (fate.state, fate.codes) == (JobState.COMPLETED, ["DNS_BLOCKED"] * 3 + [None])
    assert "relay_refused" in found
    assert_clean(found, [request.body for request in relay.server.requests])


async def test_what_is_let_in_does_not_leak(
    federation: Federation, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Taken, repeated, refused, unreadable, or lost to a database in trouble: only ids and codes are logged."""
    sender = RemoteServer(url="https://b.example", keys=B.keys)
    post = sender.post(text=PLAINTEXT)
    delivery = sender.delivery(post, "FEDERATE_POST", A.keys)
    bodies = [
        delivery,
        delivery,
        sender.delivery(post, "FEDERATE_POST", A.keys, signature=sender.keys.signing.public_text),
        sender.delivery(json.dumps({"method": "FEDERATE_POST", "x": PLAINTEXT}), "FEDERATE_POST", A.keys),
        sender.delivery(post, "FEDERATE_POST", B.keys),
        json.dumps({"method": "FEDERATE_POST", "payload": PLAINTEXT}).encode(),
    ]
    app = federation.node_app(standing=ClientStanding(refusals=1_000))  # everything is to be read
    transport = httpx.ASGITransport(app=app, client=("203.0.113.9", 1))
    async with httpx.AsyncClient(transport=transport, base_url="https://a.example") as client:

        async def statuses() -> list[int]:
            answers = [await client.post(POSTS_PATH, content=body, headers=sender.headers()) for body in bodies]
            return [answer.status_code for answer in answers]

        assert set(await statuses()) <= {400, 403, 404}  # nobody knows the sender
        await federation.registry.register(**{SENDER_COLUMNS[name]: text for name, text in sender.identity().items()})
        assert (await statuses())[0] == 503  # no table for posts
        async with federation.database.transaction() as session:
            await (await session.connection()).run_sync(create_host_tables)
        assert (await statuses())[:2] == [200, 200]
        for path in ("/discover", "/proxy", POSTS_PATH):
            await client.post(path, content=PLAINTEXT.encode() * 10, headers=sender.headers())

    output = capfd.readouterr()
    found = "\n".join([output.out, output.err, caplog.text])
    for event in ("post_received", "post_replayed", "inbound_refused", "inbound_tables_missing"):
        assert event in found
    assert_clean(found, bodies)


async def test_malformed_jobs_do_not_leak(
    site: Site, peer: Peer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """What cannot be read is described by place and kind, never quoted."""
    good = job_data("row-1", peer.url, payload="{}")
    malformed: list[dict[str, object]] = [
        {"payload": PLAINTEXT},
        {"payload": f'{{"method":"{PLAINTEXT}"}}'},
        {"payload": f'["{PLAINTEXT}"]'},
        {"payload": {"method": PLAINTEXT}},
        {"payload": f'{{"method":"FEDERATE","{PLAINTEXT}":"\ud800"}}'},
        {"deliveryJobId": [PLAINTEXT]},
        {"serverUrl": {"x": PLAINTEXT}},
    ]
    jobs = [await site.owe_raw({**good, **changes}, row=f"row-{n}") for n, changes in enumerate(malformed)]
    jobs.append(await site.owe_bytes(f'{{"payload": "{PLAINTEXT}'.encode()))

    await site.ended(*jobs)

    assert_clean(await traces(site, caplog, capfd))


async def test_a_crash_does_not_leak(
    federation: Federation, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A bug of ours leaves its stack in the log, and neither its message nor a variable."""

    async def broken(server_url: str) -> KnownServer:
        secret = PLAINTEXT
        raise LookupError(f"{secret} {A.env['FEDERATION_PRIVATE_KEY']}")

    async with Site(federation, discover=broken) as site:
        data = job_data("row-1", "https://b.example", payload=post_payload("post-1", text=PLAINTEXT))
        fate = await site.outcome(await site.owe_raw(data, row="row-1"), row="row-1")
        found = await traces(site, caplog, capfd)

    assert (fate.state, fate.codes) == (None, ["INTERNAL"] * 5)
    assert fate.row is not None
    assert fate.row.last_error == "the attempt broke off: LookupError"
    assert "test_secrets.py" in found  # the stack
    assert_clean(found)


def test_values_do_not_show_what_they_hold(federation: Federation) -> None:
    """The representations that end up in tracebacks and debuggers' output hold neither keys nor payloads."""
    data = job_data("row-1", "https://b.example", payload=post_payload("post-1", text=PLAINTEXT))
    delivery = FederationDeliveryJob.model_validate(data)

    shown = [
        repr(value)
        for value in (
            delivery,
            Report(delivery, federation.wires.of("any"), started_at=datetime(2026, 1, 1, tzinfo=UTC), started=0.0),
            federation,
            federation.settings,
            federation.keys,
            federation.delivery_processor,
        )
    ]

    assert_clean("\n".join(shown) + str(delivery) + str(federation.settings))
