"""Keys of our actors: sealed where they lie, and the right one in use, by one clock for all processes."""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from sqlalchemy import select
from sqlalchemy.orm import Session
from sqlmodel import col

from db import ActivityKey, Database
from federation.activitypub.actors import ROTATION_AHEAD, Actors
from federation.activitypub.keys import (
    KEPT,
    ActorKeys,
    KeyUnreadable,
    NoActorKey,
    StoredKey,
    in_use,
    make_private_key,
    open_sealed,
    public_pem,
    seal,
    successor,
)
from federation.activitypub.signatures import SignatureKind, sign, verify
from federation.protocol.keys import FixedKeys, KeyRing, OwnKeys, generate_own_keys
from workers.clock import ManualClock

ALICE: Final = "https://a.example/users/alice"
NOON: Final = datetime(2026, 3, 1, 12, tzinfo=UTC)
MINUTE: Final = timedelta(minutes=1)
OURS: Final = generate_own_keys()
DER: Final = make_private_key(2048)


class ChangingKeys(KeyRing):
    """Pairs of which some are only seen by those who look now, as in a file that has just changed."""

    def __init__(self, seen: OwnKeys, newest: OwnKeys) -> None:
        self._seen, self._all = (seen,), (newest, seen)

    def pairs(self, *, now: bool = False) -> tuple[OwnKeys, ...]:
        return self._all if now else self._seen


def actors_of(ring: KeyRing, clock: ManualClock) -> Actors:
    return Actors(ring=ring, bits=2048, clock=clock, own_url="https://a.example")


async def added(database: Database, clock: ManualClock, ring: KeyRing = OURS) -> None:
    async with database.transaction() as session:
        await session.run_sync(lambda sync: actors_of(ring, clock).add(sync, ALICE))


async def rotated(database: Database, clock: ManualClock) -> str:
    def rotate(session: Session) -> str:
        return actors_of(OURS, clock).rotate(session, ALICE).key_id

    async with database.transaction() as session:
        return await session.run_sync(rotate)


def test_a_sealed_key_is_opened_by_any_pair_of_the_node() -> None:
    """And by nobody else; no two seals are alike, and none shows the key."""
    other, sealed = generate_own_keys(), seal(DER, OURS.signing.secret)
    assert open_sealed(sealed, [other.signing.secret, OURS.signing.secret]) == DER
    assert sealed != seal(DER, OURS.signing.secret)
    assert DER not in base64.b64decode(sealed)
    for secrets in ([], [other.signing.secret], [OURS.encryption.secret], [OURS.signing.public]):
        with pytest.raises(KeyUnreadable):
            open_sealed(sealed, secrets)


@pytest.mark.parametrize("text", ["", "AAAA", "no base64", base64.b64encode(bytes(2_000)).decode()])
def test_what_was_never_sealed_is_not_opened(text: str) -> None:
    """By the same error as a key under another seal."""
    with pytest.raises(KeyUnreadable):
        open_sealed(text, [OURS.signing.secret])


@pytest.mark.parametrize("bits", [1024, 2047, 2049, 8192])
def test_keys_are_of_sizes_that_others_take(bits: int) -> None:
    """Smaller ones are refused by some, and larger ones cost more than they bring."""
    with pytest.raises(ValueError, match="2048, 3072 or 4096 bits"):
        make_private_key(bits)


def key(number: int, *, begins: int, ends: int | None = None) -> StoredKey:
    """In minutes after noon."""
    return StoredKey(str(number), "", "", NOON + begins * MINUTE, None if ends is None else NOON + ends * MINUTE)


@pytest.mark.parametrize(
    ("keys", "minute", "present", "following"),
    [
        ([], 0, None, None),
        ([key(1, begins=0)], 0, "1", None),
        ([key(1, begins=0)], -5, "1", None),  # whoever made it had a clock that is ahead
        ([key(1, begins=0, ends=20), key(2, begins=20)], 19, "1", "2"),
        ([key(2, begins=20), key(1, begins=0, ends=20)], 20, "2", None),
        ([key(1, begins=0, ends=20), key(2, begins=20, ends=50), key(3, begins=50)], 40, "2", "3"),
        ([key(1, begins=0, ends=20), key(2, begins=20, ends=50), key(3, begins=50)], 60, "3", None),
        ([key(1, begins=0, ends=20)], 20, None, None),
        ([key(1, begins=0), key(2, begins=20)], 20, "2", None),
    ],
)
def test_one_key_is_in_use(keys: Sequence[StoredKey], minute: int, present: str | None, following: str | None) -> None:
    """The newest that has begun, until the moment at which the next one does."""
    now = NOON + minute * MINUTE
    found = [in_use(keys, now), successor(keys, now)]
    assert [each and each.key_id for each in found] == [present, following]


async def test_an_actor_signs_with_the_key_it_shows(database: Database) -> None:
    """What is shown verifies what is signed."""
    clock = ManualClock(NOON)
    await added(database, clock)
    keys = ActorKeys(database, OURS, clock)
    signing, served = await keys.signing_key(ALICE), await keys.served(ALICE)
    assert served is not None
    assert signing.key_id == served.key_id == f"{ALICE}#main-key"
    assert served.changes_at is None
    shown = load_pem_public_key(served.public_pem.encode())
    assert public_pem(DER).splitlines()[0] == served.public_pem.splitlines()[0] == "-----BEGIN PUBLIC KEY-----"
    request = {"method": "POST", "url": "https://b.example/inbox", "body": b"{}"}
    headers = sign(SignatureKind.CAVAGE, **request, content_type="application/json", at=NOON, key=signing)
    assert verify(**request, headers=headers, public=shown, now=NOON, window=MINUTE) == signing.key_id
    await keys.close()


async def test_a_key_is_opened_once(database: Database) -> None:
    """It costs far more than to look it up."""
    clock = ManualClock(NOON)
    await added(database, clock)
    keys = ActorKeys(database, OURS, clock)
    assert (await keys.signing_key(ALICE)).private is (await keys.signing_key(ALICE)).private
    await keys.close()


async def test_an_actor_may_be_added_at_any_moment(database: Database) -> None:
    """That there was none before is not remembered."""
    clock = ManualClock(NOON)
    keys = ActorKeys(database, OURS, clock)
    with pytest.raises(NoActorKey):
        await keys.signing_key(ALICE)
    assert await keys.served(ALICE) is None
    await added(database, clock)
    assert (await keys.signing_key(ALICE)).key_id == f"{ALICE}#main-key"
    await keys.close()


async def test_a_rotation_comes_into_force_at_one_moment(database: Database) -> None:
    """For signing and serving alike, in a process that has known the keys for long, without another look."""
    clock = ManualClock(NOON)
    await added(database, clock)
    new = await rotated(database, clock)
    keys = ActorKeys(database, OURS, clock)
    for key_id, changes_at in ((f"{ALICE}#main-key", NOON + ROTATION_AHEAD), (new, None)):
        for moment in (timedelta(0), ROTATION_AHEAD - timedelta(seconds=1)):
            clock.advance(moment)
            served = await keys.served(ALICE)
            assert served is not None
            assert (served.key_id, served.changes_at) == (key_id, changes_at)
            assert (await keys.signing_key(ALICE)).key_id == key_id
        clock.advance(timedelta(seconds=1))
    await keys.close()


def test_every_process_knows_of_a_rotation_before_it_comes_into_force() -> None:
    """With time to spare for a slow database."""
    assert ROTATION_AHEAD >= 5 * KEPT


async def test_a_node_with_other_keys_signs_nothing(
    database: Database, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does one without; what the actor shows is public. Neither the error nor a log holds what is sealed."""
    clock = ManualClock(NOON)
    await added(database, clock)
    with caplog.at_level(logging.DEBUG):
        for ring in (None, generate_own_keys()):
            keys = ActorKeys(database, ring, clock)
            with pytest.raises(KeyUnreadable) as caught:
                await keys.signing_key(ALICE)
            assert await keys.served(ALICE) is not None
            await keys.close()
    [(private,)] = await database.rows(select(col(ActivityKey.private)))
    told = caplog.text + "".join(capsys.readouterr()) + repr(caught.value)
    assert private not in told


async def test_a_key_sealed_under_the_nodes_new_pair_is_opened(database: Database) -> None:
    """By a process that has not looked at its file since: it looks now."""
    clock, new = ManualClock(NOON), generate_own_keys()
    await added(database, clock, FixedKeys(new, OURS))
    keys = ActorKeys(database, ChangingKeys(OURS, new), clock)
    assert (await keys.signing_key(ALICE)).key_id == f"{ALICE}#main-key"
    await keys.close()


def test_no_repr_shows_a_key() -> None:
    """Logs and errors show values by it."""
    sealed = seal(DER, OURS.signing.secret)
    assert sealed not in repr(StoredKey("k", sealed, "", NOON, None))
