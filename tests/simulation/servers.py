"""Simulated servers, and the transport that reaches them."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from hashlib import sha256
from typing import Final

import httpx

from federation.activitypub.signatures import SignatureKind
from federation.protocol.activities import ActivityMethod
from federation.protocol.errors import EnvelopeError
from federation.protocol.keys import EncryptionKeyPair, OwnKeys, SigningKeyPair
from federation.protocol.possession import DECRYPT_FAILED
from federation.protocol.relaying import RELAY_PATH
from tests.misbehaving import Canned, Received
from tests.peer import DISCOVER_PATH, Arrived, json_answer
from tests.plain_wire import PLAIN_PATH
from tests.relaying_peer import Relaying
from tests.simulation.inboxes import NOT_VERIFIED, Inboxes, name_of
from tests.simulation.own_actor import OWN_HOST, OwnActor, actor_document
from tests.simulation.plan import (
    FORBIDS_ONE,
    GONE,
    REFUSES_ONE,
    Phase,
    PlannedServer,
    Trouble,
)
from tests.simulation.records import Request
from workers.clock import Clock

PAGE: Final = b"<!DOCTYPE html><html><head><title>Back soon</title></head><body>We will be right back.</body></html>"
HTML: Final = {"Content-Type": "text/html"}
NETWORK_SECONDS: Final = 0.01
_ACTIVITY_JSON: Final = {"Content-Type": "application/activity+json"}

_PAGES: Final = {
    Trouble.BAD_GATEWAY: 502,
    Trouble.MAINTENANCE: 503,
    Trouble.MISSING: 404,
    Trouble.PARKED: 200,
    Trouble.FAILS: 500,
    Trouble.GONE: GONE,
}

_ON_POSTS: Final = {
    Trouble.HANGS_ON_POSTS: Trouble.HANGS,
    Trouble.RESETS_ON_POSTS: Trouble.RESETS,
    Trouble.BREAKS_US: Trouble.BREAKS_US,
}
"""What is wrong with deliveries alone, and how it looks."""


class Poisoned(Exception):
    """The delivery that was about to arrive crashes its sender."""


class Disliked(Exception):
    """The server answers this delivery with a page; the argument is its status."""


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

    def __init__(
        self,
        planned: PlannedServer,
        poison: set[str],
        now: Callable[[], float],
        shown: Callable[[], datetime],
    ) -> None:
        super().__init__(server_keys(planned.number))
        self.planned = planned
        self.inboxes = None if planned.receiver is None else Inboxes(server_url(planned.number), planned.receiver)
        self.dislikes: dict[str, int] = {}
        self.last_requests: set[int] = set()
        """After so many requests whoever sent them is gone."""
        self.first_applied: dict[str, float] = {}
        self.arrivals: list[Arrival] = []
        self.follows: list[Told] = []
        self._poison = poison
        self._now = now
        self._shown = shown
        self._phases = list(planned.phases)
        self._requests = 0
        self._lost = 0
        self._met = 0

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

    def is_last(self) -> bool:
        """Whether who sends this request does nothing after it."""
        self._met += 1
        return self._met in self.last_requests

    def counts_as_lost(self) -> bool:
        """Whether this request, whose answer gets lost, is one of those that had their effect: each third."""
        self._lost += 1
        return self._lost % 3 == 1

    def respond(self, request: Received) -> Canned:
        """What it answers when it is well."""
        if request.path == DISCOVER_PATH:
            return self.discover(request)
        return self.proxy(request) if request.path == RELAY_PATH else self.answer(request)

    def take_plain(self, request: Received) -> Canned:
        """What it answers to a delivery of the other wire."""
        activity_id = json.loads(request.body)["id"]
        self._meet(activity_id)
        self._apply(activity_id)
        return Canned(status=200)

    def take_activity(self, inboxes: Inboxes, request: Received) -> Canned:
        """What it answers to an activity: it refuses what is not signed as it likes before it reads any."""
        refusal = inboxes.refusal(request, self._shown())
        if refusal is not None:
            return refusal
        activity_id = name_of(request.body)
        self._meet(activity_id)
        is_known = activity_id in self.first_applied
        self._apply(activity_id)
        return inboxes.answer(is_known=is_known)

    def _meet(self, activity_id: str) -> None:
        if activity_id in self._poison:
            raise Poisoned(activity_id)
        if activity_id in self.dislikes:
            raise Disliked(self.dislikes[activity_id])

    def _apply(self, activity_id: str) -> None:
        self.first_applied.setdefault(activity_id, self._now())
        self.arrivals.append(Arrival(activity_id, self._now(), answered=True))

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
            canned = self._taken(request)
        except EnvelopeError:  # sealed to keys that it showed while it had others
            return json_answer({"error": "", "code": DECRYPT_FAILED}, 400)
        except Disliked as page:
            if page.args[0] in (REFUSES_ONE, FORBIDS_ONE):
                return json_answer({"error": "", "code": "NOT_WANTED"}, page.args[0])
            return Canned(status=page.args[0], headers=HTML, body=PAGE)
        for arrived in self.arrived[before:]:
            if arrived.method is not ActivityMethod.FEDERATE_POST:
                self.follows.append(Told(arrived.method, arrived.activity_id, self._now()))
                continue
            self._apply(arrived.activity_id)
        return canned

    def _taken(self, request: Received) -> Canned:
        if self.inboxes is not None:
            return self.take_activity(self.inboxes, request)
        return self.take_plain(request) if request.path == PLAIN_PATH else super().answer(request)

    def _read(self, request: Received) -> Arrived | None:
        arrived = super()._read(request)
        if arrived is not None:
            self._meet(arrived.activity_id)
        return arrived


class SimulatedTransport(httpx.AsyncBaseTransport):
    """Requests of one process, noted in `requests`; `crash` is called when one of them is its last."""

    def __init__(
        self,
        servers: dict[str, SimulatedServer],
        requests: list[Request],
        own_actor: OwnActor,
        *,
        crash: Callable[[str], None],
        process: int,
        clock: Clock,
    ) -> None:
        self._servers = servers
        self._requests = requests
        self._own_actor = own_actor
        self._crash = crash
        self._process = process
        self._clock = clock

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.host == OWN_HOST:
            return await self._show_ourselves()
        server = self._servers[request.url.host]
        now = asyncio.get_running_loop().time
        noted = Request(
            at=now(), told_at=self._clock.now(), process=self._process, server=server.url,
            path=request.url.path, job=_job(), signature=_signature(server, request),
        )  # fmt: skip
        self._requests.append(noted)
        response = await self._request(server, request)
        noted.answered_at, noted.status = now(), response.status_code
        noted.rest = response.headers.get("Retry-After")
        return response

    async def _show_ourselves(self) -> httpx.Response:
        """What a process of ours sees of our actor, by our public name."""
        self._own_actor.looks.append((self._process, asyncio.get_running_loop().time()))
        await asyncio.sleep(NETWORK_SECONDS)
        if self._own_actor.is_hidden():
            return _response(Canned(status=502, headers=HTML, body=PAGE))
        return _response(Canned(headers=_ACTIVITY_JSON, body=actor_document()))

    async def _request(self, server: SimulatedServer, request: httpx.Request) -> httpx.Response:
        phase = server.phase()
        trouble = _trouble(phase, request)
        if trouble in (Trouble.CENSORED, Trouble.NAMELESS):
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        await asyncio.sleep(NETWORK_SECONDS)
        if trouble is Trouble.REFUSES:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        if server.is_last():
            self._crash(f"{server.url} was asked")
            await asyncio.Event().wait()
        if trouble is Trouble.BREAKS_US:
            raise RuntimeError("a simulated fault of ours")
        if trouble is Trouble.HANGS:
            await asyncio.Event().wait()
        received = _received(request)
        try:
            await asyncio.sleep(phase.value if phase and trouble is Trouble.SLOW else server.latency())
            return _response(self._answer(server, phase, trouble, received))
        except asyncio.CancelledError:
            if trouble is Trouble.SLOW and server.counts_as_lost():  # it goes on with what nobody waits for any more
                self._lose(server, received)
            raise
        except Poisoned as poison:
            self._crash(str(poison))
            await asyncio.Event().wait()
            raise

    def _answer(
        self, server: SimulatedServer, phase: Phase | None, trouble: Trouble | None, request: Received
    ) -> Canned:
        if phase is None or trouble is None or trouble is Trouble.SLOW:
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
        if trouble in (Trouble.REFUSES_US, Trouble.LACKS_OUR_KEY):
            return NOT_VERIFIED
        return Canned(status=_PAGES[trouble], headers=HTML, body=PAGE)

    def _lose(self, server: SimulatedServer, request: Received) -> None:
        """The server does what it is asked, also what it passes on, and nobody learns of it."""
        before = {each: len(each.arrivals) for each in self._servers.values()}
        server.respond(request)
        for each, known in before.items():
            each.arrivals[known:] = [replace(arrival, answered=False) for arrival in each.arrivals[known:]]


def _trouble(phase: Phase | None, request: httpx.Request) -> Trouble | None:
    """What is wrong with this request; some troubles are those of deliveries alone."""
    if phase is None:
        return None
    return (
        None
        if phase.trouble in _ON_POSTS and request.url.path == DISCOVER_PATH
        else _ON_POSTS.get(phase.trouble, phase.trouble)
    )


def _job() -> str | None:
    """The job in whose attempt this runs: a worker names an attempt's task after it."""
    task = asyncio.current_task()
    name = "" if task is None else task.get_name()
    return name.removeprefix("attempt-") if name.startswith("attempt-delivery-") else None


def _signature(server: SimulatedServer, request: httpx.Request) -> SignatureKind | None:
    """How an activity is signed."""
    if server.inboxes is None:
        return None
    return SignatureKind.RFC9421 if "Signature-Input" in request.headers else SignatureKind.CAVAGE


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
