"""The applications of docs/examples that have an actor: a server by Fedify finds her, and takes what she sends."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.acceptance.worker_process import WorkerProcess
from tests.federation.protocol.vectors import A
from tests.federation.sync.receiver import listening, process
from tests.interop.activitypub.peer import fedify_server
from tests.patience import PATIENCE_SECONDS, eventually
from tests.servers import free_port
from tests.workers.manual import ROOT

EXAMPLES = ROOT / "docs" / "examples"
FASTAPI = ("-m", "uvicorn", "activitypub_fastapi:app", "--port")
# A project around the views.
DJANGO = """
import os, sys
from wsgiref.simple_server import make_server

from django.conf import settings
from django.core.wsgi import get_wsgi_application

database = {
    "ENGINE": "django.db.backends.sqlite3",
    "NAME": os.environ["DATABASE_URL"].partition("sqlite:///")[2],
    "OPTIONS": {"transaction_mode": "IMMEDIATE"},
}
settings.configure(ALLOWED_HOSTS=["127.0.0.1"], DATABASES={"default": database}, ROOT_URLCONF="activitypub_django")
make_server("127.0.0.1", int(sys.argv[1]), get_wsgi_application()).serve_forever()
"""
COMMANDS = {"fastapi": FASTAPI, "django": ("-c", DJANGO)}


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def environment(base_environment: dict[str, str], database_file: Path, port: int) -> dict[str, str]:
    return {
        **base_environment,
        **A.env,
        "BETTER_AUTH_URL": f"http://127.0.0.1:{port}",
        "DATABASE_URL": f"sqlite:///{database_file}",
        "FEDERATION_ACTIVITYPUB": "1",
        "PYTHONPATH": f"{EXAMPLES}:{ROOT}",
        "REDIS_URL": "",
    }


@pytest.mark.parametrize("example", ["fastapi", "django"])
async def test_a_note_arrives(example: str, environment: dict[str, str], port: int, worker: WorkerProcess) -> None:
    """Of an actor whom the application itself shows, beside its endpoint."""
    own_url = environment["BETTER_AUTH_URL"]
    async with (
        fedify_server() as fedify,
        process(*COMMANDS[example], str(port), **environment) as child,
        httpx.AsyncClient(base_url=own_url, timeout=PATIENCE_SECONDS) as client,
    ):
        await listening(child, port)
        bob = fedify.follower()
        asked = {"text": "hello", "to": bob.id, "inbox": str(bob.shared_inbox)}
        owed = (await client.post("/notes", params=asked)).json()
        assert len(owed) == 1
        await worker.start()
        (heard,) = await eventually(fedify.heard, lambda found: found)
        assert heard.type == "Create"
        assert str(heard.object).startswith(f"{own_url}/users/alice/notes/")
        assert worker.terminate() == 0
