"""What the command loads, how it helps, and what a shell may complete."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from federation.base.settings.settings import write_env_file
from federation.base.terminal import mind_crashes
from federation.cli.dashboard import needing_the_extra
from federation.cli.problems import expect
from federation.protocol.keys import generate_own_keys
from tests.federation.cli.conftest import Command
from tests.patience import PATIENCE_SECONDS
from workers.version import of_commit

ROOT = Path(__file__).parents[3]
HEAVY = {
    *("sqlalchemy", "sqlmodel", "httpx", "httptools", "alembic", "nacl", "structlog", "rich", "bullmq"),
    *("redis", "apscheduler", "asyncio"),
}
OF_A_NODE = {"federation.runtime.composition", "httpx", "workers.worker", "workers.tasks", "workers.storage.base"}
"""What a command that asks the database alone has no use for."""
OF_OTHERS = {"jinja2", "pyspark", "pyarrow", "fastapi", "uvicorn", "alembic", "prometheus_client", "redis", "bullmq"}
"""What a worker has no use for whose queues are in the database."""
PROGRAM = """
import json, sys
from federation.cli import main
for command in json.loads(sys.argv[1]):
    main(command)
print(*sorted(sys.modules), file=sys.stderr)
"""
WORKER = """
import sys
from federation.cli import main
class Ready:
    def write(self, text):
        if '"worker_ready"' in text:
            sys.__stderr__.write("loaded: " + " ".join(sys.modules) + "\\n")
    def flush(self): sys.__stderr__.flush()
    def isatty(self): return False
sys.stderr = Ready()
main(["workers", "run"])
"""
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "{package}":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from federation.cli import main
main(sys.argv[1:])
"""
NOUNS = ["servers", "deliveries", "blacklist", "queues", "scheduler", "workers", "node", "db", "keys", "users"]


def run(*commands: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """These, one after the other, in an interpreter that tells at its end what it has loaded for all of them."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def test_help_loads_no_part_of_the_application() -> None:
    """It is shown at once, and so is what a shell completes."""
    done = run(["--help"], ["deliveries", "drop", "-h"])
    assert done.returncode == 0
    assert done.stdout.count("Usage: federation") == 2
    assert not HEAVY & set(done.stderr.split())


def test_what_asks_the_database_loads_no_node(tmp_path: Path, migrated_file: Path) -> None:
    """Neither its HTTP client nor its queues: each takes longer to import than the question to answer."""
    database = shutil.copy(migrated_file, tmp_path)
    lists = [[noun, "list"] for noun in ("actions", "blacklist", "deliveries", "servers")]
    done = run(*lists, ["deliveries", "stats"], DATABASE_URL=f"sqlite:///{database}")
    assert done.returncode == 0, done.stderr
    assert "db.session" in done.stderr.split()
    assert not OF_A_NODE & set(done.stderr.split())


def test_a_worker_loads_nothing_of_other_parts(node_environment: Mapping[str, str]) -> None:
    """Until it takes jobs, and on a node without Redis, dashboard, metrics and inbound side."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKER],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **node_environment},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        told = next((line for line in process.stderr if line.startswith("loaded: ")), "")
        process.terminate()
        rest = process.stderr.read()
    loaded = set(told.split())
    assert "federation.runtime.workers" in loaded, told + rest
    assert not OF_OTHERS & loaded
    assert process.returncode == 0


def test_the_version_is_that_of_the_commit() -> None:
    """Nothing of the application is loaded for it, and no node is needed."""
    done = run(["--version"])
    assert (done.returncode, done.stdout) == (0, f"federation {of_commit()}\n")
    assert not HEAVY & set(done.stderr.split())


def test_a_copy_that_nobody_installed_has_no_version(
    command_anywhere: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.version.version", lambda: None)
    assert command_anywhere("--version").stdout == "federation (not installed)\n"


def test_a_command_that_crashes_says_so_in_escaped_text(
    command_anywhere: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that commands are built with takes the place of what prints tracebacks."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    mind_crashes()
    minded = sys.excepthook
    assert command_anywhere("--help").status == 0
    assert sys.excepthook is minded


def test_a_shell_completes_commands() -> None:
    """Those of the application, by what bash asks."""
    asked = {"_FEDERATION_COMPLETE": "complete_bash", "COMP_WORDS": "federation de", "COMP_CWORD": "1"}
    done = run([], **asked)
    assert done.stdout.split() == ["deliveries"]


@pytest.mark.parametrize("noun", NOUNS)
def test_every_noun_lists_its_commands(command: Command, noun: str) -> None:
    """And each of these says what it does in a sentence that is shown in full."""
    listed = command(noun, "--help").stdout.partition("Commands:\n")[2]
    commands = [line for line in listed.splitlines() if line.strip()]
    assert commands
    assert not [line for line in commands if line.endswith("...")]


@pytest.mark.parametrize(
    ("package", "queues", "extra"),
    [
        ("redis", {"REDIS_URL": "redis://127.0.0.1:1"}, "bullmq"),
        ("bullmq", {"QUEUE_URL": "bullmq+redis://127.0.0.1:1"}, "bullmq"),
        pytest.param("redis", {"QUEUE_URL": "bull+redis://127.0.0.1:1"}, "bullmq", marks=pytest.mark.full),
        pytest.param("msgpack", {"QUEUE_URL": "bull+redis://127.0.0.1:1"}, "redis", marks=pytest.mark.full),
        ("msgpack", {"QUEUE_URL": "redis://127.0.0.1:1"}, "redis"),
        ("psycopg", {"QUEUE_URL": "postgresql://127.0.0.1:1/queues"}, "postgres"),
        ("psycopg", {"DATABASE_URL": "postgresql://127.0.0.1:1/node"}, "postgres"),
    ],
)
def test_a_missing_extra_is_named(tmp_path: Path, package: str, queues: dict[str, str], extra: str) -> None:
    """Where a setting asks for a package that is not installed, one line says what to install."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(package=package), "upgrade"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **queues},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.stderr == f"federation: this needs more packages: pip install 'federation-delivery[{extra}]'\n"
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (["dashboard"], "jinja2", "dashboard"),
        (["dashboard"], "argon2", "dashboard"),
        (["dashboard"], "fastapi", "dashboard"),
        (["run", "--dashboard-port", "1"], "uvicorn", "dashboard"),
        (["node", "serve"], "fastapi", "node"),
        (["node", "serve"], "uvicorn", "node"),
        (["workers", "run", "--metrics-port", "1"], "prometheus_client", "metrics"),
        (["analytics", "run", "--out", "x"], "pyspark", "analytics"),
        (["analytics", "run", "--out", "x"], "pyarrow", "analytics"),
    ],
)
def test_the_extra_of_a_part_is_named_by_what_is_missing(
    tmp_path: Path, migrated_file: Path, arguments: list[str], package: str, extra: str
) -> None:
    """A part that cannot start names the extra that has the package, in one line."""
    shutil.copy(migrated_file, tmp_path / "federation.sqlite3")
    write_env_file(tmp_path / ".env", {"BETTER_AUTH_URL": "http://127.0.0.1:1", **generate_own_keys().to_env()})
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(package=package), *arguments],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    needs = f"the dashboard needs the package {package!r}" if extra == "dashboard" else "this needs more packages"
    assert done.stderr.splitlines()[-1] == f"federation: {needs}: pip install 'federation-delivery[{extra}]'"
    assert done.returncode == 2


def test_a_dashboard_misses_only_what_it_uses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A package of another part is called by that part's extra; of a module of ours nobody says that pip has it."""
    expect([])  # not JSON, which a command before this test may have asked for
    with pytest.raises(SystemExit), needing_the_extra():
        raise ModuleNotFoundError("", name="pyspark.sql")
    assert capsys.readouterr().err.endswith("'pyspark.sql': pip install 'federation-delivery[analytics]'\n")
    with pytest.raises(ModuleNotFoundError), needing_the_extra():
        raise ModuleNotFoundError("", name="federation.gone")
