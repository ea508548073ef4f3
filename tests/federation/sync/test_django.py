"""Django with several databases, and requests that it rolls back."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine

from tests.federation.sync.conftest import configure_django, django_databases, owed
from tests.federation.sync.test_sessions import Interrupted, owe, queued
from tests.patience import until

pytestmark = pytest.mark.parametrize("place", ["sqlite", "bullmq-postgres"], indirect=True)


@pytest.fixture
def shop(place: dict[str, str], database_file: Path, tmp_path: Path) -> Iterator[Engine]:
    """Another database, with the very tables that the node's has."""
    with closing(sqlite3.connect(database_file)) as source, closing(sqlite3.connect(tmp_path / "shop.sqlite3")) as copy:
        source.backup(copy)
    made = create_engine(f"sqlite:///{tmp_path}/shop.sqlite3")
    yield made
    made.dispose()


async def all_have_jobs(ids: set[str]) -> None:
    async def has_jobs() -> bool:
        return await queued() == ids

    await until(has_jobs)


async def test_the_alias_of_the_nodes_database_is_owed_on(node: dict[str, str], engine: Engine, shop: Engine) -> None:
    """Beside the default one, whose transaction ends as it will."""

    def plain() -> set[str]:
        from django.db import connections, transaction

        with django_databases(default=shop, node=engine):
            with suppress(Interrupted), transaction.atomic(), transaction.atomic(using="node"):
                owe(connections["node"])
                raise Interrupted
            with suppress(Interrupted), transaction.atomic():
                with transaction.atomic(using="node"):
                    ids = {owe(connections["node"])}
                raise Interrupted  # the default's alone: the other one has been committed
        assert owed(engine) == ids
        return ids

    ids = await asyncio.to_thread(plain)
    assert (len(ids), owed(shop)) == (1, set())
    await all_have_jobs(ids)


def test_another_alias_is_refused_by_name(place: dict[str, str], engine: Engine, shop: Engine) -> None:
    """Nothing is written to either, although it has the same tables."""
    with django_databases(default=shop, node=engine):
        from django.db import connection, connections, transaction

        named = rf"another database, .*shop\.sqlite3; deliveries are owed in .*{engine.url.database}"
        for wrong in (connection, connections["default"]):
            with transaction.atomic(), transaction.atomic(using="node"), pytest.raises(ValueError, match=named):
                owe(wrong)
        with transaction.atomic(), pytest.raises(ValueError, match=r"'node' is in autocommit.*atomic\(using='node'\)"):
            owe(connections["node"])
    assert owed(shop) == owed(engine) == set()


async def test_a_router_is_not_asked(node: dict[str, str], engine: Engine, shop: Engine) -> None:
    """Wherever it sends models of the application, deliveries are owed on the connection that is handed over."""

    def plain() -> set[str]:
        from django.db import connections, transaction
        from django.test import override_settings

        routed = override_settings(DATABASE_ROUTERS=[f"{__name__}.ToTheShop"])
        with django_databases(default=shop, node=engine), routed, transaction.atomic(using="node"):
            return {owe(connections["node"])}

    configure_django()
    ids = await asyncio.to_thread(plain)
    assert (owed(engine), owed(shop)) == (ids, set())
    await all_have_jobs(ids)


class ToTheShop:
    """A router, of all there is."""

    def db_for_read(self, model: type, **hints: object) -> str:
        return "default"

    db_for_write = db_for_read


def owing_view(request: Any) -> Any:
    """Owe a delivery, and do then what is asked for."""
    from django.db import connection, transaction
    from django.http import HttpResponse

    if not request.GET.get("atomic"):
        delivery = owe(connection)
    else:
        with transaction.atomic():
            delivery = owe(connection)
    if request.GET.get("then") == "raise":
        raise Interrupted
    if request.GET.get("then") == "roll back":
        transaction.set_rollback(True)
    return HttpResponse(delivery)


def whole_request(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A middleware whose transaction is the whole request, and undone where the answer is an error."""
    from django.db import transaction

    def middleware(request: Any) -> Any:
        with transaction.atomic():
            response = get_response(request)
            if response.status_code >= 500:
                transaction.set_rollback(True)
        return response

    return middleware


class Site:
    """An application of that one view, asked through all of Django's handler."""

    def __init__(self, *middleware: str) -> None:
        from django.test import override_settings
        from django.urls import path

        self.urlpatterns = [path("", owing_view)]
        self.settings = override_settings(ROOT_URLCONF=self, MIDDLEWARE=middleware, ALLOWED_HOSTS=["*"])

    def ask(self, **query: str) -> tuple[int, str]:
        from django.test import Client

        with self.settings:
            answer = Client(raise_request_exception=False).get("/", query)
        return answer.status_code, answer.content.decode()


@pytest.mark.parametrize("way", ["ATOMIC_REQUESTS", "middleware"])
async def test_a_request_that_is_rolled_back_owes_nothing(node: dict[str, str], engine: Engine, way: str) -> None:
    """Because its view raised, or had it so; the one that ends well owes what it owed, once."""

    def plain() -> set[str]:
        from django.db import connections

        with django_databases(default=engine):
            connections.databases["default"]["ATOMIC_REQUESTS"] = way == "ATOMIC_REQUESTS"
            site = Site(*[f"{__name__}.whole_request"] * (way == "middleware"))
            assert site.ask(then="raise")[0] == site.ask(then="raise", atomic="yes")[0] == 500
            assert site.ask(then="roll back")[0] == 200
            assert owed(engine) == set()
            answers = [site.ask(), site.ask(atomic="yes")]
        assert [status for status, _ in answers] == [200, 200]
        return {delivery for _, delivery in answers}

    ids = await asyncio.to_thread(plain)
    assert (len(ids), owed(engine)) == (2, ids)
    await all_have_jobs(ids)
