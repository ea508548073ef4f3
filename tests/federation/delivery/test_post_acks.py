"""A post's acknowledgment: looked at, told to the log where it is not the server's, and good enough in any case."""

from __future__ import annotations

import json
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from federation.delivery.post_ack import post_ack_mismatch
from federation.protocol.acks import ack_response, find_ack, post_ack
from tests.federation.delivery.harness import Fate, Site, follow_payload, job_data, post_payload
from tests.federation.delivery.test_acks import ACCEPTABLE, UNPROVEN
from tests.federation.protocol.vectors import A, B
from tests.peer import Peer, Render, json_answer
from workers import JobState

Plaintext = dict[str, Any]


def saying(change: Callable[[Plaintext], object]) -> Render:
    """An acknowledgment that is sealed and signed as it should be, of a plaintext that `change` has altered."""

    def plaintext(text: str) -> str:
        altered = json.loads(text)
        change(altered)
        return json.dumps(altered)

    return lambda answer: json_answer(answer.ack(plaintext=plaintext(answer.plaintext)))


MISMATCHES: dict[str, tuple[Render, str]] = {
    "bare": (lambda _: json_answer({"method": "PROXY_RESPONSE", "status": "acknowledged"}), "data"),
    "no-data": (UNPROVEN["no-data"][0], "data"),
    "data-no-envelope": (UNPROVEN["data-no-envelope"][0], "data"),
    "wrong-key": (UNPROVEN["wrong-key"][0], "data"),
    "no-signature": (UNPROVEN["no-signature"][0], "signature"),
    "bad-signature": (UNPROVEN["bad-signature"][0], "signature"),
    "wrong-signer": (UNPROVEN["wrong-signer"][0], "signature"),
    "not-json": (UNPROVEN["bad-inner-not-json"][0], "content"),
    "a-follow's": (UNPROVEN["bad-inner-shape"][0], "content"),
    "another-post": (saying(lambda said: said["post"].update(federationPostId="another")), "post"),
    "another-server": (saying(lambda said: said.update(federationUrl="https://c.example")), "server"),
    "no-server": (saying(lambda said: said.update(federationUrl="c.example")), "server"),
}
MATCHES: dict[str, Render] = {
    **ACCEPTABLE,
    "spelled-otherwise": saying(lambda said: said.update(federationUrl=said["federationUrl"] + "/")),
}


async def delivered(site: Site, peer: Peer, render: Render) -> tuple[Fate, list[MutableMapping[str, Any]]]:
    """What became of a post that was acknowledged in this way, and what the log says of its acknowledgment."""
    peer.render = render
    with capture_logs() as logs:
        fate = await site.outcome(await site.owe_post(peer))
    return fate, [entry for entry in logs if entry["event"] == "post_ack_mismatch"]


@pytest.mark.parametrize("shape", MISMATCHES)
async def test_a_mismatch_is_logged(site: Site, peer: Peer, shape: str) -> None:
    """The post is delivered at its first attempt; one line says of which delivery what does not match, and no more."""
    render, mismatch = MISMATCHES[shape]

    fate, logged = await delivered(site, peer, render)

    assert (fate.state, fate.row, fate.codes) == (JobState.COMPLETED, None, [None])
    delivery_id = fate.log[0].delivery_id
    told = {"server_url": peer.url, "delivery_id": delivery_id, "mismatch": mismatch}
    assert logged == [{"event": "post_ack_mismatch", "log_level": "warning", **told}]


async def test_of_one_server_one_a_minute_is_looked_at(site: Site, peer: Peer) -> None:
    """Opening all of them would cost a fifth of a delivery."""
    render, mismatch = MISMATCHES["another-post"]
    logged = [(await delivered(site, peer, render))[1] for _ in range(3)]
    assert [[entry["mismatch"] for entry in each] for each in logged] == [[mismatch], [], []]


@pytest.mark.parametrize("shape", MATCHES)
async def test_the_servers_own_word_is_not_logged(site: Site, peer: Peer, shape: str) -> None:
    """Wherever it sits in the answer, and however the server spells itself."""
    fate, logged = await delivered(site, peer, MATCHES[shape])

    assert (fate.state, fate.row) == (JobState.COMPLETED, None)
    assert logged == []


def test_without_a_key_nothing_can_be_checked() -> None:
    """The server is no longer registered here when it answers."""
    text = post_ack(own_url="https://b.example", post_id="theirs", federation_post_id="ours")
    found = find_ack(ack_response(text, recipient_key=A.keys.encryption.public, signing_secret=B.keys.signing.secret))

    def mismatch(key: str | None) -> str | None:
        payload = post_payload("ours")
        return post_ack_mismatch(found, "https://b.example", payload=payload, keys=A.keys, public_key=key)

    assert mismatch(B.keys.signing.public_text) is None
    assert mismatch(None) == "key"


async def test_what_cannot_be_looked_at_is_a_mismatch(site: Site, peer: Peer) -> None:
    """Another producer's job is named as a post's and has none: whatever its acknowledgment says, it is delivered."""
    text = post_ack(own_url=peer.url, post_id="theirs", federation_post_id="ours")
    peer.render = lambda answer: json_answer(answer.ack(plaintext=text))
    data = job_data("row-1", peer.url, payload=follow_payload("follow-1"))

    with capture_logs() as logs:
        fate = await site.outcome(await site.owe_raw(data))

    assert fate.state is JobState.COMPLETED
    assert [entry["mismatch"] for entry in logs if entry["event"] == "post_ack_mismatch"] == ["PayloadError"]
