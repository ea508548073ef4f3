"""An S3 server (moto's), in a process of its own: nobody else pays for its imports."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from dataclasses import dataclass

CARELESS = "careless"
"""A bucket of a server that writes over what is there though asked not to, as older ones do."""

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "tester",
    "AWS_SECRET_ACCESS_KEY": "s3cret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}

SERVE = f"""
import contextlib, logging, os, sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

logging.getLogger("werkzeug").setLevel(logging.ERROR)
served = DomainDispatcherApplication(create_backend_app)

alone = threading.Lock()  # moto looks whether there is an object, and then writes it: two could do both at once

def careless(environ, start_response):
    if environ["PATH_INFO"].startswith("/{CARELESS}/"):
        environ.pop("HTTP_IF_NONE_MATCH", None)
    with alone if "HTTP_IF_NONE_MATCH" in environ else contextlib.nullcontext():
        return served(environ, start_response)

threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()  # with who started it
server = make_server("127.0.0.1", 0, careless, threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


@dataclass(frozen=True)
class S3Server:
    """A server that is running, and may be reached with `CREDENTIALS`."""

    process: subprocess.Popen[str]
    port: int

    def bucket(self, name: str) -> str:
        """Make a bucket. Return its URL, without options."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{name}", method="PUT")
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200
        return f"s3://{name}"

    @property
    def options(self) -> str:
        """What follows the URL of a folder in a bucket."""
        return f"?endpoint_override=http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


def start_s3() -> S3Server:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE],
        env={**os.environ, **CREDENTIALS},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return S3Server(process, int(process.stdout.readline()))
