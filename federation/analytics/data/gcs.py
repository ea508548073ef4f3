"""What pyarrow cannot ask of Google's storage: to write an object only if there is none of that name.

The parameter is `ifGenerationMatch=0`. Google's library finds the credentials that pyarrow finds, too.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from federation.analytics.errors import StoreUnusable

if TYPE_CHECKING:
    from requests import Response, Session

    from federation.analytics.data.store_urls import StoreUrl

_ENDPOINT: Final = "https://storage.googleapis.com"
_SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_write"
_CONNECT_SECONDS: Final = 3
_READ_SECONDS: Final = 30
_ATTEMPTS: Final = 4
_PAUSE_SECONDS: Final = 0.2
"""After the first attempt, and twice as long after each other one."""
_TAKEN: Final = 412
_PASSING: Final = (408, 429, 500, 502, 503, 504)
"""What is worth another attempt."""


class GcsPuts:
    """Writes objects below `url`, each of them whole."""

    def __init__(self, url: StoreUrl) -> None:
        self._url = url
        self._session = _session(url)
        bucket, _, self._folder = url.folder.partition("/")
        self._address = f"{url.endpoint or _ENDPOINT}/upload/storage/v1/b/{quote(bucket, safe='')}/o"

    def put(self, name: str, data: bytes, *, over: bool = False) -> bool:
        """Write the object. Return False if there is one of that name, unless it is to be written `over`.

        If an answer was lost and the request sent again, that one may be ours.

        Raises:
            StoreUnusable: it is not known whether it was written.
        """
        from google.auth.exceptions import GoogleAuthError
        from requests import RequestException

        problem, condition = "", {} if over else {"ifGenerationMatch": "0"}
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1))
            try:
                answer = self._post(f"{self._folder}/{name}".lstrip("/"), data, condition)
            except (RequestException, GoogleAuthError) as error:
                problem = " ".join(str(error).split())
                continue
            if answer.ok:
                return True
            if answer.status_code == _TAKEN:
                return False
            problem = f"it answered {answer.status_code} {answer.reason}"
            if answer.status_code not in _PASSING:
                break
        raise StoreUnusable(f"{self._url} cannot be written to: {problem}")

    def _post(self, key: str, data: bytes, condition: dict[str, str]) -> Response:
        boundary = uuid.uuid4().hex
        described = json.dumps({"name": key, "contentType": "application/octet-stream"}).encode()
        parts = (b"application/json", described), (b"application/octet-stream", data)
        body = b"".join(
            b"--%b\r\nContent-Type: %b\r\n\r\n%b\r\n" % (boundary.encode(), kind, part) for kind, part in parts
        )
        return self._session.post(
            self._address,
            params={"uploadType": "multipart", **condition},
            data=b"%b--%b--\r\n" % (body, boundary.encode()),
            headers={"Content-Type": f"multipart/related; boundary={boundary}"},
            timeout=(_CONNECT_SECONDS, _READ_SECONDS),
        )


def _session(url: StoreUrl) -> Session:
    """Return who asks: with credentials, but where everybody could read them."""
    try:
        import google.auth
        import requests
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import AuthorizedSession
    except ImportError:
        raise StoreUnusable(f"{url} needs the extra `gcs` (google-auth), which commits what was written") from None
    if url.is_plain:
        return requests.Session()
    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    except GoogleAuthError as error:
        raise StoreUnusable(f"{url} cannot be used: {' '.join(str(error).split())}") from None
    return AuthorizedSession(credentials)  # type: ignore[no-untyped-call] # it is not typed
