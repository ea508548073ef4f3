"""Which server was meant by a name that nobody knows: found among very many, on both databases."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from sqlalchemy import insert

from db import Database, Server
from federation.admin.servers.misnamed import MOST_LOOKED_AT, MOST_NAMED, meant, nearest

WANTED = ["https://zz.example:8443", "https://social.zz.example", "https://zebra.example"]


@pytest.fixture
async def many(database: Database) -> Database:
    """The wanted ones are the last by name of more than are looked at."""
    now = datetime.now(UTC)
    urls = [f"https://a{number}.invalid" for number in range(MOST_LOOKED_AT)] + WANTED
    rows = [
        {
            "id": url,
            "url": url,
            "public_key": f"signing {url}",
            "encryption_public_key": f"sealing {url}",
            "last_seen": now,
            "created_at": now,
            "updated_at": now,
            "is_healthy": True,
        }
        for url in urls
    ]
    async with database.transaction() as session:
        await session.execute(insert(Server), rows)
    return database


async def test_the_likely_ones_are_among_those_that_are_looked_at(many: Database) -> None:
    """However many there are: the host itself, what is below and above it, and what begins alike."""
    assert await meant(many, "https://zz.example") == WANTED[:2]
    assert await meant(many, "www.social.zz.example:8080") == [WANTED[1], WANTED[0]]
    assert await meant(many, "zebar.example") == WANTED[2:]


@pytest.mark.parametrize("text", ["%", "_" * 10, "'; DROP TABLE server_registry; --", "x" * 100_000, "\ud800"])
async def test_what_is_typed_is_only_text(many: Database, text: str) -> None:
    """A pattern, a statement, or nothing that a database could take: none of them names a server."""
    assert await meant(many, text) == []
    assert await meant(many, "zebar.example") == WANTED[2:]


def test_few_are_named() -> None:
    """A domain with thousands of servers below it names the first of them."""
    assert len(nearest("example", [f"https://s{number}.example" for number in range(1_000)])) == MOST_NAMED
    assert nearest("example", []) == []
