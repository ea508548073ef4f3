"""Whatever is sent, by an address or by a form, is answered in words, and is no fault of the dashboard."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

import pytest

from db import ActionSource
from federation.dashboard.node_site import NodeSite
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from tests.federation.dashboard.conftest import MakeNodeSite
from tests.federation.dashboard.node_data import PEER, actions, know
from tests.workers.dashboard.browsing import Person
from tests.workers.dashboard.calling import OPERATOR, WITH_TOKENS, Program
from workers.dashboard.access import Access
from workers.dashboard.feed import TROUBLE

HOSTILE: Final[Mapping[str, str]] = {
    "nothing": "",
    "NUL": "a\x00b",
    "NUL, carried": "a%00b",
    "half a pair": "a\ud800b",
    "bidi": "\u202egnp.exe",
    "lines": "a\r\nb",
    "no address": "https://[",
    "much": "x" * 20_000,
    "great": "9" * 30,
    "negative": "-1",
    "other digits": "\u0663",
    "the last moment": "9999-12-31T23:59:59-14:00 x",
    "the first moment": "0001-01-01T00:00:00+14:00 x",
    "quotes": "'\";--\\",
}
ALSO_ASKED: Final = ("NUL, carried", "bidi", "much", "no address")
PAGES: Final[Mapping[str, Sequence[str]]] = {
    "/": ("over",),
    "/servers": ("sort", "down", "link", "advice", "after", "url"),
    "/server": ("url",),
    "/deliveries": ("server", "state", "code", "older", "after"),
    "/delivery": ("id",),
    "/activity": ("id", "after"),
    "/received": ("state", "after"),
    "/bulk": ("id",),
    "/live-attempts": ("server", "outcome", "code"),
    "/queues": (),
    "/queue": ("name", "state", "after"),
    "/job": ("queue", "id", "carried"),
    "/tasks": (),
    "/recurring": (),
    "/workers": (),
    "/scheduler": (),
    "/blacklist": ("after", "row", "check", "block"),
    "/blacklist/plan": ("key",),
    "/actions": ("after",),
    "/analytics": (),
}
"""What each page is asked for."""
BESIDE: Final[Mapping[str, Mapping[str, str]]] = {
    "/queue": {"name": "federation-tasks"},
    "/job": {"queue": "federation-tasks", "id": "none"},
    "/blacklist": {"after": "x"},
}
"""Without which the rest does not matter."""
QUEUE: Final = {"queue": "federation-tasks"}
ACTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "/server": {"url": PEER, "action": "probe"},
    "/deliveries/act": {"action": "drop", "id": "none", "server": "", "state": "", "code": "", "older": "", "all": ""},
    "/delivery/payload": {"id": "none"},
    "/received/retry": {"number": "7"},
    "/bulk/cancel": {"id": "7"},
    "/queue/pause": QUEUE,
    "/queue/resume": QUEUE,
    "/jobs": {**QUEUE, "id": "none", "action": "retry", "state": "failed", "back": "/job?", "all": ""},
    "/recurring": {**QUEUE, "name": "none", "action": "pause"},
    "/scheduler/run": {"name": "none"},
    "/blacklist/add": {"rule": "no rule", "reason": "spam", "lasts": ""},
    "/blacklist/remove": {"rule": "*.none.example"},
    "/blacklist/import": {"key": "none", "skip_bad": ""},
}
"""The fields of each form."""
VALID: Final = {**QUEUE, "name": "none", "url": PEER, "id": "none", "state": "failed", "rule": "x", "reason": "spam"}
"""What a call needs."""
TOPICS: Final = {
    "overview": "name",
    "attempts": "server",
    "queues": "name",
    "workers": "name",
    "queue": "name",
    "bulk": "id",
}
"""What each topic of open pages is asked for."""


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.full), "postgres"])
async def node(
    request: pytest.FixtureRequest, make_settings: MakeSettings, make_node_site: MakeNodeSite
) -> AsyncIterator[tuple[Federation, NodeSite]]:
    """A node on each database, and a dashboard on which everybody may act; PostgreSQL refuses more."""
    places = {} if request.param == "sqlite" else {"database_url": request.getfixturevalue("migrated_postgres_url")}
    federation = Federation(make_settings(**places, federation_activitypub="1"))
    await know(federation, PEER)
    site = make_node_site(federation, Access(accounts=WITH_TOKENS), shows_texts=True)
    yield federation, site
    await site.close()
    await federation.close()


async def operator(site: NodeSite) -> Person:
    person = Person(site.site.app)
    await person.logs_in("robot", OPERATOR)
    return person


async def test_every_page_answers(node: tuple[Federation, NodeSite]) -> None:
    """With what was asked for, or why not; each of its parameters in turn."""
    _, site = node
    assert set(PAGES) == {path for part in site._parts() for path in part.pages}
    person = await operator(site)
    for path, names in PAGES.items():
        for name in names:
            for kind, value in HOSTILE.items():
                asked = {**BESIDE.get(path, {}), name: value}
                answer = await person.client.get(f"{path}?{urlencode(asked, errors='surrogatepass')}")
                assert answer.status_code < 500, (path, name, kind, answer.text)


async def test_every_form_is_answered(node: tuple[Federation, NodeSite]) -> None:
    """As confirmed, and some as asked; each of its fields in turn."""
    federation, site = node
    assert set(ACTIONS) == {path for part in site._parts() for path in part.actions}
    person = await operator(site)
    token = await person.token("/queue?name=federation-tasks")
    kind_of_form = {"content-type": "application/x-www-form-urlencoded"}
    for path, valid in ACTIONS.items():
        for name in valid:
            for kind, value in HOSTILE.items():
                for confirmed in ("yes", "") if kind in ALSO_ASKED else ("yes",):
                    fields = {"form_token": token, "confirmed": confirmed, **valid, name: value}
                    body = urlencode(fields, errors="surrogatepass")
                    answer = await person.client.post(path, content=body, headers=kind_of_form)
                    assert answer.status_code < 500, (path, name, kind, answer.text)
    assert {each[:2] for each in await actions(federation)} <= {("robot", ActionSource.DASHBOARD)}


@pytest.mark.full
async def test_every_call_is_answered(node: tuple[Federation, NodeSite]) -> None:
    """To programs, too; each of its fields in turn, the others as they should be."""
    _, site = node
    program = Program(site.site.app)
    document = await program.document()
    described = [(path, *each) for path, methods in document["paths"].items() for each in methods.items()]
    assert len(described) > 25
    for path, method, operation in described:
        fields, needed = asked_by(operation, document)
        valid = {name: fields[name]["enum"][0] if name == "action" else VALID[name] for name in needed}
        for name in fields:
            for kind, value in HOSTILE.items():
                if method == "get":
                    asked = urlencode({**valid, name: value}, errors="surrogatepass")
                    answer = await program.client.get(f"{path}?{asked}")
                else:
                    body = json.dumps({**valid, name: value})
                    kind_of_body = {"content-type": "application/json"}
                    answer = await program.client.post(path, content=body, headers=kind_of_body)
                assert answer.status_code < 500, (path, name, kind, answer.text)


def asked_by(operation: dict[str, Any], document: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The schemas of what a call takes, by name, and what it needs; nothing of one that takes a file."""
    if "requestBody" not in operation:
        parameters = operation.get("parameters", [])
        needed = [each["name"] for each in parameters if each["required"]]
        return {each["name"]: each["schema"] for each in parameters}, needed
    [(kind, body)] = operation["requestBody"]["content"].items()
    if kind != "application/json":
        return {}, []
    schema = document["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]
    return schema["properties"], schema["required"]


async def test_a_form_of_a_megabyte_is_not_read(node: tuple[Federation, NodeSite]) -> None:
    """Whatever field has it."""
    _, site = node
    person = await operator(site)
    for path in ACTIONS:
        assert (await person.posts(path, ("form_token", "x" * 1_000_000))).status_code == 413


async def test_every_topic_answers(node: tuple[Federation, NodeSite]) -> None:
    """What an open page listens to, too; what no database stores is refused before."""
    _, site = node
    assert set(TOPICS) == {name for part in site._parts() for name in part.live}
    person = await operator(site)
    for topic, name in TOPICS.items():
        refused = await person.client.get(f"/live?topic={topic}&{name}=%00")
        assert refused.status_code == 400
        for kind in ("nothing", "bidi", "much", "great", "other digits"):
            async with site.site.feed.listen(topic, ((name, HOSTILE[kind][:300]),)) as listener:
                told = await listener.take()
                assert told is not None
                assert "see the log" not in told[TROUBLE], (topic, kind)
