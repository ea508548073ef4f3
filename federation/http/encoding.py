"""Bodies that a server or a CDN compressed, although it was asked not to.

Theory of operation. We ask for `identity`, so most answers never come here. What does come is inflated in memory, up to
the size that a body may have, and not a byte further: a megabyte may stand for gigabytes. A body that cannot be
inflated stays as it came, with the name of its encoding: some servers name one and do not use it. Streams in one row
and what follows a stream are not read, since readers disagree on what they mean.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import replace
from typing import Final

from federation.http.errors import BodyTooLarge
from federation.http.request import Request
from federation.http.response import Response

MAX_LAYERS: Final = 2
"""An application and the CDN before it may each compress once."""
_MAX_SHOWN: Final = 40
_UNSHOWABLE: Final = re.compile(r"[^!-~ ]")
_GZIP: Final = (16 + zlib.MAX_WBITS,)
_DEFLATE: Final = (zlib.MAX_WBITS, -zlib.MAX_WBITS)  # RFC 9110 means zlib's format, and some servers send it bare
_WINDOWS: Final = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _DEFLATE}


def inflated(response: Response, request: Request) -> Response:
    """Return the response with the body that was meant.

    If its encoding cannot be undone, the body stays, and the encoding is fit to be shown.

    Raises:
        BodyTooLarge: it inflates to more than `request.max_bytes`.
    """
    names = [name.strip().lower() for name in (response.encoding or "").split(",")]
    layers = [name for name in names if name not in ("", "identity")]
    if not response.body or not layers:
        return replace(response, encoding=None)
    if len(layers) > MAX_LAYERS or not _WINDOWS.keys() >= set(layers):
        return _left(response)
    body = response.body
    try:
        for name in reversed(layers):
            body = _inflated(body, _WINDOWS[name], request)
    except zlib.error:
        return _left(response)
    return replace(response, body=body, encoding=None)


def _left(response: Response) -> Response:
    return replace(response, encoding=_UNSHOWABLE.sub("?", (response.encoding or "")[:_MAX_SHOWN]))


def _inflated(body: bytes, windows: tuple[int, ...], request: Request) -> bytes:
    """Inflate *body*, which is a single whole stream in one of the formats.

    Raises:
        BodyTooLarge: see `inflated`.
        zlib.error: it is no such stream.
    """
    most = request.max_bytes
    for window in windows:
        inflater = zlib.decompressobj(window)
        try:
            found = inflater.decompress(body, most + 1)
        except zlib.error:
            continue
        if len(found) > most:
            raise BodyTooLarge(f"{request.target.origin} sends a body that inflates to more than {most} bytes")
        if inflater.eof and not inflater.unused_data:
            return found
    raise zlib.error("no single stream that is whole")
