"""What a server makes of being asked to take our new keys, and what it is not given."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from db import Server
from federation.base.own_keys import begin_rotation
from federation.protocol.encodings import dump_json
from federation.protocol.rotation import ROTATE_CONFIRM_PATH, ROTATE_INIT_PATH
from federation.protocol.sealing import seal
from tests.acceptance.site import post
from tests.federation.protocol.vectors import A
from tests.federation.servers.two_nodes import (
    A_URL,
    B_URL,
    Pair,
    ring,
    shown,
)


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
