"""A relay in front of a server, as a balancer is: it may lose connections in silence, and be slow."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from sqlalchemy import make_url

from tests.patience import PATIENCE_SECONDS

CHUNK: Final = 65_536


class Line:
    """One client's connection through a relay."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.lost = False
        self._said = 0  # bytes of the last answer

    async def run(self, client: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        """Pass on what both say until one of them ends; nothing, once it is lost, until the client ends."""
        writers, directions = [client[1]], []
        try:
            with suppress(OSError):
                reader, writer = await self._relay.connect()
                writers.append(writer)
                directions.append(asyncio.create_task(self._ask(client[0], writer)))
                directions.append(asyncio.create_task(self._answer(reader, client[1])))
                await next(asyncio.as_completed(directions))
                if self.lost:
                    await directions[0]
        finally:
            for each in writers:
                each.transport.abort()
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            self._said = 0
            if not self.lost:
                writer.write(data)
                await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(self._relay.at_once):
            if self.lost:
                continue
            writer.write(data[: self._relay.stops_at - self._said] if self._relay.stops_at is not None else data)
            await writer.drain()
            self._said += len(data)
            self.lost = self.lost or (self._relay.stops_at is not None and self._said > self._relay.stops_at)
            if self._relay.pace is not None:
                await asyncio.sleep(len(data) / self._relay.pace)  # is how slow it is


class Relay:
    """Passes on what clients and the server at `url` say to each other; clients connect to the relay's own `url`.

    `pace` is how many bytes of answers a connection carries in a second. An answer that has more than `stops_at` bytes
    ends there, in silence, and so does its connection.
    """

    def __init__(self, url: str, *, pace: float | None = None, stops_at: int | None = None) -> None:
        self._server = make_url(url)
        self._lines: dict[asyncio.Task[None], Line] = {}
        self.pace = pace
        self.stops_at = stops_at
        self.connections = 0

    @property
    def url(self) -> str:
        query = {name: value for name, value in self._server.query.items() if name != "host"}
        return self._server.set(host="127.0.0.1", port=self._port, query=query).render_as_string(hide_password=False)

    @property
    def at_once(self) -> int:
        """How many bytes are passed on together."""
        return CHUNK if self.pace is None else max(int(self.pace / 50), 1)

    def swallow(self) -> None:
        """Lose the connections that there are: all stay open, and what is said on them goes nowhere."""
        for line in self._lines.values():
            line.lost = True

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the server itself."""
        folder = self._server.query.get("host")
        if isinstance(folder, str) and folder.startswith("/"):
            return await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.{self._server.port or 5432}")
        assert self._server.host is not None
        return await asyncio.open_connection(self._server.host, self._server.port)

    async def __aenter__(self) -> Self:
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = self._listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.close()
        await asyncio.sleep(0)  # whoever has connected is served
        tasks = list(self._lines)
        await asyncio.sleep(0)  # and has begun, so that its end closes what it has
        for task in tasks:
            task.cancel()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*tasks, return_exceptions=True)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        line = Line(self)
        task = asyncio.create_task(line.run((reader, writer)))
        self._lines[task] = line
        task.add_done_callback(lambda done: self._lines.pop(done, None))
