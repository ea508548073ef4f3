"""`/discover/rotate/init` and `/confirm`: a server replaces its keys, by proof of the old ones and the new."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update
from sqlmodel import col

from db import RotateChallengeToken, Server
from federation.protocol.encodings import dump_json, encode_base64
from federation.protocol.keys import OwnKeys, generate_own_keys, sign_message
from federation.protocol.rotation import ROTATE_CONFIRM_PATH, ROTATE_INIT_PATH
from federation.protocol.sealing import Envelope, open_envelope, seal
from tests.federation.node.conftest import Node, on_both_databases, serving
from tests.federation.node.remote_server import RemoteServer

LOW_ORDER = encode_base64(bytes(32))
"""A point of low order on both curves."""


async def post(node: Node, path: str, body: object) -> httpx.Response:
    return await node.send(path, dump_json(body).encode(), {"Content-Type": "application/json"})


async def begin(node: Node, peer: RemoteServer, new: OwnKeys, **changes: object) -> httpx.Response:
    body = {
        "url": peer.url,
        "newSigningPublicKey": new.signing.public_text,
        "newEncryptionPublicKey": new.encryption.public_text,
        **changes,
    }
    return await post(node, ROTATE_INIT_PATH, body)


def proofs(challenges: Mapping[str, Any], old: OwnKeys, new: OwnKeys) -> dict[str, object]:
    """What *challenges* ask for, made with the secrets of both."""
    opened = {
        age: open_envelope(Envelope.from_wire(challenges[f"encryption{age}Challenge"]), keys.encryption.secret)
        for age, keys in (("Old", old), ("New", new))
    }
    return {
        "signingOldSignature": sign_message(challenges["signingOldChallenge"], old.signing.secret),
        "signingNewSignature": sign_message(challenges["signingNewChallenge"], new.signing.secret),
        "encryptionOldPlaintext": opened["Old"],
        "encryptionNewPlaintext": opened["New"],
    }


async def confirm(node: Node, peer: RemoteServer, content: object) -> httpx.Response:
    envelope = seal(dump_json(content), node.keys.encryption.public).to_wire()
    return await post(node, ROTATE_CONFIRM_PATH, {"serverUrl": peer.url, "envelope": envelope})


async def pending(node: Node) -> list[RotateChallengeToken]:
    async with node.database.read() as session:
        return list((await session.execute(select(RotateChallengeToken))).scalars())


async def registered_keys(node: Node, peer: RemoteServer) -> tuple[str, str]:
    known = await node.registry.find(peer.url)
    assert known is not None
    return known.public_key, known.encryption_public_key


def public(keys: OwnKeys) -> tuple[str, str]:
    return keys.signing.public_text, keys.encryption.public_text


@on_both_databases
async def test_a_server_that_proves_both_pairs_has_its_new_keys_registered(
    node: Node, peer: RemoteServer, events: list[MutableMapping[str, Any]]
) -> None:
    """Its next delivery is signed by the new key alone, and no line of the log holds a key or a challenge."""
    new = generate_own_keys()
    challenges = (await begin(node, peer, new)).json()

    response = await confirm(node, peer, proofs(challenges, peer.keys, new))

    assert response.status_code == 200, response.text
    assert response.json()["message"]
    assert await registered_keys(node, peer) == public(new)
    assert await pending(node) == []
    assert (await node.follow(peer)).status_code == 403
    assert (await node.follow(RemoteServer(url=peer.url, keys=new))).status_code == 200
    [told] = [event for event in events if event["event"] == "server_keys_rotated"]
    assert told["server_url"] == peer.url
    logged = repr(events)
    assert not any(text in logged for text in (*public(new), challenges["signingOldChallenge"]))


async def test_four_challenges_have_nothing_in_common(node: Node, peer: RemoteServer) -> None:
    """Each proof shows one secret."""
    new = generate_own_keys()

    challenges = (await begin(node, peer, new)).json()

    shown = proofs(challenges, peer.keys, new)
    texts = {
        challenges["signingOldChallenge"],
        challenges["signingNewChallenge"],
        shown["encryptionOldPlaintext"],
        shown["encryptionNewPlaintext"],
    }
    assert len(texts) == 4
    [token] = await pending(node)
    assert timedelta(minutes=4) < token.expires_at - datetime.now(UTC) <= timedelta(minutes=5)


@pytest.mark.parametrize("path", [ROTATE_INIT_PATH, ROTATE_CONFIRM_PATH])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"null"])
async def test_what_is_no_json_object_is_refused(node: Node, path: str, body: bytes) -> None:
    """400 INVALID_JSON."""
    response = await node.send(path, body, {"Content-Type": "application/json"})

    assert (response.status_code, response.json()["code"]) == (400, "INVALID_JSON")


@pytest.mark.parametrize(
    "changes",
    [
        {"url": None},
        {"url": "ftp://a.example"},
        {"newSigningPublicKey": "AAAA"},
        {"newEncryptionPublicKey": 5},
        {"newSigningPublicKey": LOW_ORDER},
        {"newEncryptionPublicKey": LOW_ORDER},
    ],
)
async def test_a_beginning_without_a_url_or_two_usable_keys_is_refused(
    node: Node, peer: RemoteServer, changes: dict[str, object]
) -> None:
    """400 with a list of issues, and nothing is pending."""
    response = await begin(node, peer, generate_own_keys(), **changes)

    assert response.status_code == 400
    assert json.loads(response.json()["error"])
    assert await pending(node) == []


async def test_the_third_beginning_in_a_minute_is_refused(node: Node, peer: RemoteServer) -> None:
    """429 without Retry-After; refused ones count."""
    new = generate_own_keys()
    answers = [await begin(node, peer, new, url=url) for url in (peer.url, f"{peer.url}/", f"{peer.url.upper()}")]

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert "retry-after" not in answers[2].headers


@pytest.mark.parametrize("path", [ROTATE_INIT_PATH, ROTATE_CONFIRM_PATH])
async def test_a_client_is_limited(database_url: str, path: str) -> None:
    """429 with Retry-After at the sixth request in a minute."""
    async with serving(database_url, client_address="8.8.8.8") as node:
        answers = [await post(node, path, {}) for _ in range(6)]

    assert [answer.status_code for answer in answers] == [400] * 5 + [429]
    assert answers[5].headers["retry-after"] == "60"


async def test_a_blacklisted_server_is_refused(node: Node, peer: RemoteServer) -> None:
    """403 at both, also in the middle of a rotation."""
    new = generate_own_keys()
    challenges = (await begin(node, peer, new)).json()
    await node.blacklist(peer.url)

    answers = [await begin(node, peer, new), await confirm(node, peer, proofs(challenges, peer.keys, new))]

    assert [answer.status_code for answer in answers] == [403, 403]


async def test_an_unknown_server_is_not_found(node: Node, other: RemoteServer) -> None:
    """404 at both."""
    answers = [await begin(node, other, generate_own_keys()), await confirm(node, other, {})]

    assert [answer.status_code for answer in answers] == [404, 404]
    assert all("error" in answer.json() for answer in answers)


async def test_the_registered_keys_are_no_new_ones(node: Node, peer: RemoteServer) -> None:
    """400 "already registered": so a server learns that its lost confirmation had arrived. One new key is enough."""
    same = await begin(node, peer, peer.keys)
    half = await begin(node, peer, peer.keys, newEncryptionPublicKey=generate_own_keys().encryption.public_text)

    assert same.status_code == 400
    assert "already registered" in same.json()["error"]
    assert half.status_code == 200


@pytest.mark.parametrize("owner", ["another server", "this node"])
@pytest.mark.parametrize("member", ["newSigningPublicKey", "newEncryptionPublicKey"])
async def test_keys_of_others_are_refused(
    node: Node, peer: RemoteServer, other: RemoteServer, owner: str, member: str
) -> None:
    """409, before anybody is challenged."""
    await node.know(other)
    taken = other.keys if owner == "another server" else node.keys
    text = taken.signing.public_text if member == "newSigningPublicKey" else taken.encryption.public_text

    response = await begin(node, peer, generate_own_keys(), **{member: text})

    assert response.status_code == 409
    assert await pending(node) == []


@on_both_databases
async def test_keys_that_were_taken_meanwhile_are_refused(node: Node, peer: RemoteServer, other: RemoteServer) -> None:
    """409 at the end, the old keys stay, and nothing is pending any more."""
    challenges = (await begin(node, peer, other.keys)).json()
    await node.know(other)

    response = await confirm(node, peer, proofs(challenges, peer.keys, other.keys))

    assert response.status_code == 409
    assert await registered_keys(node, peer) == public(peer.keys)
    assert await pending(node) == []


async def test_a_pending_rotation_keeps_other_keys_out(node: Node, peer: RemoteServer) -> None:
    """409 "already pending"; the same keys get the same challenges."""
    new = generate_own_keys()
    first = (await begin(node, peer, new)).json()
    other = await begin(node, peer, generate_own_keys())
    node.registry.forget(peer.url)

    assert other.status_code == 409
    assert "already pending" in other.json()["error"]
    assert (await confirm(node, peer, proofs(first, peer.keys, new))).status_code == 200


async def test_a_rotation_that_is_begun_again_goes_on(node: Node, peer: RemoteServer) -> None:
    """Whoever lost the answer asks once more: proofs of either answer count."""
    new = generate_own_keys()
    first, again = [(await begin(node, peer, new)).json() for _ in range(2)]

    assert first["signingOldChallenge"] == again["signingOldChallenge"]
    assert len(await pending(node)) == 1
    assert (await confirm(node, peer, proofs(first, peer.keys, new))).status_code == 200


async def test_an_expired_rotation_gives_way(node: Node, peer: RemoteServer) -> None:
    """Its confirmation is 400 "expired" once, then 404; and a beginning takes its place."""
    new = generate_own_keys()
    challenges = (await begin(node, peer, new)).json()
    await expire(node)

    answers = [await confirm(node, peer, proofs(challenges, peer.keys, new)) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [400, 404]
    assert "expired" in answers[0].json()["error"]
    assert (await begin(node, peer, generate_own_keys())).status_code == 200


async def test_an_expired_rotation_is_replaced_by_the_next(node: Node, peer: RemoteServer) -> None:
    """One server has one challenge."""
    await begin(node, peer, generate_own_keys())
    await expire(node)
    new = generate_own_keys()

    challenges = (await begin(node, peer, new)).json()

    assert len(await pending(node)) == 1
    assert (await confirm(node, peer, proofs(challenges, peer.keys, new))).status_code == 200


async def expire(node: Node) -> None:
    async with node.database.transaction() as session:
        await session.execute(update(RotateChallengeToken).values(expires_at=datetime.now(UTC) - timedelta(seconds=1)))


@on_both_databases
@pytest.mark.parametrize("wrong", ["signingOldSignature", "signingNewSignature"])
async def test_wrong_proofs_are_counted_and_cancel_the_rotation(node: Node, peer: RemoteServer, wrong: str) -> None:
    """400 three times with what is left, then 403, then 404; nobody is blacklisted, and the old keys stay."""
    new = generate_own_keys()
    challenges = (await begin(node, peer, new)).json()
    shown = {**proofs(challenges, peer.keys, new), wrong: encode_base64(bytes(64))}

    answers = [await confirm(node, peer, shown) for _ in range(5)]

    assert [answer.status_code for answer in answers] == [400, 400, 400, 403, 404]
    told = [answer.json()["error"] for answer in answers]
    assert all(
        text.endswith(f" You have {left} attempt(s) left.") for text, left in zip(told[:3], (2, 1, 0), strict=True)
    )
    assert "cancelled" in told[3]
    assert await registered_keys(node, peer) == public(peer.keys)
    assert (await node.follow(peer)).status_code == 200


@pytest.mark.parametrize("wrong", ["encryptionOldPlaintext", "encryptionNewPlaintext"])
async def test_a_text_that_was_not_opened_is_no_proof(node: Node, peer: RemoteServer, wrong: str) -> None:
    """400, one attempt less; the right proofs count after it."""
    new = generate_own_keys()
    challenges = (await begin(node, peer, new)).json()
    shown = proofs(challenges, peer.keys, new)

    response = await confirm(node, peer, {**shown, wrong: "ü"})

    assert response.status_code == 400
    assert (await confirm(node, peer, shown)).status_code == 200


async def test_who_holds_one_pair_alone_changes_nothing(node: Node, peer: RemoteServer) -> None:
    """Proofs by the new keys alone, as of one who wants to take the server over."""
    new = generate_own_keys()
    challenges = (await begin(node, peer, new)).json()
    opened = open_envelope(Envelope.from_wire(challenges["encryptionNewChallenge"]), new.encryption.secret)
    forged = {
        "signingOldSignature": sign_message(challenges["signingOldChallenge"], new.signing.secret),
        "signingNewSignature": sign_message(challenges["signingNewChallenge"], new.signing.secret),
        "encryptionOldPlaintext": opened,
        "encryptionNewPlaintext": opened,
    }

    response = await confirm(node, peer, forged)

    assert response.status_code == 400
    assert await registered_keys(node, peer) == public(peer.keys)


@pytest.mark.parametrize("content", [None, [], "text", {}, {"signingOldSignature": 5}])
async def test_proofs_without_their_shape_are_counted(node: Node, peer: RemoteServer, content: object) -> None:
    """400, one attempt less."""
    await begin(node, peer, generate_own_keys())

    response = await confirm(node, peer, content)

    assert response.status_code == 400
    assert [token.attempts_left for token in await pending(node)] == [2]


@pytest.mark.parametrize(("envelope", "left"), [(None, 3), ("text", 3), ({"iv": "AAAA"}, 3), ("sealed to another", 2)])
async def test_what_is_no_envelope_costs_no_attempt(
    node: Node, peer: RemoteServer, other: RemoteServer, envelope: object, left: int
) -> None:
    """One that does not open costs one."""
    await begin(node, peer, generate_own_keys())
    if envelope == "sealed to another":
        envelope = seal("{}", other.keys.encryption.public).to_wire()

    response = await post(node, ROTATE_CONFIRM_PATH, {"serverUrl": peer.url, "envelope": envelope})

    assert response.status_code == 400
    assert [token.attempts_left for token in await pending(node)] == [left]


async def test_a_server_that_was_forgotten_meanwhile_is_not_found(node: Node, peer: RemoteServer) -> None:
    """404, and no attempt is spent."""
    new = generate_own_keys()
    challenges = (await begin(node, peer, new)).json()
    async with node.database.transaction() as session:
        server = (await session.execute(select(Server).where(col(Server.url) == peer.url))).scalar_one()
        await session.delete(server)

    response = await confirm(node, peer, proofs(challenges, peer.keys, new))

    assert response.status_code == 404
    assert [token.attempts_left for token in await pending(node)] == [3]
