"""Fixtures every test may use: real servers, one per run, and a database of its own per test."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import certifi
import psycopg
import pytest
import sqlalchemy
from hypothesis import Phase, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests import statements, warm
from tests.forks import Forks
from tests.servers import ValkeyProcess, postgres, valkey

SPARK = "tests/federation/analytics/"
"""What needs Spark: the same process runs it all, so that one JVM runs."""

# The conformance suite is a library: without this its bare asserts would say nothing. Before anybody imports it.
pytest.register_assert_rewrite("workers.testing")

# The same tree gives the same answer each time, however busy the machine. To look for something new:
# `pytest --hypothesis-profile=default`.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
# For `scripts/mutate`, which wants to know that something fails, not the simplest example.
settings.register_profile("unshrunk", settings.get_profile("repeatable"), phases=(Phase.explicit, Phase.generate))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """With `-n`: each test goes to whichever worker is free, but all that need Spark to one, so that one JVM runs."""
    return SparkTogether(config, log)


class SparkTogether(LoadScopeScheduling):
    """What `--dist loadgroup` is for, which pytest 9.2 and xdist 3.8 do not do together."""

    def _split_scope(self, nodeid: str) -> str:
        return "spark" if nodeid.startswith(SPARK) else nodeid


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="run tests in so many processes that are forks of this one")
    parser.addoption("--full", action="store_true", help="also what is left out of every run: see CONTRIBUTING.md")


def pytest_configure(config: pytest.Config) -> None:
    warm.install()
    statements.install()
    gc.set_threshold(200_000, 10, 10)  # a tenth of the time would go into collecting garbage
    _trust_one_authority(config)
    if (forks := config.getoption("--forks")) and not config.getoption("--collect-only"):
        config.pluginmanager.register(Forks(forks, together=SPARK))
    config.addinivalue_line("markers", "full: takes long and rarely breaks; runs with --full only")
    config.addinivalue_line(
        "markers",
        "spread(parameter, always=()): the same whatever its parameter; without --full it runs with one, each test with"
        " another, beside the values of `always`",
    )


def _trust_one_authority(config: pytest.Config) -> None:
    """Our clients read the authorities that they trust: 140 of them take 20 ms each time, and nobody here has one."""
    end = "-----END CERTIFICATE-----\n"
    directory = tempfile.TemporaryDirectory(prefix="fd-authority-")
    config.add_cleanup(directory.cleanup)
    file = Path(directory.name) / "one.pem"
    file.write_text("".join(Path(certifi.where()).read_text().partition(end)[:2]))
    os.environ["SSL_CERT_FILE"] = str(file)


@pytest.hookimpl(tryfirst=True)  # before tests are shuffled: every process of a run must choose alike
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--full`, leave out tests marked `full`, and variants of those marked `spread`."""
    if config.getoption("--full"):
        return
    left_out = {item for item in items if item.get_closest_marker("full")}
    variants = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("spread")
        if mark and _value(item, *mark.args) not in ("", *mark.kwargs.get("always", ())):
            variants[_without_parameter(item, *mark.args)].append(item)
    for name, same in variants.items():
        chosen = sorted(same, key=lambda item: item.nodeid)[crc32(name.encode()) % len(same)]
        left_out.update(item for item in same if item is not chosen)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _without_parameter(item: pytest.Item, parameter: str) -> str:
    """What tells a test from others, but for the value of that parameter, whose text is a part of the test's id."""
    function, _, variant = item.nodeid.partition("[")
    value = _value(item, parameter)
    return function + re.sub(rf"(^|-){re.escape(value)}(-|]$)", "-", variant, count=1)


def _value(item: pytest.Item, parameter: str) -> str:
    """The value of that parameter; nothing for a test without it."""
    return (
        str(item.callspec.params.get(parameter, "")) if isinstance(item, pytest.Function) and "[" in item.nodeid else ""
    )


@pytest.fixture(scope="session", autouse=True)
def _no_class_archive() -> Iterator[None]:
    """No command of a test writes its 140 MB for Spark, which takes a minute, to somebody's cache directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", "/dev/null")
        yield


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether this is a run with `--full`, in which what scales may be large."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyProcess]:
    """The run's shared Valkey: never restart or flush this one, make your own with `valkey()`."""
    with valkey() as server:
        yield server


@pytest.fixture
def redis_url(valkey_server: ValkeyProcess) -> str:
    """URL of a real Valkey server; use a queue name or prefix of your own, the server is shared."""
    return valkey_server.url


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    with postgres() as url:
        yield url
        if url in _admins:
            _admins.pop(url).close()


_admins: dict[str, psycopg.Connection] = {}
"""Of each server: to connect takes as long as to make a database."""


def _admin(server: str) -> psycopg.Connection:
    if server not in _admins:
        _admins[server] = psycopg.connect(server.replace("+psycopg", ""), autocommit=True)
    return _admins[server]


@contextlib.contextmanager
def postgres_database(server: str, *, template: str | None = None) -> Iterator[str]:
    """URL (psycopg 3) of a database that is dropped afterwards: empty, or a copy of the database `template` names."""
    name = f"test_{uuid.uuid4().hex}"
    source = f" TEMPLATE {sqlalchemy.make_url(template).database}" if template else ""
    admin = _admin(server)
    # As files, with what PostgreSQL keeps there for who connects: through its log it takes half as long again.
    copied = " STRATEGY file_copy" if admin.info.server_version >= 150_000 else ""  # before, there is no other way
    admin.execute(f"CREATE DATABASE {name}{source}{copied}".encode())
    yield sqlalchemy.make_url(server).set(database=name).render_as_string(hide_password=False)
    admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """SQLAlchemy URL (psycopg 3) of an empty PostgreSQL database that is dropped after the test."""
    with postgres_database(postgres_server) as url:
        yield url
