"""The applications of docs/examples, as processes, asked by a real HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import runpy
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine, text

import federation
from tests import warm
from tests.federation.conftest import OWN_URL
from tests.federation.sync.conftest import owed
from tests.patience import PATIENCE_SECONDS, until
from tests.peer import Peer, introduce
from tests.servers import free_port

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "docs" / "examples"

pytestmark = [
    pytest.mark.parametrize("place", ["sqlite", "bullmq-postgres"], indirect=True),
    pytest.mark.spread("place"),
]


@contextlib.asynccontextmanager
async def process(*arguments: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process, ended with the block."""
    child = await asyncio.create_subprocess_exec(
        warm.PYTHON, *arguments, env={**os.environ, **environment}, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await child.wait()


@contextlib.asynccontextmanager
async def serving(example: str, **environment: str) -> AsyncIterator[httpx.AsyncClient]:
    """The example serves; what asks it."""
    port = free_port()
    async with process(str(EXAMPLES / f"{example}_app.py"), PORT=str(port), **environment) as child:

        async def listens() -> bool:
            assert child.returncode is None, "the application ended"
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                return False
            writer.close()
            return True

        await until(listens)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS) as client:
            yield client


def notes(engine: Engine, example: str) -> int:
    table = "notes_note" if example == "django" else "notes"
    with engine.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())


@pytest.fixture
async def known(node: dict[str, str], peer: Peer) -> str:
    """A peer that knows this node, and is known to it."""
    introduce(peer, OWN_URL)
    await federation.discover_and_register(peer.url)
    return peer.url


@pytest.mark.parametrize("example", ["fastapi", "django", "flask", "fastapi-async"])
async def test_an_application_owes_in_its_own_transaction(
    known: str, peer: Peer, engine: Engine, example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it commits is delivered; a request that fails owes nothing, and leaves no note either."""
    example, _, kind = example.partition("-")
    path = "/async-notes" if kind else "/notes"
    async with serving(example) as client:
        bad = {"text": "bad", "server": known}
        with contextlib.suppress(httpx.RemoteProtocolError):
            # on a connection of its own: uvicorn closes it after the answer
            assert (await client.post(path, data=bad, headers={"Connection": "close"})).status_code == 500
        answers = await asyncio.gather(
            *(client.post(path, data={"text": f"note {n}", "server": known}) for n in range(8))
        )
        assert [answer.status_code for answer in answers] == 8 * [200]
        ids = {answer.json()["delivery"] for answer in answers}
        assert owed(engine) == ids
        assert notes(engine, example) == 8
        async with process("-m", "federation.workers"):
            await until(lambda: len(peer.applied) == 8)


async def test_a_script_owes_a_delivery(
    known: str, peer: Peer, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain code, which says as what it is owed; a worker sends it."""
    monkeypatch.setattr("sys.argv", ["owe_delivery.py", known, "hello"])
    await asyncio.to_thread(runpy.run_path, str(EXAMPLES / "owe_delivery.py"), run_name="__main__")
    (delivery,) = owed(engine)
    assert f"owed as {delivery};" in capsys.readouterr().out
    async with process("-m", "federation.workers"):
        await until(lambda: len(peer.applied) == 1)


@pytest.mark.parametrize("example", ["fastapi", "django", "flask"])
async def test_a_crash_after_the_commit_loses_nothing(
    known: str, peer: Peer, engine: Engine, example: str, tmp_path: Path
) -> None:
    """The process is killed by the commit itself: nobody adds the job then, where the queue is elsewhere."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "import federation.delivery.outbox.sync as outbox\n"
        "def crash(*args):\n"
        "    os._exit(9)\n"
        "outbox.Later.put = outbox.PlainOutbox._look_soon = crash\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    async with serving(example, PYTHONPATH=path) as client:
        with contextlib.suppress(httpx.HTTPError):
            await client.post("/notes", data={"text": "last words", "server": known})
    await until(lambda: len(owed(engine)) == 1)
    assert notes(engine, example) == 1
    async with process("-m", "federation.workers", FEDERATION_OUTBOX_INTERVAL="1s"):
        await until(lambda: len(peer.applied) == 1)
