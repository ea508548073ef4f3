"""What is shown to applications: the page about tests, and the tests of the examples, as somebody runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests import warm
from tests.patience import PATIENCE_SECONDS
from tests.workers.manual import ROOT

PAGE = ROOT / "docs" / "testing.md"
EXAMPLES = ROOT / "docs" / "examples"
BLOCK = re.compile(r"^```python\n(?:# (?P<file>\w+\.py)\n)?(?P<code>.*?)^```$", re.S | re.M)


def run(folder: Path, *arguments: str, python: str = sys.executable) -> str:
    """What it printed; it succeeded, and nothing warned."""
    done = subprocess.run(
        [python, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pytest_in(folder: Path, *arguments: str) -> str:
    options = ("-W", "error", "-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")
    return run(folder, "-m", "pytest", "-q", *options, *arguments)


def test_the_page_is_so(tmp_path: Path) -> None:
    """Its files are tests that pass, and its program runs."""
    programs = []
    for block in BLOCK.finditer(PAGE.read_text()):
        if block["file"]:
            (tmp_path / block["file"]).write_text(block["code"])
        else:
            programs.append(block["code"])
    assert "4 passed" in pytest_in(tmp_path)
    [program] = programs
    run(tmp_path, "-c", program, python=warm.PYTHON)


def test_the_examples_are_tested(tmp_path: Path) -> None:
    """By what lies beside them."""
    tests = ("activitypub_test.py", "flask_test.py")
    for name in (*tests, "activitypub_fastapi.py", "flask_app.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    assert "5 passed" in pytest_in(tmp_path, *tests)


def test_a_plugin_that_nobody_uses_imports_nothing(tmp_path: Path) -> None:
    """Neither an engine nor a server, and no SQL."""
    (tmp_path / "look.py").write_text(
        "import sys\n"
        "import federation.testing.pytest_plugin\n"
        "assert not {'sqlalchemy', 'federation.runtime.composition', 'federation.testing.node'} & {*sys.modules}\n"
    )
    run(tmp_path, "look.py")


DJANGO = """
import sys
from pathlib import Path

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.test import Client

from federation.testing import SyncFakeRemote, SyncFederationNode

file = Path("db.sqlite3").absolute()
database = {"ENGINE": "django.db.backends.sqlite3", "NAME": file, "OPTIONS": {"transaction_mode": "IMMEDIATE"}}
middleware = ["django.middleware.csrf.CsrfViewMiddleware"]
settings.configure(
    ALLOWED_HOSTS=["*"], DATABASES={"default": database}, MIDDLEWARE=middleware, ROOT_URLCONF="activitypub_django"
)
django.setup()
values = {"DATABASE_URL": f"sqlite:///{file}", "BETTER_AUTH_URL": "http://testserver"}
for _ in range(2):  # the second node finds what the first one has left in the database
    with SyncFederationNode(values, app=get_wsgi_application()) as node, SyncFakeRemote(node) as remote:
        bob = remote.actor("bob")
        assert Client().post(f"/notes?text=hello&to={bob.id}&inbox={bob.inbox}").status_code == 200
        remote.follow(f"{node.url}/users/alice")
        node.receive()
        node.deliver()
        assert sorted(each.type for each in remote.received) == ["Accept", "Create"], remote.requests
"""


def test_the_django_example_is_reached(tmp_path: Path) -> None:
    """By others, through its own views: they fetch alice's key from these, and post to these."""
    shutil.copy(EXAMPLES / "activitypub_django.py", tmp_path)
    run(tmp_path, "-c", DJANGO, python=warm.PYTHON)
