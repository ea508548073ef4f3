"""The `federation` command in this process, on this test's own database."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import structlog

from federation.admin.doctor import doctor
from federation.base.settings import reach
from federation.cli import main
from tests.federation.protocol.vectors import A
from tests.patience import PATIENCE_SECONDS

LIMITED = """
import resource, runpy, sys
limit, number = getattr(resource, sys.argv[1]), int(sys.argv[2])
resource.setrlimit(limit, (number, number))
sys.argv[:] = ["federation", *sys.argv[3:]]
runpy.run_module("federation", run_name="__main__", alter_sys=True)
"""
"""`python -m federation` that may have no more of something: the limit's name, the number, then the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> object:
        return json.loads(self.stdout)


class Command:
    """Runs commands. To be called outside a running event loop: each has its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Done:
        self._capsys.readouterr()
        status: object = 0
        try:
            main(arguments)
        except SystemExit as end:
            status = end.code
        output = self._capsys.readouterr()
        assert isinstance(status, int)
        return Done(status=status, stdout=output.out, stderr=output.err)


@pytest.fixture
def node_environment(
    empty_environment: Path, monkeypatch: pytest.MonkeyPatch, database_file: Path
) -> Mapping[str, str]:
    """The environment describes a node with vector A's keys, on a migrated database."""
    values = {
        "BETTER_AUTH_URL": "https://a.example",
        "DATABASE_URL": f"sqlite:///{database_file}",
        "DEV_ALLOWED_HOSTNAMES": "127.0.0.1",
        **A.env,
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return os.environ


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No busy machine looks like a database that does not answer. Processes of their own keep the usual patience."""
    for module in (reach, doctor):
        monkeypatch.setattr(module, "PATIENCE", timedelta(seconds=PATIENCE_SECONDS))


@pytest.fixture
def own_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each command sets the process's logging up: loggers must not keep this test's stderr when it is over."""
    configure = structlog.configure

    def uncached(**options: object) -> None:
        configure(**{**options, "cache_logger_on_first_use": False})  # type: ignore[arg-type] # handed through

    monkeypatch.setattr(structlog, "configure", uncached)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def command_anywhere(own_logging: None, capsys: pytest.CaptureFixture[str]) -> Command:
    """In whatever environment the test is."""
    return Command(capsys)


@pytest.fixture
def command(node_environment: Mapping[str, str], own_logging: None, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)
