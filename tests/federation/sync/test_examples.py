"""The programs of docs/examples and of the pages that owe something: a node like any other takes what they send."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import runpy
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from sqlalchemy import Engine, text

from db import create_host_tables
from tests.federation.sync.conftest import owed
from tests.federation.sync.receiver import AUTHOR, Receiver, listening, process, receiving
from tests.patience import PATIENCE_SECONDS, eventually, until
from tests.servers import free_port

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "docs" / "examples"
PAGES = ("db", "docs", "federation", "workers")
Test = TypeVar("Test", bound=Callable[..., object])
OWES = re.compile(r"\b(enqueue_delivery|enqueue_fanout|publish_post|request_follow|request_unfollow)\(")


def on_places(test: Test) -> Test:
    """The test runs where rows and jobs lie together, and where they do not."""
    places = pytest.mark.parametrize("place", ["sqlite", "bullmq-postgres"], indirect=True)
    return pytest.mark.spread("place")(places(test))  # type: ignore[no-any-return] # a mark's call has no type


@contextlib.asynccontextmanager
async def serving(example: str, **environment: str) -> AsyncIterator[httpx.AsyncClient]:
    """The example serves; what asks it."""
    port = free_port()
    async with process(str(EXAMPLES / f"{example}_app.py"), PORT=str(port), **environment) as child:
        await listening(child, port)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS) as client:
            yield client


def notes(engine: Engine, example: str) -> int:
    table = "notes_note" if example == "django" else "notes"
    with engine.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())


@pytest.fixture
async def receiver(node: dict[str, str], engine: Engine, tmp_path: Path) -> AsyncIterator[Receiver]:
    """Another node, which takes the posts of this one if they are what posts have to be."""
    with engine.begin() as connection:
        create_host_tables(connection)
    async with receiving(tmp_path) as running:
        yield running


async def arrive(receiver: Receiver, *texts: str) -> None:
    """A worker delivers posts of these texts, each once, and nothing is owed any more."""
    async with process("-m", "federation.workers", FEDERATION_OUTBOX_INTERVAL="1s"):
        await eventually(receiver.texts, lambda found: found == sorted(texts))


@on_places
@pytest.mark.parametrize("example", ["fastapi", "django", "flask", "fastapi-async"])
async def test_an_application_owes_in_its_own_transaction(receiver: Receiver, engine: Engine, example: str) -> None:
    """What it commits is delivered; a request that fails owes nothing, and leaves no note either."""
    example, _, kind = example.partition("-")
    path = "/async-notes" if kind else "/notes"
    texts = [f"note {n}" for n in range(8)]
    async with serving(example) as client:
        bad = {"text": "bad", "author": AUTHOR}
        with contextlib.suppress(httpx.RemoteProtocolError):
            # on a connection of its own: uvicorn closes it after the answer
            assert (await client.post(path, data=bad, headers={"Connection": "close"})).status_code == 500
        answers = await asyncio.gather(*(client.post(path, data={"text": text, "author": AUTHOR}) for text in texts))
        assert [answer.status_code for answer in answers] == 8 * [200]
        ids = {delivery for answer in answers for delivery in answer.json()["deliveries"]}
        assert owed(engine) == ids
        assert notes(engine, example) == len(ids) == 8
        await arrive(receiver, *texts)


@pytest.mark.parametrize("example", ["fastapi", "django", "flask"])
async def test_an_application_starts_in_a_nodes_folder(empty_environment: Path, example: str) -> None:
    """As `federation init` made it, and the page says; nothing else tells it where the database is."""
    for command in (["init", "--url", "http://127.0.0.1:8451"], ["users", "add", AUTHOR]):
        async with process("-m", "federation", *command) as child:
            assert await child.wait() == 0
    async with serving(example) as client:
        answer = await client.post("/notes", data={"text": "hello", "author": AUTHOR})
    assert (answer.status_code, answer.json()["deliveries"]) == (200, [])


@on_places
async def test_a_script_owes_a_delivery(
    receiver: Receiver, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain code, which says as what it is owed; a worker sends it."""
    monkeypatch.setattr("sys.argv", ["owe_delivery.py", receiver.url, AUTHOR, "hello"])
    await asyncio.to_thread(runpy.run_path, str(EXAMPLES / "owe_delivery.py"), run_name="__main__")
    (delivery,) = owed(engine)
    assert f"owed as {delivery};" in capsys.readouterr().out
    await arrive(receiver, "hello")


@on_places
@pytest.mark.parametrize("page", ["docs/examples/script.py", "docs/embed/plain-code.md"])
async def test_what_a_page_shows_is_taken(receiver: Receiver, engine: Engine, page: str, tmp_path: Path) -> None:
    """Each of its programs that owes something to other servers; or the one that it is."""
    text = (ROOT / page).read_text()
    programs = [text] if page.endswith(".py") else re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    shown = [code for code in programs if OWES.search(code)]
    assert shown
    for code in shown:
        async with process("-c", code, AUTHOR, "hello") as child:
            assert await child.wait() == 0
    assert len(owed(engine)) == len(shown)
    await arrive(receiver, *len(shown) * ["hello"])


def test_every_program_that_owes_is_run_here() -> None:
    """And every page that shows one."""
    assert {file.stem for file in EXAMPLES.glob("*.py") if OWES.search(file.read_text())} == {
        *("django_app", "fastapi_app", "flask_app", "owe_delivery", "script")
    }
    pages = [*ROOT.glob("*.md"), *(page for folder in PAGES for page in (ROOT / folder).rglob("*.md"))]
    blocks = {page: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in pages}
    owing = {str(page.relative_to(ROOT)) for page, shown in blocks.items() if any(map(OWES.search, shown))}
    assert owing == {"docs/embed/plain-code.md"}


@on_places
@pytest.mark.parametrize("example", ["fastapi", "django", "flask"])
async def test_a_crash_after_the_commit_loses_nothing(
    receiver: Receiver, engine: Engine, example: str, tmp_path: Path
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
            await client.post("/notes", data={"text": "last words", "author": AUTHOR})
    await until(lambda: len(owed(engine)) == 1)
    assert notes(engine, example) == 1
    await arrive(receiver, "last words")
