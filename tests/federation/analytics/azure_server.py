"""A server with the interface of Azure's storage (Azurite, from npm)."""

from __future__ import annotations

import os
import re
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
        from azure.storage.blob import ContainerClient

        address, key = f"http://127.0.0.1:{self.port}/{ACCOUNT}", AZURE_CREDENTIALS["AZURE_STORAGE_KEY"]
        with ContainerClient(address, name, credential=key) as container:
            container.create_container()


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
