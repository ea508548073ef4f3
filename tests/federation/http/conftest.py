"""A client that may reach loopback, a server to disappoint it, and a resolver that says what a test wants."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Final

import pytest

from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from tests.misbehaving import MisbehavingServer

SHORT: Final = timedelta(seconds=0.3)
"""For an exchange that would never end by itself."""
LOOPBACK = AddressGuard(frozenset({"127.0.0.1"}))


class ScriptedResolver:
    """Answers a name with the next of its scripted answers, the last one for ever; without one, NXDOMAIN."""

    def __init__(self, **answers: Sequence[Sequence[str]]) -> None:
        self._answers = {name.replace("_", "."): deque(sequence) for name, sequence in answers.items()}
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        answers = self._answers.get(host)
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return answers.popleft() if len(answers) > 1 else answers[0]


@pytest.fixture
async def server() -> AsyncIterator[MisbehavingServer]:
    async with MisbehavingServer() as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[FederationClient]:
    async with FederationClient(LOOPBACK) as open_client:
        yield open_client
