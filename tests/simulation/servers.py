"""Simulated servers, and the transport that reaches them."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from typing import Final

import httpx

from federation.protocol.activities import ActivityMethod
from federation.protocol.errors import EnvelopeError
from federation.protocol.keys import EncryptionKeyPair, OwnKeys, SigningKeyPair
from federation.protocol.possession import DECRYPT_FAILED
from federation.protocol.relaying import RELAY_PATH
from tests.misbehaving import Canned, Received
from tests.peer import DISCOVER_PATH, Arrived, json_answer
from tests.relaying_peer import Relaying
from tests.simulation.plan import Phase, PlannedServer, Trouble

PAGE: Final = b"<!DOCTYPE html><html><head><title>Back soon</title></head><body>We will be right back.</body></html>"
HTML: Final = {"Content-Type": "text/html"}
NETWORK_SECONDS: Final = 0.01

_PAGES: Final = {
    Trouble.BAD_GATEWAY: 502,
    Trouble.MAINTENANCE: 503,
    Trouble.MISSING: 404,
    Trouble.PARKED: 200,
    Trouble.FAILS: 500,
}


class Poisoned(Exception):
    """The delivery that was about to arrive crashes its sender."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request with an activity that was opened and verified; `answered`: and the answer got through."""

    activity_id: str
    at: float
    answered: bool


@dataclass(frozen=True, slots=True)
class Told:
    """A follow that was applied, or its end; both have the follow's id."""

    method: ActivityMethod
    follow_id: str
    at: float


class SimulatedServer(Relaying):
    """A server of the plan: what it applies it applies once, whatever goes wrong with its answers."""

    def __init__(self, planned: PlannedServer, poison: set[str], now: Callable[[], float]) -> None:
        super().__init__(server_keys(planned.number))
        self.planned = planned
        self.first_applied: dict[str, float] = {}
        self.arrivals: list[Arrival] = []
        self.follows: list[Told] = []
        self._poison = poison
        self._now = now
        self._phases = list(planned.phases)
        self._requests = 0
        self._lost = 0

    @property
    def url(self) -> str:
        return server_url(self.planned.number)

    def phase(self) -> Phase | None:
        """What is wrong with it now."""
        now = self._now()
        while self._phases and self._phases[0].end <= now:
            del self._phases[0]
        return self._phases[0] if self._phases and self._phases[0].start <= now else None

    def latency(self) -> float:
        """How long it takes over this request: 20 % more or less than usual, by its number alone."""
        self._requests += 1
        spread = sha256(f"{self.planned.number} {self._requests}".encode()).digest()[0] / 255
        return self.planned.latency * (0.8 + 0.4 * spread)

    def counts_as_lost(self) -> bool:
        """Whether this request, whose answer gets lost, is one of those that had their effect: each third."""
        self._lost += 1
        return self._lost % 3 == 1

    def respond(self, request: Received) -> Canned:
        """What it answers when it is well."""
        if request.path == DISCOVER_PATH:
            return self.discover(request)
        return self.proxy(request) if request.path == RELAY_PATH else self.answer(request)

    def with_other_keys(self, request: Received) -> Canned:
        """What answers in its place: it cannot read what is sealed to the server."""
        if request.path == DISCOVER_PATH and request.method == "GET":
            keys = server_keys(10_000 + self.planned.number)
            shown = {"publicKey": keys.signing.public_text, "encryptionPublicKey": keys.encryption.public_text}
            return json_answer({**self.document(), **shown})
        return json_answer({"error": "", "code": DECRYPT_FAILED}, 400)

    def answer(self, request: Received) -> Canned:
        before = len(self.arrived)
        try:
            canned = super().answer(request)
        except EnvelopeError:  # sealed to keys that it showed while it had others
            return json_answer({"error": "", "code": DECRYPT_FAILED}, 400)
        for arrived in self.arrived[before:]:
            if arrived.method is not ActivityMethod.FEDERATE_POST:
                self.follows.append(Told(arrived.method, arrived.activity_id, self._now()))
                continue
            self.first_applied.setdefault(arrived.activity_id, self._now())
            self.arrivals.append(Arrival(arrived.activity_id, self._now(), answered=True))
        return canned

    def _read(self, request: Received) -> Arrived | None:
        arrived = super()._read(request)
        if arrived is not None and arrived.activity_id in self._poison:
            raise Poisoned(arrived.activity_id)
        return arrived


class SimulatedTransport(httpx.AsyncBaseTransport):
    """Requests of one process; `crash` is called when one of them is its last."""

    def __init__(self, servers: dict[str, SimulatedServer], crash: Callable[[str], None]) -> None:
        self._servers = servers
        self._crash = crash

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        server = self._servers[request.url.host]
        phase = server.phase()
        trouble = None if phase is None else phase.trouble
        if trouble is Trouble.CENSORED:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        await asyncio.sleep(NETWORK_SECONDS)
        if trouble is Trouble.REFUSES:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        if trouble is Trouble.HANGS:
            await asyncio.Event().wait()
        assert phase is None or trouble is not None
        received = _received(request)
        try:
            await asyncio.sleep(phase.value if phase and trouble is Trouble.SLOW else server.latency())
            return _response(self._answer(server, phase, received))
        except asyncio.CancelledError:
            if trouble is Trouble.SLOW and server.counts_as_lost():  # it goes on with what nobody waits for any more
                self._lose(server, received)
            raise
        except Poisoned as poison:
            self._crash(str(poison))
            await asyncio.Event().wait()
            raise

    def _answer(self, server: SimulatedServer, phase: Phase | None, request: Received) -> Canned:
        trouble = None if phase is None else phase.trouble
        if phase is None or trouble is Trouble.SLOW:
            return server.respond(request)
        if trouble is Trouble.RESETS:
            if server.counts_as_lost():
                self._lose(server, request)
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        if trouble is Trouble.OTHER_KEYS:
            return server.with_other_keys(request)
        if trouble in (Trouble.LIMITS, Trouble.ASKS_TO_WAIT):
            status = 429 if trouble is Trouble.LIMITS else 503
            return Canned(status=status, headers={"Retry-After": f"{phase.value:.0f}"} if phase.value else {})
        return Canned(status=_PAGES[phase.trouble], headers=HTML, body=PAGE)

    def _lose(self, server: SimulatedServer, request: Received) -> None:
        """The server does what it is asked, also what it passes on, and nobody learns of it."""
        before = {each: len(each.arrivals) for each in self._servers.values()}
        server.respond(request)
        for each, known in before.items():
            each.arrivals[known:] = [replace(arrival, answered=False) for arrival in each.arrivals[known:]]


def server_url(number: int) -> str:
    return f"https://s{number:04}.example"


@cache
def server_keys(number: int) -> OwnKeys:
    """The keys of a server, the same in every world."""
    seed = sha256(f"server {number}".encode()).digest()
    secret = sha256(f"encryption {number}".encode()).digest()
    return OwnKeys(signing=SigningKeyPair.from_seed(seed), encryption=EncryptionKeyPair.from_secret(secret))


def _received(request: httpx.Request) -> Received:
    stream = request.stream
    assert isinstance(stream, httpx.ByteStream)
    return Received(
        method=request.method,
        path=request.url.path,
        headers=dict(request.headers),
        body=b"".join(stream),
    )


def _response(canned: Canned) -> httpx.Response:
    return httpx.Response(canned.status, headers=dict(canned.headers), stream=httpx.ByteStream(canned.body))
