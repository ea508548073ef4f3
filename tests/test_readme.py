"""The program that README.md shows, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from federation.base.settings.settings import Settings
from tests import warm
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "examples" / "activitypub" / "hello.py"
NODE = "http://127.0.0.1:8451"
SETTINGS = {"DEV_ALLOWED_HOSTNAMES": "127.0.0.1", "FEDERATION_ACTIVITYPUB": "true"}


def run(directory: Path, *command: str) -> str:
    """What Python printed, in a directory where no variable of ours is set; nothing on stderr, no warning either."""
    finished = subprocess.run(
        [warm.PYTHON, *command],
        cwd=directory,
        env=environment() | {"PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    return finished.stdout


def environment() -> dict[str, str]:
    ours = {name.upper() for name in Settings.model_fields}
    others = {name: value for name, value in os.environ.items() if name not in ours}
    return others | SETTINGS | {"PYTHONPATH": str(ROOT)}


@contextmanager
def inbox() -> Iterator[tuple[str, SimpleQueue[tuple[str, dict[str, object]]]]]:
    """Bob's server: its URL, and what is posted to it, each time the key of the signature and the activity."""
    arrived = SimpleQueue[tuple[str, dict[str, object]]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            (key,) = re.findall(r'keyId="([^"]+)"', self.headers["Signature"])
            arrived.put((key, body))
            self.send_response(202)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", arrived
        finally:
            server.shutdown()
            thread.join()


def test_the_program_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    """On a node fresh from `init`: a note is owed, nothing is left open at its end, and workers deliver it."""
    alice = f"{NODE}/users/alice"
    run(tmp_path, "-m", "federation", "init", "--url", NODE)
    with inbox() as (peer, arrived):
        told = run(tmp_path, str(SCRIPT), alice, f"{peer}/users/bob", f"{peer}/inbox", "hello, fediverse")
        assert told == shown_output().replace("https://a.example", NODE)
        with closing(sqlite3.connect(tmp_path / "federation.sqlite3")) as database:
            assert database.execute("SELECT server_url, state FROM delivery_jobs").fetchall() == [(peer, "ready")]
        workers = [warm.PYTHON, "-m", "federation", "workers", "run"]
        with (
            open(tmp_path / "log", "wb") as log,
            subprocess.Popen(workers, cwd=tmp_path, env=environment(), stdout=log, stderr=log) as process,
        ):
            try:
                key, activity = arrived.get(timeout=PATIENCE_SECONDS)
            finally:
                process.terminate()
    assert (key.partition("#")[0], activity["type"], activity["actor"]) == (alice, "Create", alice)
    note = activity["object"]
    assert isinstance(note, dict)
    assert (note["content"], note["to"]) == ("hello, fediverse", [f"{peer}/users/bob"])


def shown_output() -> str:
    """What the README has the program print."""
    (shown,) = re.findall(r"```console\n\$ python hello\.py .*\n(.*\n)```", (ROOT / "README.md").read_text())
    return str(shown)


def test_the_readme_shows_that_program() -> None:
    """To the letter."""
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown == SCRIPT.read_text()


def test_the_tests_of_what_one_may_rely_on_are_there() -> None:
    """Each by its path, or beside one that is named in full in its row or in the row above."""
    page = (ROOT / "docs" / "understand" / "guarantees.md").read_text()
    table = page.partition("| You may rely on |")[2].partition("\n\n")[0]
    folder = ROOT
    for name in re.findall(r"`([\w/]*test_\w+\.py)`", table):
        file = ROOT / name if "/" in name else next(iter(folder.glob(name)), None) or next((ROOT / "tests").rglob(name))
        assert file.exists(), name
        folder = file.parent
