"""A connection that speaks TLS, without asyncio's buffer of 256 KiB for each: a node keeps hundreds open."""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

from federation.http.connection import Connection
from federation.http.errors import MalformedResponse

_PIECE: Final = 16 * 1024
"""What a record holds at most; what is read or written at a time."""
_MAX_SILENT: Final = 256 * 1024
"""How much may arrive without a byte of a response in it: certificates, tickets, key updates."""


class TlsConnection(Connection):
    """Verifies *host* with *context* before anything is sent.

    A connection that ends without a farewell of TLS has ended all the same, as many servers say none.
    """

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        super().__init__()
        self._arrived = ssl.MemoryBIO()
        self._leaving = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_hostname=host)
        self._shaken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._silent = 0

    async def ready(self) -> None:
        """Wait until the server has proved who it is; close the connection if it does not, or if cancelled.

        Raises:
            ssl.SSLError: it does not, or speaks no TLS.
            OSError: the connection has ended.
            MalformedResponse: the handshake is too long.
        """
        try:
            await self._shaken
        except BaseException:
            self.abort()
            raise
        await super().ready()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._shake()

    def data_received(self, data: bytes) -> None:
        self._arrived.write(data)
        self._silent += len(data)
        if not self._shaken.done():
            self._shake()
        else:
            self._read()
        if self._silent > _MAX_SILENT:
            self._fail(MalformedResponse("the response does not begin: too much of TLS alone"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._refuse(exc or ConnectionResetError("the connection was closed in the handshake"))
        super().connection_lost(exc)

    def _certificate(self) -> bytes:
        return self._tls.getpeercert(binary_form=True) or b""

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._tls.write(left) :]
        self._flush()

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError as error:
            self._fail(error)
        else:
            self._silent = 0
            self._flush()
            self._shaken.set_result(None)
            self._read()

    def _read(self) -> None:
        try:
            while self.is_open:
                if not (piece := self._tls.read(_PIECE)):
                    self.abort()  # the server's farewell
                    return
                self._silent = 0
                super().data_received(piece)
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError as error:
            self._fail(error)

    def _flush(self) -> None:
        """Send what TLS has to say."""
        if self._leaving.pending and self.is_open:
            super()._write(self._leaving.read())

    def _fail(self, error: Exception) -> None:
        self._flush()  # the alert
        self._refuse(error)
        self._end(error)
        self.abort()

    def _refuse(self, error: Exception) -> None:
        if not self._shaken.done():
            self._shaken.set_exception(error)
            self._shaken.exception()  # nobody may wait any more, and that is no mistake
