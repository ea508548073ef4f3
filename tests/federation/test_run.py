"""The `federation` command as its user meets it: real processes in an empty folder."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sqlite3
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from federation.base.errors import ConfigurationError
from federation.base.queues.queue import ACTIVITIES_QUEUE_NAME, QUEUE_NAMES
from federation.base.settings.settings import KEY_VARIABLES, Settings, write_env_file
from federation.cli import main
from federation.protocol.keys import generate_own_keys
from federation.run import run
from federation.runtime.composition import Federation
from tests import warm
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import post_payload
from tests.misbehaving import hang
from tests.patience import PATIENCE_SECONDS, until
from tests.peer import POSTS_PATH, Peer, acquaint
from tests.servers import ValkeyProcess, free_port

ROOT = Path(__file__).resolve().parents[2]


class Command:
    """One run of a command; its output is collected."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def stderr(self) -> str:
        return self._log.read_text()

    async def until(self, condition: Callable[[], bool], *, alive: bool = True) -> None:
        """It has become so; a process that ends meanwhile fails the test, unless it may."""

        def is_so() -> bool:
            came = condition()
            ended = alive and self.process.returncode is not None
            assert came or not ended, f"exit status {self.process.returncode}, stderr:\n{self.stderr}"
            return came

        await until(is_so)

    async def until_logged(self, *texts: str) -> None:
        await self.until(lambda: all(text in self.stderr for text in texts))

    async def ended(self) -> int:
        """Its exit status; who ends only after a grace of an hour does not end."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.process.wait()


class Folder:
    """A newcomer's empty folder, with the commands run in it; none outlives the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
        self._commands: list[Command] = []

    async def start(self, *arguments: str, **environment: str) -> Command:
        log = self.path.parent / f"{self.path.name}-stderr-{len(self._commands)}"  # of this folder alone
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(warm.PYTHON, "-m", *arguments),
                cwd=self.path,
                env={**self.environment, **environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
            )
        self._commands.append(Command(process, log))
        return self._commands[-1]

    async def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Exit status, stdout, stderr of a `federation` command that ends by itself."""
        command = await self.start("federation", *arguments, **environment)
        async with asyncio.timeout(PATIENCE_SECONDS):
            stdout, _ = await command.process.communicate()
        assert command.process.returncode is not None
        return command.process.returncode, stdout.decode(), command.stderr

    def settings(self) -> Settings:
        """What is in the folder's `.env`."""
        lines = (self.path / ".env").read_text().splitlines()
        values = {name: text.strip('"') for name, _, text in (line.partition("=") for line in lines)}
        return Settings.from_values({**values, "DATABASE_URL": f"sqlite:///{self.path}/federation.sqlite3"})

    async def close(self) -> None:
        for command in self._commands:
            if command.process.returncode is None:
                command.process.kill()
            await command.process.communicate()


@pytest.fixture
async def empty(tmp_path: Path) -> AsyncIterator[Folder]:
    path = tmp_path / "empty"
    path.mkdir()
    made = Folder(path)
    yield made
    await made.close()


@pytest.fixture
async def folder(empty: Folder, migrated_file: Path) -> Folder:
    """As `federation init` leaves it."""
    port = str(free_port())
    keys = generate_own_keys().to_env()
    values = {"BETTER_AUTH_URL": f"http://127.0.0.1:{port}", **keys, "FEDERATION_PORT": port}
    write_env_file(empty.path / ".env", values)
    shutil.copy(migrated_file, empty.path / "federation.sqlite3")
    return empty


def select(database: Path, statement: str) -> set[str]:
    with closing(sqlite3.connect(database)) as connection:
        return {value for (value,) in connection.execute(statement)}


def tables(database: Path) -> set[str]:
    return select(database, "SELECT name FROM sqlite_master WHERE type = 'table'")


def serves(url: str) -> bool:
    try:
        answer = httpx.get(f"{url}/discover", timeout=PATIENCE_SECONDS, trust_env=False)
    except httpx.TransportError:
        return False
    return answer.is_success and answer.json()["url"] == url


async def test_init_makes_a_node_and_a_second_one_leaves_it_alone(empty: Folder) -> None:
    """A private `.env` with fresh keys, a database with all tables, and a word about what comes next."""
    status, stdout, stderr = await empty.run("init", "--url", "http://127.0.0.1:8123/")
    assert (status, stderr) == (0, "")
    assert "wrote .env with fresh keys for http://127.0.0.1:8123" in stdout
    assert "`federation run`" in stdout
    env = empty.path / ".env"
    assert stat.S_IMODE(env.stat().st_mode) == 0o600
    settings = empty.settings()
    assert (settings.better_auth_url, settings.federation_port) == ("http://127.0.0.1:8123", 8123)
    assert settings.own_keys() is not None
    database = empty.path / "federation.sqlite3"
    assert {"delivery_jobs", "server_registry", "workers_jobs", "user", "posts", "blocks"} <= tables(database)
    assert select(database, "SELECT name FROM workers_queues") == set(QUEUE_NAMES)
    secret = settings.federation_private_key
    assert secret is not None
    assert secret.get_secret_value() not in stdout

    before = env.read_bytes()
    status, stdout, _ = await empty.run("init", "--url", "http://127.0.0.1:8123")
    assert status == 0
    assert ".env exists and stays as it is" in stdout
    status, stdout, stderr = await empty.run("init", "--url", "http://other.example")
    assert (status, stdout) == (2, "")
    assert stderr.startswith("federation: this node is http://127.0.0.1:8123 already")
    assert env.read_bytes() == before


async def test_run_serves_delivers_and_stops_in_order(folder: Folder, peer: Peer) -> None:
    """`federation init` and `federation run` are a working node; SIGTERM ends it with status 0."""
    settings = folder.settings()
    url = str(settings.better_auth_url)
    command = await folder.start("federation", "run", DEV_ALLOWED_HOSTNAMES="127.0.0.1")
    await command.until(lambda: serves(url))
    producer = Federation(settings.model_copy(update={"dev_allowed_hostnames": frozenset({"127.0.0.1"})}))
    async with producer.outbox.transaction() as session:
        await producer.outbox.enqueue_delivery(
            session, "deliver-post", peer.url + POSTS_PATH, peer.url, post_payload("p", own_url=url)
        )
    await command.until(lambda: bool(peer.applied))
    await producer.close()
    command.process.send_signal(signal.SIGTERM)
    assert await command.ended() == 0
    events = [json.loads(line) for line in command.stderr.splitlines()]
    names = [event["event"] for event in events]
    assert names.index("stopping") < names.index("worker_stopped") < names.index("stopped") == len(names) - 1
    assert names.count("worker_ready") == names.count("worker_stopped") == 3
    assert {"node_serving", "delivery_attempt"} <= set(names)
    assert not serves(url)
    keys = settings.own_keys()
    assert keys is not None
    assert not any(value in command.stderr for value in keys.to_env().values())


async def test_run_with_activitypub_works_on_a_queue_more_and_serves_what_finds_actors(folder: Folder) -> None:
    """`upgrade` makes that queue, `queues stats` and the doctor look at it, and `/readyz` asks it, too.

    What is received are tasks, which have a worker then.
    """
    on, url = {"FEDERATION_ACTIVITYPUB": "1"}, str(folder.settings().better_auth_url)
    assert (await folder.run("upgrade", **on))[0] == 0
    names = {*QUEUE_NAMES, ACTIVITIES_QUEUE_NAME}
    assert select(folder.path / "federation.sqlite3", "SELECT name FROM workers_queues") >= names
    command = await folder.start("federation", "run", DEV_ALLOWED_HOSTNAMES="127.0.0.1", **on)
    await command.until(lambda: serves(url) and command.stderr.count("worker_ready") == 5)
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS, trust_env=False) as client:
        assert (await client.get(f"{url}/.well-known/nodeinfo")).json()["links"]
    status, stdout, _ = await folder.run("queues", "stats", "--json", **on)
    assert (status, {each["queue"] for each in json.loads(stdout)}) == (0, names)
    command.process.send_signal(signal.SIGTERM)
    assert await command.ended() == 0
    assert command.stderr.count("worker_stopped") == 5


async def test_activitypub_without_a_name_or_keys_is_told_by_name(empty: Folder) -> None:
    """Whatever is to run."""
    database = {"DATABASE_URL": f"sqlite:///{empty.path}/federation.sqlite3"}
    assert (await empty.run("upgrade", **database))[0] == 0
    for arguments in (["run"], ["queues", "stats"]):
        status, _, stderr = await empty.run(*arguments, FEDERATION_ACTIVITYPUB="1", **database)
        assert status == 2
        assert {"BETTER_AUTH_URL", *KEY_VARIABLES} <= {word.strip(" :") for word in re.split(r"[\s,:]", stderr)}


async def test_a_second_signal_skips_the_grace(folder: Folder, peer: Peer) -> None:
    """A delivery to a hanging peer would hold the stop for the grace; it is given back, uncounted."""
    settings = folder.settings()
    producer = Federation(settings)
    await acquaint(producer, peer)
    peer.server.default = hang()
    async with producer.outbox.transaction() as session:
        delivery_id = await producer.outbox.enqueue_delivery(
            session, "deliver-post", peer.url + POSTS_PATH, peer.url, post_payload("p")
        )
    command = await folder.start(
        "federation.workers", DEV_ALLOWED_HOSTNAMES="127.0.0.1", FEDERATION_GRACE="1h", FEDERATION_LEASE="1h"
    )
    await command.until(lambda: bool(peer.deliveries))
    command.process.send_signal(signal.SIGTERM)
    await command.until_logged("stopping")
    assert command.process.returncode is None
    command.process.send_signal(signal.SIGTERM)
    assert await command.ended() == 0
    status = await producer.delivery_queue.get_status(delivery_id)
    assert status is not None
    assert (status.state.value, status.attempt) == ("queued", 0)
    await producer.close()


async def test_the_workers_module_runs_without_a_warning(folder: Folder) -> None:
    """`python -m federation.workers` with warnings as errors; SIGINT ends it too."""
    command = await folder.start("federation.workers")
    await command.until(lambda: command.stderr.count("worker_ready") == 3)
    command.process.send_signal(signal.SIGINT)
    assert await command.ended() == 0
    assert "Warning" not in command.stderr
    assert "node_serving" not in command.stderr


async def test_node_serve_serves_and_delivers_nothing(folder: Folder) -> None:
    """The inbound side alone."""
    command = await folder.start("federation", "node", "serve")
    url = str(folder.settings().better_auth_url)
    await command.until(lambda: serves(url))
    command.process.terminate()
    assert await command.ended() == 0
    assert "worker_ready" not in command.stderr


WRONG = {
    "FEDERATION_PORT": "s3cret",
    "FEDERATION_GRACE": "s3cret",
    "REDIS_URL": "http://:s3cret@redis",
    "FEDERATION_PRIVATE_KEY": "s3cret",
}
NAMED = {
    "FEDERATION_PORT",
    "FEDERATION_GRACE",
    "REDIS_URL",
    "BETTER_AUTH_URL",
    "FEDERATION_PUBLIC_KEY",
    "FEDERATION_PRIVATE_KEY",
    "FEDERATION_ENCRYPTION_PUBLIC_KEY",
    "FEDERATION_ENCRYPTION_PRIVATE_KEY",
}


def variables_named_in(stderr: str) -> set[str]:
    first, second, *problems = stderr.splitlines()
    assert (first, second) == ("federation:", "  this node's settings need attention:")
    return {line.strip().partition(":")[0] for line in problems}


async def test_wrong_settings_are_listed_all_at_once(empty: Folder) -> None:
    """Status 2, every variable by its name, no value and no traceback."""
    status, stdout, stderr = await empty.run("run", **WRONG)
    assert (status, stdout) == (2, "")
    assert variables_named_in(stderr) == NAMED
    assert "s3cret" not in stderr


@pytest.mark.parametrize("arguments", [["workers", "run"], ["node", "serve"]])
def test_each_side_wants_the_same_settings(
    arguments: list[str],
    empty_environment: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Delivering alone and serving alone name what both need."""
    for variable, text in WRONG.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert variables_named_in(capsys.readouterr().err) == NAMED


async def test_a_port_in_use_is_told(make_settings: MakeSettings) -> None:
    """With address and the variables that choose it."""
    async with await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConfigurationError) as error:
            await run(make_settings(federation_port=port), workers=True, node=True)
    (problem,) = error.value.problems
    assert problem.startswith(f"FEDERATION_BIND, FEDERATION_PORT: cannot listen on 127.0.0.1:{port}: ")


async def test_metrics_on_the_nodes_own_port_are_told(make_settings: MakeSettings) -> None:
    """That the port is in use would not say by whom."""
    port = free_port()
    with pytest.raises(ConfigurationError, match=f"--metrics-port: {port} is FEDERATION_PORT"):
        await run(make_settings(federation_port=port), workers=True, node=True, metrics_port=port)


async def test_a_database_without_tables_is_told_with_what_to_do(make_settings: MakeSettings, tmp_path: Path) -> None:
    """Before anything is started."""
    settings = make_settings(database_url=f"sqlite:///{tmp_path}/new.db", federation_port=free_port())
    with pytest.raises(ConfigurationError, match=r"DATABASE_URL: .* by `federation init`, or by `federation upgrade`"):
        await run(settings, workers=True, node=True)


async def test_a_queue_without_tables_is_told_with_what_to_do(folder: Folder) -> None:
    """The other side of the process ends with the worker; there is no traceback."""
    status, _, stderr = await folder.run("run", QUEUE_URL="sqlite:///queue.sqlite3")
    assert (status, "`federation upgrade`" in stderr, "Traceback" in stderr) == (2, True, False)


def test_upgrade_makes_what_run_needs(
    empty_environment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Application tables in one file, the queues' in another; repeating it changes nothing. A host's are the host's."""
    monkeypatch.setenv("QUEUE_URL", "sqlite:///queue.sqlite3")
    for _ in range(2):
        main(["upgrade"])
        assert "delivery_jobs" in tables(empty_environment / "federation.sqlite3")
        assert "workers_jobs" in tables(empty_environment / "queue.sqlite3")
        assert "posts" not in tables(empty_environment / "federation.sqlite3")
        output = capsys.readouterr()
        assert (output.out.splitlines()[-1], output.err) == ("the database is up to date", "")


def test_a_database_nobody_answers_for_is_told(
    empty_environment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its URL, which holds a password."""
    monkeypatch.setenv("DATABASE_URL", f"postgresql://u:s3cret@127.0.0.1:{free_port()}/x")
    with pytest.raises(SystemExit) as end:
        main(["upgrade"])
    stderr = capsys.readouterr().err
    assert (end.value.code, "the database cannot be used" in stderr, "s3cret" in stderr) == (2, True, False)


async def test_a_dead_redis_is_awaited_and_does_not_hold_the_stop(folder: Folder, tmp_path: Path) -> None:
    """The workers keep trying, start when it is there, survive its end, and stop on SIGTERM."""
    directory = tmp_path / "valkey"
    directory.mkdir()
    redis = ValkeyProcess(directory)
    command = await folder.start(
        "federation.workers", REDIS_URL=redis.url, FEDERATION_GRACE="1h", FEDERATION_LEASE="1h"
    )
    try:
        await command.until(lambda: command.stderr.count("worker_error") >= 4)
        redis.start()
        await command.until(lambda: command.stderr.count("worker_ready") == 3)
        redis.kill()
        errors = command.stderr.count("worker_error")
        await command.until(lambda: command.stderr.count("worker_error") > errors)
        command.process.terminate()
        assert await command.ended() == 0
    finally:
        redis.kill()


@pytest.mark.parametrize("arguments", [["walk"], [], ["workers"], ["node"]])
def test_an_unknown_command_shows_how_it_is_used(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and the usage, as for a missing one."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("Usage: federation")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("node.example", "scheme must be http or https"),
        ("127.0.0.1:8461", "http or https, as in https://node.example or, here, http://127.0.0.1:8451"),
        ("https://node.example/fediverse", "a node is known by scheme, host and port alone, as https://node.example"),
        ("https://node.example/?a=b", "a node is known by scheme, host and port alone, as https://node.example"),
    ],
)
def test_an_own_url_that_is_none_is_told(
    empty_environment: Path, capsys: pytest.CaptureFixture[str], url: str, why: str
) -> None:
    """And nothing is written."""
    with pytest.raises(SystemExit) as end:
        main(["init", "--url", url])
    assert end.value.code == 2
    assert why in capsys.readouterr().err
    assert list(empty_environment.iterdir()) == []
