"""Deliveries that cannot be made: targets we refuse, jobs nobody can read, a node without a name or keys."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from structlog.testing import capture_logs

from db import AttemptOutcome, BlacklistedServer, DeliveryState, HoldReason, LinkState
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from federation.protocol.keys import FixedKeys, generate_own_keys
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import Site, job_data, post_payload
from tests.federation.protocol.vectors import A
from tests.misbehaving import Behaviour, huge_body, reset_mid_body, respond
from tests.peer import POSTS_PATH, Peer, acquaint
from workers import JobState

NO_KEYS = dict.fromkeys((name.lower() for name in A.env), None)


async def next_one_is_delivered(site: Site, peer: Peer) -> bool:
    """The worker is alive and well: a good job after the bad one is delivered."""
    before = len(peer.applied)
    fate = await site.outcome(await site.owe_post(peer))
    return fate.state is JobState.COMPLETED and len(peer.applied) == before + 1


async def test_a_blacklisted_server_is_never_contacted(site: Site, peer: Peer) -> None:
    """The job fails at once, the row is gone, and not a byte went out."""
    async with site.federation.database.transaction() as session:
        session.add(BlacklistedServer(server_url=peer.url, created_at=datetime.now(UTC), reason="spam"))

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt, fate.row) == (JobState.FAILED, 1, None)
    assert fate.reason == f"{peer.url} is blacklisted"
    (attempt,) = fate.log
    assert (attempt.outcome, attempt.error_code) == (AttemptOutcome.PERMANENT, "BLACKLISTED")
    assert (attempt.request_bytes, attempt.http_status) == (None, None)
    assert peer.server.connections == 0


async def test_an_unknown_blacklisted_server_is_not_discovered(federation: Federation, peer: Peer) -> None:
    """The blacklist comes before discovery."""
    async with federation.database.transaction() as session:
        session.add(BlacklistedServer(server_url=peer.url, created_at=datetime.now(UTC), reason="spam"))
    async with Site(federation) as site:
        fate = await site.outcome(await site.owe_post(peer))

    assert fate.codes == ["BLACKLISTED"]
    assert peer.server.connections == 0


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1",
        "http://169.254.169.254",
        "http://[::1]:8080",
        "http://2130706434",
        "http://metadata.google.internal",
        "ftp://b.example",
        "http://user:word@b.example",
        "javascript:alert(1)",
        "not a url",
        "",
    ],
)
async def test_a_blocked_target_is_permanent(site: Site, peer: Peer, url: str) -> None:
    """A URL that no attempt could make acceptable ends the delivery; nothing is left to diagnose."""
    data = job_data("row-1", url, payload=post_payload("post-1"))

    fate = await site.outcome(await site.owe_raw(data, row="row-1"), row="row-1")

    assert (fate.state, fate.job.attempt, fate.row, fate.codes) == (JobState.FAILED, 1, None, ["BLOCKED_URL"])
    assert "may not be contacted" in fate.reason
    assert "user:word" not in fate.reason
    assert await next_one_is_delivered(site, peer)


async def test_a_blocked_target_on_a_known_server_is_permanent(site: Site, peer: Peer) -> None:
    """The target's own address counts, whatever server it claims to be on."""
    data = {**job_data("row-1", peer.url, payload=post_payload("post-1")), "targetUrl": "http://10.0.0.1/inbox"}

    fate = await site.outcome(await site.owe_raw(data, row="row-1"), row="row-1")

    assert (fate.state, fate.row, fate.codes) == (JobState.FAILED, None, ["BLOCKED_URL"])


class Sinkhole:
    """A resolver whose answers become public, or ours, after the first few."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        if not self.answers:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [self.answers.pop(0)]


async def test_a_block_that_depends_on_dns_is_tried_again(make_settings: MakeSettings, peer: Peer) -> None:
    """A name that leads to a private address today may lead elsewhere tomorrow; the server is marked, not dropped."""
    guard = AddressGuard()
    client = FederationClient(guard, ConnectionPool(guard, resolver=Sinkhole("10.0.0.1", "127.0.0.1", "::1")))
    federation = Federation(make_settings(dev_allowed_hostnames=""), client=client)
    url = f"http://inside.example:{peer.server.port}"
    await federation.registry.register(
        url=url,
        public_key=peer.keys.signing.public_text,
        encryption_public_key=peer.keys.encryption.public_text,
    )
    async with Site(federation) as site:
        data = job_data("row-1", url, payload=post_payload("post-1"))
        fate = await site.outcome(await site.owe_raw(data, row="row-1"), row="row-1")
        server = await site.server(url)
    await federation.close()

    assert (fate.state, fate.codes) == (None, ["DNS_BLOCKED"] * 5)
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason, fate.row.attempts) == (DeliveryState.HELD, HoldReason.SERVER, 5)
    assert server is not None
    assert (server.is_healthy, server.unhealthy_reason) == (False, "DNS_BLOCKED")
    assert peer.server.connections == 0


@pytest.mark.parametrize(
    ("missing", "code", "named"),
    [
        ({"better_auth_url": None}, "NO_OWN_URL", "BETTER_AUTH_URL"),
        (NO_KEYS, "NO_OWN_KEYS", "FEDERATION_PRIVATE_KEY"),
    ],
    ids=["url", "keys"],
)
async def test_a_node_without_an_identity_holds_its_deliveries(
    make_settings: MakeSettings, peer: Peer, missing: dict[str, object], code: str, named: str
) -> None:
    """Nothing is sent; it is our fault, so they are tried again, the first time after a minute; the rows say why."""
    federation = Federation(make_settings(**missing))
    await acquaint(federation, peer)
    async with Site(federation) as site:
        fate = await site.outcome(await site.owe_post(peer))
        link = await federation.links.find(peer.url)
    await federation.close()

    assert (fate.state, fate.codes) == (None, [code])
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason, fate.row.attempts) == (DeliveryState.HELD, HoldReason.OURS, 1)
    assert named in (fate.row.last_error or "")
    assert fate.row.held_at is not None
    assert fate.row.next_attempt_at is not None
    assert abs(fate.row.next_attempt_at - fate.row.held_at - timedelta(minutes=1)) < timedelta(seconds=5)
    assert (fate.row.settled_at, fate.row.outcome) == (None, None)
    assert (link.state, link.evidence, link.rejections) == (LinkState.UP, 0, 0)
    assert peer.server.connections == 0


BAD_PAYLOADS = {
    "empty": ("", "not JSON"),
    "not-json": ("hello", "not JSON"),
    "trailing": ('{"method":"FEDERATE"} x', "not JSON"),
    "nan": ('{"method":"FEDERATE","n":NaN}', "not JSON"),
    "null": ("null", "object"),
    "array": ('[{"method":"FEDERATE"}]', "object"),
    "scalar": ("42", "object"),
    "string": ('"FEDERATE"', "object"),
    "no-method": ('{"post":{}}', "method is missing"),
    "method-not-text": ('{"method":7}', "method is not a string"),
    "method-unknown": ('{"method":"DELETE_EVERYTHING"}', "method is not one of"),
    "deeply-nested": ("[" * 200_000 + "]" * 200_000, "nested too deeply"),
    "deeply-nested-member": ('{"method":"FEDERATE","x":' + '{"x":' * 200_000, "nested too deeply"),
    "huge-number": ('{"method":"FEDERATE","n":' + "9" * 5_000 + "}", "not JSON"),
    "too-long": (json.dumps({"method": "FEDERATE", "x": "x" * 2_200_000}), "payload"),
    "too-many-bytes": (json.dumps({"method": "FEDERATE", "x": "é" * 1_500_000}, ensure_ascii=False), "bytes"),
}


@pytest.mark.parametrize("kind", BAD_PAYLOADS)
async def test_a_payload_nobody_can_read_is_permanent(site: Site, peer: Peer, kind: str) -> None:
    """The job fails at once with what is wrong, the row is gone, nothing was sent, and the worker goes on."""
    payload, problem = BAD_PAYLOADS[kind]
    data = {
        "deliveryJobId": "row-1",
        "targetUrl": peer.url + POSTS_PATH,
        "serverUrl": peer.url,
        "payload": payload,
    }

    fate = await site.outcome(await site.owe_raw(data, row="row-1"), row="row-1")

    assert (fate.state, fate.job.attempt, fate.row) == (JobState.FAILED, 1, None)
    assert problem in fate.reason
    assert "payload" in fate.reason
    assert len(fate.reason) < 500
    assert peer.deliveries == []
    assert await next_one_is_delivered(site, peer)


async def test_a_payload_of_a_mebibyte_is_delivered(site: Site, peer: Peer) -> None:
    """Large is not malformed."""
    payload = post_payload("big", text="é" * 500_000)
    assert len(payload.encode()) > 1_000_000

    fate = await site.outcome(
        await site.owe_raw(job_data("row-1", peer.url, payload=payload), row="row-1"), row="row-1"
    )

    assert (fate.state, fate.row) == (JobState.COMPLETED, None)
    assert [arrived.plaintext for arrived in peer.arrived] == [payload]


GOOD = {"deliveryJobId": "row-1", "targetUrl": "https://b.example/x", "serverUrl": "https://b.example", "payload": "{}"}
BAD_DATA: dict[str, tuple[object, str, bool]] = {
    # what is in the queue, what the error names, whether the row can be told and is gone
    "null": (None, "data", False),
    "array": ([GOOD], "data", False),
    "text": ("row-1", "data", False),
    "number": (42, "data", False),
    "empty-object": ({}, "deliveryJobId", False),
    "no-target": ({**GOOD, "targetUrl": None}, "targetUrl", True),
    "no-payload": ({name: GOOD[name] for name in ("deliveryJobId", "targetUrl", "serverUrl")}, "payload", True),
    "payload-object": ({**GOOD, "payload": {"method": "FEDERATE"}}, "payload", True),
    "payload-surrogate": ({**GOOD, "payload": '{"method":"FEDERATE","x":"\ud800"}'}, "payload", True),
    "server-number": ({**GOOD, "serverUrl": 7}, "serverUrl", True),
    "server-surrogate": ({**GOOD, "serverUrl": "https://\udfff.example"}, "serverUrl", True),
    "server-nul": ({**GOOD, "serverUrl": "https://b\x00.example"}, "serverUrl", True),
    "target-huge": ({**GOOD, "targetUrl": "https://b.example/" + "x" * 5_000}, "targetUrl", True),
    "id-number": ({**GOOD, "deliveryJobId": 1}, "deliveryJobId", False),
    "id-empty": ({**GOOD, "deliveryJobId": ""}, "deliveryJobId", False),
    "id-nul": ({**GOOD, "deliveryJobId": "row\x00"}, "deliveryJobId", False),
    "id-surrogate": ({**GOOD, "deliveryJobId": "row-\ud800"}, "deliveryJobId", False),
    "id-huge": ({**GOOD, "deliveryJobId": "x" * 100_000}, "deliveryJobId", False),
    "all-wrong": (
        {"deliveryJobId": [], "targetUrl": {}, "serverUrl": True, "payload": 1.5},
        "deliveryJobId",
        False,
    ),
}


@pytest.mark.parametrize("kind", BAD_DATA)
async def test_job_data_nobody_can_read_is_permanent(site: Site, peer: Peer, kind: str) -> None:
    """The job fails at once, saying which member; the row goes if its id can be read; the worker goes on."""
    data, named, row_known = BAD_DATA[kind]

    fate = await site.outcome(await site.owe_raw(data, row="row-1"), row="row-1")

    assert (fate.state, fate.job.attempt) == (JobState.FAILED, 1)
    assert (fate.row is None) is row_known
    assert named in fate.reason
    assert fate.job.id in fate.reason
    assert len(fate.reason) < 1_000
    assert await next_one_is_delivered(site, peer)


async def test_an_escaped_surrogate_is_the_receivers_affair(site: Site, peer: Peer) -> None:
    """JSON may escape what UTF-8 cannot hold: the text is ASCII, and goes out as it is."""
    payload = post_payload("post-1").removesuffix("}") + ',"more":"\\ud800"}'

    fate = await site.outcome(await site.owe_raw(job_data("row-1", peer.url, payload=payload), row="row-1"))

    assert fate.state is JobState.COMPLETED
    assert peer.arrived[0].plaintext == payload


async def test_members_nobody_knows_are_ignored(site: Site, peer: Peer) -> None:
    """A newer producer's job is delivered."""
    data = {**job_data("row-1", peer.url, payload=post_payload("post-1")), "priorityClass": [1], "payloadId": None}

    fate = await site.outcome(await site.owe_raw(data, row="row-1"), row="row-1")

    assert (fate.state, fate.row) == (JobState.COMPLETED, None)


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe", b"{", b"[" * 100_000], ids=["empty", "not-utf8", "cut", "deep"])
async def test_bytes_that_are_no_job_data_fail_the_job(site: Site, peer: Peer, raw: bytes) -> None:
    """What is not even JSON fails without the processor, and the worker goes on."""
    fate = await site.outcome(await site.owe_bytes(raw))

    assert fate.state is JobState.FAILED
    assert await next_one_is_delivered(site, peer)


async def test_a_target_on_another_server_is_delivered_and_noted(site: Site, peer: Peer) -> None:
    """Whose keys seal it and where it goes may differ in another producer's job: it goes out, and the log says so."""
    await site.federation.registry.register(
        url="https://alias.example",
        public_key=A.env["FEDERATION_PUBLIC_KEY"],
        encryption_public_key=A.env["FEDERATION_ENCRYPTION_PUBLIC_KEY"],
    )
    peer.server.default = respond(500)
    data = {**job_data("row-1", "https://alias.example", payload=post_payload("1")), "targetUrl": f"{peer.url}/inbox"}

    with capture_logs() as lines:
        fate = await site.outcome(await site.owe_raw(data, row="row-1"), row="row-1")

    assert fate.codes == ["HTTP_500"] * 5
    noted = [line for line in lines if line["event"] == "delivery_target_elsewhere"]
    assert {(line["server_url"], line["target"]) for line in noted} == {("https://alias.example", peer.url)}


@pytest.mark.parametrize("second", [respond(500), reset_mid_body(), huge_body()], ids=["refused", "cut", "huge"])
async def test_what_our_other_keys_get_is_not_taken_for_the_answer(
    federation: Federation, peer: Peer, second: Behaviour
) -> None:
    """The refusal of the first pair is what fails the attempt, so the record has its status."""
    await acquaint(federation, peer)
    assert federation.keys is not None
    federation.keys = FixedKeys(generate_own_keys(), *federation.keys.pairs())
    peer.server.upcoming += [respond(401, body=b"{}"), second]
    async with Site(federation) as site:
        fate = await site.outcome(await site.owe_post(peer))

    assert [(attempt.error_code, attempt.http_status) for attempt in fate.log] == [("HTTP_401", 401), (None, 200)]
