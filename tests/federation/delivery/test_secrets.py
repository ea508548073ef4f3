"""What must not leak: keys, payloads and answers, in whatever a delivery logs, stores or raises."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator

import pytest
import structlog
from sqlalchemy import text

from db import Database
from federation.app import Federation
from federation.delivery.process import Report
from federation.queues import FederationDeliveryJob
from federation.servers.registry import KnownServer
from tests.federation.delivery.harness import Site, job_data, post_payload
from tests.federation.protocol.vectors import A
from tests.misbehaving import garbage, reset_mid_body, respond
from tests.peer import Answer, Peer, json_answer

PLAINTEXT = "canary-in-the-plaintext"
ANSWER = "canary-in-the-answer"
SECRETS = (
    PLAINTEXT,
    ANSWER,
    A.env["FEDERATION_PRIVATE_KEY"],
    A.env["FEDERATION_ENCRYPTION_PRIVATE_KEY"],
    repr(A.keys.signing.secret)[2:-1],
    repr(A.keys.encryption.secret)[2:-1],
)


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


def assert_clean(found: str) -> None:
    assert [secret for secret in SECRETS if secret in found] == []


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
    assert_clean(found)


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

    assert fate.codes == ["INTERNAL"] * 5
    assert fate.row is not None
    assert fate.row.last_error == fate.reason == "the attempt broke off: LookupError"
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
            Report(delivery),
            federation,
            federation.settings,
            federation.keys,
            federation.delivery_processor,
        )
    ]

    assert_clean("\n".join(shown) + str(delivery) + str(federation.settings))
