"""A node whose database is behind a PgBouncer that lends sessions for single transactions."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import make_url

from tests.bouncer import bouncer, through
from tests.federation.cli.conftest import Command


def test_it_is_refused_by_name(
    command: Command, monkeypatch: pytest.MonkeyPatch, postgres_server: str, migrated_postgres_url: str
) -> None:
    """By whatever is started: one line says what was found, where, and what to do; the doctor says it once."""
    with bouncer(postgres_server, "transaction") as port:
        secret = make_url(migrated_postgres_url).set(password="s3cret").render_as_string(hide_password=False)
        monkeypatch.setenv("DATABASE_URL", through(port, secret))
        for arguments in (["run"], ["workers", "run"], ["node", "serve"], ["upgrade"], ["servers", "list"]):
            done = command(*arguments)
            assert (done.status, done.stdout) == (2, "")
            assert done.stderr.startswith(f"federation: the database postgresql://127.0.0.1:{port}/")
            assert done.stderr.endswith("give DATABASE_URL a pool with `pool_mode = session`, or the server itself\n")
            assert done.stderr.count("\n") == 1
            assert "s3cret" not in done.stderr
        told = json.loads(command("upgrade", "--json").stdout)["error"]
        assert (told["kind"], told["details"]) == ("refused", [])
        findings = json.loads(command("doctor", "--json").stdout)["findings"]
        (database,) = [each for each in findings if each["check"] == "database"]
        assert (database["verdict"], database["found"]) == ("failure", told["message"])
        assert database["advice"] == "mend DATABASE_URL"
