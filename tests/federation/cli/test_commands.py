"""What commands print, for people and for programs, and how they end; `why`, `deliveries`, `servers` lie beside."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from datetime import timedelta

import pytest
import redis
from sqlalchemy import text

from federation.runtime.composition import Federation
from tests.federation.cli.conftest import Command
from tests.federation.cli.elsewhere import on_the_node, owe
from tests.federation.protocol.vectors import A
from workers.storage.abilities import TakesLeave

LISTINGS = [
    ["servers", "list"],
    ["deliveries", "list"],
    ["deliveries", "stats"],
    ["blacklist", "list"],
    ["queues", "stats"],
    ["workers", "list"],
    ["scheduler", "list"],
    ["db", "check"],
    ["keys", "show"],
    ["upgrade"],
    ["db", "upgrade"],
    ["init"],
]


@pytest.mark.parametrize("arguments", LISTINGS, ids=" ".join)
def test_every_listing_prints_one_json_document(command: Command, arguments: list[str]) -> None:
    """Also when there is nothing to list; nothing else is on stdout."""
    done = command(*arguments, "--json")
    assert (done.status, done.stderr) == (0, "")
    assert isinstance(done.json, list | dict)


@pytest.mark.parametrize("arguments", LISTINGS, ids=" ".join)
def test_no_listing_shows_a_secret(command: Command, arguments: list[str]) -> None:
    """In neither form."""
    secrets = {value for name, value in A.env.items() if "PRIVATE" in name}
    for done in (command(*arguments), command(*arguments, "--json")):
        assert not any(secret in done.stdout + done.stderr for secret in secrets)


async def _claim(node: Federation, worker_id: str) -> None:
    """The worker was heard of now, and all others four minutes earlier than before."""
    await node.delivery_queue.start()
    async with node.database.transaction() as session:
        await session.execute(text("UPDATE workers_seen SET seen_at = seen_at - 240000"))
    await node.delivery_queue.storage.claim(worker_id, leases={"*": timedelta(minutes=1)}, limit=1)


def test_workers_that_are_not_heard_of_do_not_count(command: Command) -> None:
    """They are told apart; if they are all, nobody works, and the status is 1."""
    on_the_node(lambda node: _claim(node, "died"))
    assert re.search(r"died +20\S+ \S+ +0", command("workers", "list").stdout)
    on_the_node(lambda node: _claim(node, "lives"))
    done = command("workers", "list")
    assert (done.status, "no worker runs" in done.stdout) == (0, False)
    assert re.search(r"died +not heard of for 4 min", done.stdout)
    listed = command("workers", "list", "--json").json
    assert isinstance(listed, list)
    assert {each["id"]: each["silent"] for each in listed} == {"died": True, "lives": False}
    on_the_node(lambda node: _farewell(node, "lives"))
    done = command("workers", "list")
    assert (done.status, "no worker runs" in done.stdout, "lives" in done.stdout) == (1, True, False)


async def _farewell(node: Federation, worker_id: str) -> None:
    await node.delivery_queue.start()
    assert isinstance(node.delivery_queue.storage, TakesLeave)
    await node.delivery_queue.storage.farewell(worker_id)


def test_private_keys_are_shown_on_request_alone(command: Command) -> None:
    assert command("keys", "show", "--private", "--json").json == A.env
    public = {name: value for name, value in A.env.items() if "PRIVATE" not in name}
    assert command("keys", "show", "--json").json == public


def test_the_blacklist_goes_out_and_comes_in(command: Command, node_environment: Mapping[str, str]) -> None:
    """A dry run changes nothing; a bad row stops it all, with its line, unless it may be skipped."""
    assert command("blacklist", "add", "evil.example", "--reason", "spam").status == 2
    assert command("blacklist", "add", "https://evil.example", "--reason", "spam", "--for", "soon").status == 2
    assert command("blacklist", "add", "https://evil.example", "--reason", "spam", "--for", "2d").status == 0
    assert command("blacklist", "check", "evil.example").status == 1
    assert command("blacklist", "export", "--output", "out.csv").status == 0
    with open("out.csv", "a", encoding="utf-8") as file:
        file.write("*.bad.example,spam,,\nnonsense,why,,\n")

    assert command("blacklist", "import", "out.csv", "--dry-run", "--skip-bad").status == 0
    refused = command("blacklist", "import", "out.csv")
    assert (refused.status, "wrong: line 4: " in refused.stdout) == (1, True)
    assert command("blacklist", "check", "x.bad.example").status == 0
    done = command("blacklist", "import", "out.csv", "--skip-bad")
    assert (done.status, "imported: 1 added, 0 changed, 1 as they were" in done.stdout) == (0, True)
    assert command("blacklist", "check", "x.bad.example").status == 1
    assert command("blacklist", "remove", "*.bad.example").status == 0
    assert command("blacklist", "remove", "*.bad.example").status == 1


def test_queues_are_paused_resumed_and_cleaned(command: Command) -> None:
    """By the short name or the whole one; an unknown one is told with those there are."""
    on_the_node(lambda node: owe(node, 1))
    assert command("queues", "pause", "delivery").status == 0
    assert on_the_node(claimed) == 0
    assert command("queues", "resume", "federation-delivery").status == 0
    assert on_the_node(claimed) == 1
    assert command("queues", "clean", "--yes", "--json").json == dict.fromkeys(
        ["federation-delivery", "federation-health-check", "federation-discovery", "federation-tasks"], 0
    )
    unknown = command("queues", "pause", "mail")
    assert (unknown.status, "federation-tasks" in unknown.stderr) == (2, True)


def test_queues_are_repaired(command: Command, monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    """A key in the way is set aside and told; what is no job stays until it is dropped, and doctor finds it."""
    prefix = f"cli-{uuid.uuid4().hex}"
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("FEDERATION_QUEUE_PREFIX", prefix)
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"{prefix}:federation-delivery:wait", "no queue's")
    reason = f"{prefix}:federation-delivery:wait is a string, not a list"
    moved = {"queue": "federation-delivery", "id": "wait", "reason": reason, "outcome": "moved"}
    assert command("queues", "repair", "delivery", "--json").json == [moved]
    assert "1 job set aside, as 'wait'" in " ".join(command("doctor").stdout.split())
    kept = command("queues", "repair")
    assert kept.status == 0
    assert "kept" in kept.stdout
    assert command("queues", "repair", "--drop", "--yes", "--json").json == [{**moved, "outcome": "dropped"}]
    assert command("queues", "repair").stdout == "nothing was set aside\n"


def test_jobs_in_no_line_are_repaired(command: Command, monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    """On Bull: doctor tells of them, and they are queued again."""
    prefix = f"cli-{uuid.uuid4().hex}"
    monkeypatch.setenv("QUEUE_URL", f"bull+{redis_url}")
    monkeypatch.setenv("FEDERATION_QUEUE_PREFIX", prefix)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.hset(f"{prefix}:federation-tasks:7", mapping={"data": "{}", "opts": "{}"})
        assert "1 job in no line, as '7'" in " ".join(command("doctor").stdout.split())
        [told] = command("queues", "repair", "tasks", "--json").json
        assert (told["id"], told["outcome"]) == ("7", "requeued")
        assert client.lrange(f"{prefix}:federation-tasks:wait", 0, -1) == ["7"]
    assert command("queues", "repair").stdout == "nothing was set aside\n"


def test_queues_that_set_nothing_aside_say_so(command: Command) -> None:
    """Those in the database, with status 1: there is nothing that could be repaired, whatever is wrong."""
    done = command("queues", "repair")
    assert (done.status, "set nothing aside" in done.stdout) == (1, True)
    assert command("queues", "repair", "--json").json == []


async def claimed(node: Federation) -> int:
    await node.delivery_queue.start()
    return len(await node.delivery_queue.storage.claim("w", leases={"*": timedelta(minutes=1)}, limit=10))


def test_recurring_work_runs_when_asked(command: Command) -> None:
    """And says how it went."""
    done = command("scheduler", "run", "purge", "--json")
    assert done.status == 0, done.stdout
    run = done.json
    assert isinstance(run, dict)
    assert (run["outcome"], run["detail"]["deliveries"]) == ("done", 0)
    assert " done " in command("scheduler", "list", "--wide").stdout
    unknown = command("scheduler", "run", "nothing")
    assert (unknown.status, "outbox-sweep" in unknown.stderr) == (2, True)
