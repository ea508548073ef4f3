"""Keys that seal to one server for a while: when they are made anew, and how many are kept."""

from __future__ import annotations

from datetime import timedelta

import pytest

from federation.protocol.errors import KeyMaterialError
from federation.protocol.keys import generate_own_keys
from federation.protocol.sealing import open_envelope
from federation.sealed.outbound import wire as module
from federation.sealed.outbound.wire import Sealer
from tests.federation.protocol.vectors import A, B
from tests.patience import until

TO_A, TO_B = A.keys.encryption.public_text, B.keys.encryption.public_text


async def test_one_key_serves_for_a_server_and_no_other() -> None:
    sealing = Sealer()
    first, second = sealing.seal("one", TO_A), sealing.seal("two", TO_A)
    other = sealing.seal("three", TO_B)
    assert first.ephemeral_public_key == second.ephemeral_public_key != other.ephemeral_public_key
    assert first.iv != second.iv
    assert [open_envelope(each, A.keys.encryption.secret) for each in (first, second)] == ["one", "two"]
    assert open_envelope(other, B.keys.encryption.secret) == "three"


async def test_a_key_is_made_anew_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "USED_FOR", timedelta(0))
    sealing = Sealer()
    keys = {sealing.seal("text", TO_A).ephemeral_public_key for _ in range(3)}
    assert len(keys) == 3
    assert len(sealing._kept) == 1


async def test_nothing_of_a_key_outlives_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing else is sealed."""
    monkeypatch.setattr(module, "USED_FOR", timedelta(milliseconds=10))
    sealing = Sealer()
    sealing.seal("text", TO_A)
    sealing.seal("text", TO_B)
    assert list(sealing._kept) == [TO_A, TO_B]
    await until(lambda: not sealing._kept)
    assert sealing._timer is None


async def test_a_key_is_made_anew_after_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_USES", 2)
    sealing = Sealer()
    one, two, three = (sealing.seal("text", TO_A).ephemeral_public_key for _ in range(3))
    assert one == two != three


async def test_so_many_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first."""
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    sealing = Sealer()
    recipients = [generate_own_keys().encryption.public_text for _ in range(5)]
    for recipient in recipients:
        sealing.seal("text", recipient)
    assert list(sealing._kept) == recipients[-3:]


@pytest.mark.parametrize("key", ["", "AAAA", "A" * 43 + "="])
async def test_an_unusable_key_is_not_kept(key: str) -> None:
    """The last one is a point of low order."""
    sealing = Sealer()
    with pytest.raises(KeyMaterialError):
        sealing.seal("text", key)
    assert not sealing._kept
