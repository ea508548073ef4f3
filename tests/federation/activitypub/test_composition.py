"""A node with ActivityPub switched on, as it is built from its settings; and one without."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from sqlalchemy import select
from sqlmodel import col
from structlog.testing import capture_logs

from db import DeliveryAttempt, DeliveryJob
from federation.activitypub.activities import JOB, WIRE
from federation.activitypub.handlers import Handlers
from federation.activitypub.outbound import Recipient
from federation.base.errors import ConfigurationError
from federation.base.queues.job_data import ACTIVITY_JOB
from federation.base.settings.settings import KEY_VARIABLES, Settings
from federation.runtime.composition import Federation
from federation.runtime.workers import FederationWorkers
from tests.federation.conftest import OWN_URL, MakeSettings
from tests.misbehaving import MisbehavingServer, respond
from tests.patience import until

ALICE = f"{OWN_URL}/users/alice"
NOTE = {"id": f"{OWN_URL}/notes/1#create", "type": "Create", "actor": ALICE, "object": f"{OWN_URL}/notes/1"}


def test_a_node_has_it_only_where_it_is_on(settings: Settings) -> None:
    """Nor does any other node import a line of it that it has no use for."""
    assert Federation(settings).activitypub is None
    code = (
        "import sys; from federation.base.settings.settings import Settings;"
        "from federation.runtime.composition import Federation; Federation(Settings.from_values({}));"
        "print(*(name for name in sys.modules if name.startswith('federation.activitypub.')))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "federation.activitypub.keys" not in told


def test_without_a_name_or_keys_it_is_refused_by_name() -> None:
    """All that is missing at once, before anything is opened."""
    with pytest.raises(ConfigurationError) as error:
        Federation(Settings.from_values({"federation_activitypub": "1"}))
    assert [problem.partition(":")[0] for problem in error.value.problems] == ["BETTER_AUTH_URL", *KEY_VARIABLES]


async def owe(node: Federation, inbox: str) -> str:
    """Alice, made if need be, creates a note for whoever has the inbox; the delivery's id."""
    parts = node.activitypub
    assert parts is not None
    addressed = parts.senders.addressed(NOTE, [Recipient(id=f"{inbox}#owner", inbox=inbox)])
    async with node.outbox.transaction() as session:
        await session.run_sync(parts.actors.add, ALICE)
        sent = await session.run_sync(
            lambda inside: parts.senders.send(inside, addressed, blacklisted=set(), plan=node.outbox.plan)
        )
    return sent.delivery_ids[0]


async def test_an_activity_is_owed_as_the_settings_say(make_settings: MakeSettings) -> None:
    """Its job is in the queue of its own once the transaction is committed, and its actor's key is as long as asked."""
    assert JOB == ACTIVITY_JOB
    node = Federation(make_settings(federation_activitypub="1", federation_activitypub_key_bits="3072"))
    try:
        delivery = await owe(node, "https://b.example/inbox")
        assert node.activitypub is not None
        key = await node.activitypub.keys.signing_key(ALICE)
        assert key.private.key_size == 3072
        assert (await node.delivery_queues.of(ACTIVITY_JOB).get_status(delivery)) is not None
        assert (await node.delivery_queue.get_status(delivery)) is None
        assert (await row_of(node, delivery)).wire == WIRE
        with pytest.raises(ValueError, match="inbox"):
            await owe(node, "http://b.example/inbox")
    finally:
        await node.close()


@pytest.mark.parametrize(("knock", "header"), [("cavage", "digest"), ("rfc9421", "signature-input")])
async def test_the_workers_of_a_node_deliver_it(
    make_settings: MakeSettings, database_url: str, knock: str, header: str
) -> None:
    """Signed as it is to be at first, and with the activity on record."""
    settings = make_settings(
        database_url=database_url, federation_activitypub="1", federation_activitypub_first_knock=knock
    )
    node = Federation(settings)
    workers = FederationWorkers(node)
    try:
        async with MisbehavingServer() as server:
            server.default = respond(202)
            delivery = await owe(node, f"{server.url}/inbox")
            workers.start()
            await until(lambda: is_gone(node, delivery))
        [request] = server.requests
        assert header in request.headers
        assert json.loads(request.body) == NOTE
        [attempt] = await node.database.rows(select(col(DeliveryAttempt.activity_id)))
        assert attempt.activity_id == NOTE["id"]
    finally:
        await workers.stop()
        await node.close()


async def test_workers_tell_that_they_know_no_function(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When they start, where ActivityPub is on: what others send is handled by none then."""
    known = Handlers()
    monkeypatch.setattr("federation.runtime.workers.HANDLERS", known)

    async def told(**values: object) -> int:
        node = Federation(make_settings(**values))
        workers = FederationWorkers(node)
        with capture_logs() as logs:
            workers.start()
        await workers.stop()
        await node.close()
        return [entry["event"] for entry in logs].count("activity_functions_missing")

    assert [await told(), await told(federation_activitypub="1")] == [0, 1]
    known.on("Create")(told)
    assert await told(federation_activitypub="1") == 0


async def row_of(node: Federation, delivery_id: str) -> DeliveryJob:
    async with node.database.read() as session:
        return await session.get_one(DeliveryJob, delivery_id)


async def is_gone(node: Federation, delivery_id: str) -> bool:
    return not await node.database.rows(select(col(DeliveryJob.id)).where(col(DeliveryJob.id) == delivery_id))
