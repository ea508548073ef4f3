"""Texts that came by another way than ours, with names that no table takes: each is given up alone, unsent."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import update
from sqlmodel import col

from db import DeliveryJob
from federation.base.settings.settings import Settings
from tests.federation.activitypub.scene import ATTEMPTS, Scene, scene
from tests.federation.conftest import MakeSettings


@pytest.fixture
def settings(make_settings: MakeSettings, migrated_postgres_url: str) -> Settings:
    return make_settings(federation_delivery_attempts=ATTEMPTS, database_url=migrated_postgres_url)


@pytest.fixture
async def stage(settings: Settings, ssl_context: ssl.SSLContext) -> AsyncIterator[Scene]:
    async with scene(settings, ssl_context) as found:
        yield found


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("id", "https://a.example/" + "x" * 2048),
        ("id", "https://a.example/" + "".join(chr(0x4E00 + number) for number in range(1500))),
        ("id", "https://a.example/\x00"),
        ("actor", "https://a.example/" + "x" * 2048),
        ("type", "Create\x00"),
        ("type", ["Create", "x" * 257]),
        ("type", []),
    ],
)
async def test_names_that_no_table_takes(stage: Scene, member: str, value: object) -> None:
    delivery = await stage.owe()
    text = json.dumps({**json.loads(stage.activity()), member: value})
    async with stage.federation.database.transaction() as session:
        await session.execute(update(DeliveryJob).where(col(DeliveryJob.id) == delivery).values(payload=text))
    fate = await stage.fate(delivery)
    assert (fate.row, fate.codes) == (None, ["INVALID_PAYLOAD"])
    assert f"no activity: {member}: " in fate.reason
    assert stage.peer.hits == 0
