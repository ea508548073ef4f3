"""A server with the interface of Azure's storage (Azurite, from npm)."""

from __future__ import annotations

import hmac
import os
import re
import subprocess
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

from tests.interop.peer import install_npm_packages
from tests.servers import Caretaker

HERE = Path(__file__).with_name("azurite")

ACCOUNT = "tester"
AZURE_CREDENTIALS = {"AZURE_STORAGE_KEY": b64encode(b"s3cret of the account").decode()}


@dataclass(frozen=True)
class AzureServer:
    """A server that is running, and may be reached with `AZURE_CREDENTIALS`."""

    port: int

    @property
    def options(self) -> str:
        """What follows the URL of a folder in a container of `ACCOUNT`."""
        return f"?endpoint_override=http://127.0.0.1:{self.port}"

    def make_container(self, name: str) -> None:
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        told = "".join(f"{name}:{value}\n" for name, value in headers.items())
        signed = f"PUT{chr(10) * 12}{told}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        key = b64decode(AZURE_CREDENTIALS["AZURE_STORAGE_KEY"])
        signature = b64encode(hmac.digest(key, signed.encode(), "sha256")).decode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{ACCOUNT}/{name}?restype=container",
            headers={**headers, "Authorization": f"SharedKey {ACCOUNT}:{signature}"},
            method="PUT",
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 201


@contextmanager
def azure_server() -> Iterator[AzureServer]:
    """It keeps what it is given in memory."""
    install_npm_packages(HERE)
    program = HERE / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    command = ["node", str(program), "--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence"]
    options = ("--skipApiVersionCheck", "--disableTelemetry", "--disableProductStyleUrl")
    with Caretaker("fd-azure-") as caretaker:
        process = subprocess.Popen(
            [*command, *options],
            cwd=caretaker.directory,
            env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{AZURE_CREDENTIALS['AZURE_STORAGE_KEY']}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        caretaker(process.pid)
        assert process.stdout is not None
        found = (re.search(r"listen\w* (?:at|on) http://127\.0\.0\.1:(\d+)", line) for line in process.stdout)
        try:
            yield AzureServer(next(int(each[1]) for each in found if each))
        finally:
            process.kill()
            process.communicate()
            caretaker(None)
