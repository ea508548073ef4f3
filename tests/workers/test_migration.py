"""The pages of docs/migration show a program of another queue and the same one of ours, and both do the same.

Each program begins with the commands that start it, and these are what is run here. Ours always run. BullMQ's runs with
the packages of `tests/interop`. The others run where `PEERS` names a folder with an environment for each that is to
run, as they do not agree on a version of redis-py:

    python -m venv /tmp/peers/arq
    /tmp/peers/arq/bin/pip install --requirement docs/migration/arq/requirements.txt
    PEERS=/tmp/peers python -m pytest tests/workers/test_migration.py
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from tests.interop.peer import HERE as NODE
from tests.interop.peer import install_npm_packages
from tests.patience import PATIENCE_SECONDS, until
from tests.workers.manual import ROOT, TITLE_OR_BLOCK

Command: TypeAlias = Sequence[str]

PAGES: Final = ROOT / "docs" / "migration"
PEERS: Final = ("arq", "bullmq", "celery", "dramatiq", "procrastinate", "saq", "taskiq")
SECTIONS: Final = ("Words", "Guarantees", "Move a fleet", "Before", "After")
RECURRED: Final = "cleaned up"
DONE: Final = ("sent hello to bob", "charged order 7 in attempt 2", "sent good morning to carol", RECURRED)


class Shop:
    """A folder in which programs run, whose commands find what is installed in `bin` first."""

    def __init__(self, folder: Path, bin: Path, **variables: str) -> None:  # noqa: A002 - what such folders are called
        self._folder = folder
        path = f"{bin}{os.pathsep}{os.environ['PATH']}"
        self._environment = {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **variables}

    async def does_its_work(self, program: Path) -> None:
        """All of `DONE`, by the commands of the program: the last ends, those before it work until then."""
        shutil.copy(program, self._folder)
        once, (*services, producer) = commands(program)
        for command in once:
            await self.run(command)
        async with self.works(*services) as output:
            await self.produces(producer, output)

    async def produces(self, producer: Command, output: Path) -> None:
        """All of `DONE` has been done since the producer began, by those who print there."""
        if "BackgroundScheduler" not in (self._folder / producer[1]).read_text():  # or it makes recur what recurs
            # The workers are ready: the producer does not wait for their imports, and saq's first sweep is over, which
            # aborts a job that has been taken and not yet been marked.
            await until(lambda: RECURRED in output.read_text())
        printed = await self.run(producer)
        await until(lambda: all(line in printed + output.read_text() for line in DONE))

    async def run(self, command: Command) -> str:
        """It ended well; what it printed."""
        process = await asyncio.create_subprocess_exec(
            *command, cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                printed, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0
        return printed.decode()

    @contextlib.asynccontextmanager
    async def works(self, *services: Command) -> AsyncIterator[Path]:
        """These go on beside the block; where they print."""
        output = self._folder / f"output-{uuid.uuid4().hex}"
        with output.open("wb") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            started = [
                subprocess.Popen(service, cwd=self._folder, env=self._environment, start_new_session=True, **streams)
                for service in services
            ]
        try:
            yield output
        finally:
            print(output.read_text())  # for whoever reads why a test failed
            for process in started:
                process.terminate()
            await asyncio.gather(*(asyncio.to_thread(_end, process) for process in started))


def _end(process: subprocess.Popen[bytes]) -> None:
    """It ends, at the latest after a while, and with it whatever it has started."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE_SECONDS / 4)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def commands(program: Path) -> tuple[Sequence[Command], Sequence[Command]]:
    """What the program shows to be typed: what is done once, and the rest."""
    shown = re.match(r'(?:"""|/\* ).*?\n\n(.*?)\n(?:"""|\*/)\n', program.read_text(), re.DOTALL)
    assert shown is not None
    lines = shown[1].splitlines()
    once = [line for line in lines if line.endswith("# once")]
    return [shlex.split(line, comments=True) for line in once], [
        shlex.split(each) for each in lines if each not in once
    ]


def programs(peer: str) -> tuple[Path, Path]:
    """Theirs and ours."""
    return next((PAGES / peer).glob("old.*")), PAGES / peer / "new.py"


def their_bin(peer: str) -> Path:
    """Where their commands are."""
    folder = Path(os.environ.get("PEERS", "/nonexistent")) / peer / "bin"
    if not folder.exists():
        pytest.skip(f"{peer}'s program DID NOT RUN: it is not installed; this file's docstring says how it is run")
    return folder


@pytest.fixture
def variables(peer: str, request: pytest.FixtureRequest) -> Mapping[str, str]:
    """Where the programs keep their jobs: each in a database of its own."""
    if peer == "procrastinate":
        url = str(request.getfixturevalue("postgres_url")).replace("+psycopg", "")
        return {"DATABASE_URL": url, "QUEUE_URL": f"{url}{'&' if '?' in url else '?'}queue=shop"}
    server = str(request.getfixturevalue("redis_url"))
    url = f"{server.rpartition('/')[0]}/{1 + PEERS.index(peer)}"
    return {"REDIS_URL": url, "QUEUE_URL": f"{url}?queue=shop"}


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer != "bullmq"])
async def test_our_program_does_its_work(peer: str, variables: Mapping[str, str], tmp_path: Path) -> None:
    """On the storage that its page says."""
    shop = Shop(tmp_path, Path(sys.executable).parent, PYTHONWARNINGS="error", **variables)
    await shop.does_its_work(programs(peer)[1])


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer != "bullmq"])
async def test_their_program_does_the_same(peer: str, variables: Mapping[str, str], tmp_path: Path) -> None:
    await Shop(tmp_path, their_bin(peer), **variables).does_its_work(programs(peer)[0])


@pytest.mark.parametrize("peer", ["bullmq"])
async def test_a_queue_of_nodes_goes_on_here(variables: Mapping[str, str], tmp_path: Path) -> None:
    """First Node works alone. Then we work for its producer, and its scheduler goes on; then we produce as well."""
    install_npm_packages()
    (tmp_path / "node_modules").symlink_to(NODE / "node_modules")
    url = f"bullmq+{variables['QUEUE_URL']}"
    shop = Shop(tmp_path, Path(sys.executable).parent, **variables | {"QUEUE_URL": url})
    theirs, ours = programs("bullmq")
    await shop.does_its_work(theirs)
    _, (_, their_producer) = commands(theirs)
    _, (our_worker, _) = commands(ours)
    shutil.copy(ours, tmp_path)
    async with shop.works(our_worker) as output:
        await shop.produces(their_producer, output)
    await shop.does_its_work(ours)


@pytest.mark.parametrize("peer", PEERS)
def test_a_page_shows_its_programs(peer: str) -> None:
    """To the letter; and the page has all its parts."""
    text = (PAGES / f"{peer}.md").read_text()
    theirs, ours = (program.read_text() for program in programs(peer))
    shown = {}
    title = ""
    for match in TITLE_OR_BLOCK.finditer(text):
        title = match["title"] or title
        if match["language"] in ("python", "js"):
            shown[title] = match["code"]
    assert shown == {"Before": theirs, "After": ours}
    assert tuple(re.findall(r"^## (.+)$", text, re.MULTILINE)) == SECTIONS


def test_every_page_is_listed() -> None:
    """In the vocabulary, each once; Sidekiq's has no programs."""
    listed = re.findall(r"\]\(\.\./docs/migration/([a-z]+)\.md\)", (ROOT / "workers" / "vocabulary.md").read_text())
    assert sorted(listed) == sorted([*PEERS, "sidekiq"]) == sorted(path.stem for path in PAGES.glob("[a-z]*.md"))
    assert sorted(PEERS) == sorted(path.name for path in PAGES.iterdir() if path.is_dir())
