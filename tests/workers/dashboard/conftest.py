"""Dashboards of one queue in memory, for each way of letting people in."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable

import pytest
from argon2 import PasswordHasher

from workers.dashboard.access import Access
from workers.dashboard.accounts import Account, Role
from workers.dashboard.application import queue_site
from workers.dashboard.site import Site
from workers.dashboard.visit import ActionTaken
from workers.queue import Queue
from workers.storage import open_storage

QUICK = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
PASSWORD = "correct horse"
ACCOUNTS = (
    Account(name="olga", role=Role.OPERATOR, hash=QUICK.hash(PASSWORD)),
    Account(name="vera", role=Role.VIEWER, hash=QUICK.hash(PASSWORD)),
)

MakeSite = Callable[..., Site]


@pytest.fixture
async def queue() -> AsyncIterator[Queue]:
    async with Queue(open_storage(f"memory://{uuid.uuid4().hex}", queue="mail")) as opened:
        yield opened


@pytest.fixture
def done() -> list[ActionTaken]:
    """What was done through the dashboard, as its log has it."""
    return []


@pytest.fixture
async def make_site(queue: Queue, done: list[ActionTaken]) -> AsyncIterator[MakeSite]:
    """A dashboard of `queue`, with these rules."""
    made: list[Site] = []

    def make(access: Access, *others: Queue, **options: object) -> Site:
        async def record(action: ActionTaken) -> None:
            done.append(action)

        site, _ = queue_site([queue, *others], access=access, record=record, **options)  # type: ignore[arg-type] # a test's
        made.append(site)
        return site

    yield make
    for site in made:
        await site.close()


@pytest.fixture
def acting(make_site: MakeSite) -> Site:
    """Everybody may act."""
    return make_site(Access(allow_actions=True))


@pytest.fixture
def with_accounts(make_site: MakeSite) -> Site:
    return make_site(Access(accounts=ACCOUNTS))
