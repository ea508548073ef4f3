"""What is installed with the extra `dashboard`, and nothing else, is enough for `python -m workers.dashboard`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import httpx
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.patience import PATIENCE_SECONDS, eventually
from tests.servers import free_port
from tests.workers.dashboard.test_command import ended, started
from workers.dashboard.accounts import make_token
from workers.storage.sql import SqlStorage

PROGRAM = """
import json, sys
absent = set(json.loads(sys.argv.pop(1)))
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from workers.dashboard.__main__ import main
sys.exit(main())
"""


def installed_with(package: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    """Yield the names of what pip would bring, the package's own first."""
    name = canonicalize_name(package)
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    yield name
    for requirement in map(Requirement, requires(name) or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield from installed_with(requirement.name, frozenset(requirement.extras), seen)


def absent() -> list[str]:
    """Every importable name of an environment for development that one with the extra alone lacks."""
    there = set(installed_with("federation-delivery", frozenset({"dashboard"}), set()))
    return [name for name, of in packages_distributions().items() if there.isdisjoint(map(canonicalize_name, of))]


async def test_the_extra_is_enough(tmp_path: Path) -> None:
    """A page and the description of the API are answered, and it stops in order."""
    missing = absent()
    assert {"redis", "psycopg", "pytest"} <= set(missing)
    assert {"fastapi", "uvicorn", "jinja2", "argon2", "sqlalchemy"}.isdisjoint(missing)
    url, port = f"sqlite:///{tmp_path}/jobs.db", free_port()
    await SqlStorage(url).migrate()
    token, digest = make_token()
    process = await started(
        *(json.dumps(missing), url, "--port", str(port)),
        accounts=f"bot:operator:{digest}",
        program=(sys.executable, "-c", PROGRAM),
    )
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False, timeout=PATIENCE_SECONDS
    ) as client:

        async def seen() -> str:
            try:
                return (await client.get("/queues", follow_redirects=True)).text
            except httpx.ConnectError:
                assert process.returncode is None, await ended(process)
                return ""

        assert "<!doctype html>" in await eventually(seen, bool)
        assert (await client.get("/api/v1/openapi.json")).json()["openapi"].startswith("3.1")
    process.send_signal(signal.SIGTERM)
    assert (await ended(process))[0] == 0
