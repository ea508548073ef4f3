"""A small server of the fediverse, of our own: `python inbox.py PORT`.

Its shared inbox takes notes that their authors signed, each once, and prints a line for each. What it took before it
was stopped it knows from a file beside its log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from datetime import UTC, datetime, timedelta
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from federation.activitypub.signatures import BadSignature, claims_in, verify

TAKEN = Path("taken.txt")
WINDOW = timedelta(hours=1)


@cache
def key_of(key_id: str) -> rsa.RSAPublicKey:
    """Fetch the key of whoever signed."""
    answer = httpx.get(key_id, headers={"Accept": "application/activity+json"}, timeout=5, trust_env=False)
    key = load_pem_public_key(answer.raise_for_status().json()["publicKey"]["publicKeyPem"].encode())
    assert isinstance(key, rsa.RSAPublicKey)
    return key


class Inbox(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    lock = threading.Lock()
    taken: ClassVar = set(TAKEN.read_text().splitlines() if TAKEN.exists() else ())

    def do_GET(self) -> None:
        """Answer that it is there."""
        self._answer(200)

    def do_POST(self) -> None:
        """Take an activity."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        url, headers = f"http://127.0.0.1:{sys.argv[1]}{self.path}", dict(self.headers)
        try:
            public = key_of(claims_in(headers)[0].key_id)
            verify(
                method="POST", url=url, headers=headers, body=body, public=public, now=datetime.now(UTC), window=WINDOW
            )
        except (BadSignature, httpx.HTTPError) as error:
            print(json.dumps({"event": "refused", "problem": str(error)}), flush=True)
            self._answer(401)
            return
        with self.lock:
            self._take(json.loads(body))
        self._answer(202)

    def _take(self, activity: dict[str, object]) -> None:
        name, note = str(activity["id"]), activity["object"]
        if name in self.taken:
            print(json.dumps({"event": "activity_replayed", "id": name}), flush=True)
            return
        assert isinstance(note, dict)
        self.taken.add(name)
        with TAKEN.open("a") as file:
            file.write(f"{name}\n")
        print(f"{activity['actor']} says: {note['content']}", flush=True)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_request(self, *_: object) -> None:
        """Print nothing."""


def stop(*_: object) -> None:
    """End between two notes."""
    with Inbox.lock:
        os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Inbox).serve_forever()
