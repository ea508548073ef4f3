"""`federation deliveries`: listed, counted, held and released, retried and dropped."""

from __future__ import annotations

import re

import pytest

from db import (
    AttemptNote,
    AttemptOutcome,
    DeliveryState,
    HoldReason,
)
from federation.runtime.composition import Federation
from tests.federation.cli.conftest import Command
from tests.federation.cli.elsewhere import (
    PEER,
    end_attempts,
    expire,
    fall,
    give_up,
    on_the_node,
    owe,
    put_on_hold,
    rows_of,
)


def test_deliveries_are_shown_counted_retried_and_dropped(command: Command) -> None:
    """What other servers wrote reaches no terminal as it is."""
    ids = on_the_node(lambda node: owe(node, 3))
    on_the_node(lambda node: give_up(node, ids[:2], "TIMEOUT"))
    shown = command("deliveries", "show", ids[0])
    assert ("failed" in shown.stdout, "it  [31mfailed" in shown.stdout, "FEDERATE" in shown.stdout) == (
        True,
        True,
        False,
    )
    stats = command("deliveries", "stats", "--json").json
    assert isinstance(stats, dict)
    assert (stats["open"], stats["ready"], stats["failed"], stats["codes"]) == (1, 1, 2, {"TIMEOUT": 2})
    page = command("deliveries", "list", "--code", "TIMEOUT", "--limit", "1", "--json").json
    assert isinstance(page, dict)
    assert [each["id"] for each in page["deliveries"]] == [min(ids[:2])] == [page["after"]]

    assert "1 delivery is owed again" in command("deliveries", "retry", ids[0]).stdout
    assert command("deliveries", "drop", "--code", "TIMEOUT", "--yes").stdout == "1 delivery is dropped\n"
    assert command("deliveries", "show", ids[1]).status == 1
    assert command("deliveries", "drop", "--state", "open", "--all", "--yes", "--json").json == {
        "dropped": 2,
        "busy": 0,
    }
    assert command("deliveries", "drop", "--all", "--yes").status == 1


def test_of_a_delivery_without_a_row_the_log_is_shown(command: Command) -> None:
    """It was delivered, or not; what has no attempt either is not known."""
    end_attempts("one")
    end_attempts(
        "other", outcome=AttemptOutcome.RETRYABLE, code="HTTP_410", said="GONE_HERE", note=AttemptNote.GIVEN_UP
    )

    shown = command("deliveries", "show", "one").stdout
    assert shown.startswith("one was delivered: ")
    assert re.search(r"delivered +201", re.sub(r"\s+-\s+", " ", shown))
    assert re.search(r"given up +HTTP_410", command("deliveries", "show", "other").stdout)
    told = command("deliveries", "show", "other", "--json").json
    assert isinstance(told, dict)
    assert (told["delivery"], told["state"]) == (None, "gone")
    said = [(each["code"], each["remote_code"], each["note"]) for each in told["attempts"]]
    assert said == [("HTTP_410", "GONE_HERE", "given_up")]
    assert command("deliveries", "show", "unknown").status == 1


def test_an_attempt_is_shown_with_its_note(command: Command) -> None:
    """Beside how it ended, and as a field of its own."""
    end_attempts("forged", note=AttemptNote.FORGED_ACK)
    end_attempts("well")

    assert " delivered, forged ack " in command("deliveries", "show", "forged").stdout
    assert "forged" not in command("deliveries", "show", "well").stdout
    told = command("deliveries", "show", "forged", "--json").json
    assert isinstance(told, dict)
    assert [each["note"] for each in told["attempts"]] == ["forged_ack"]


def test_held_and_expired_deliveries_are_listed_and_counted(command: Command) -> None:
    """With the reason, and how the last attempt failed."""
    ids = on_the_node(lambda node: owe(node, 3))
    on_the_node(lambda node: put_on_hold(node, ids[:1]))
    on_the_node(lambda node: put_on_hold(node, ids[1:2], HoldReason.OURS))
    listed = command("deliveries", "list", "--state", "held", "--wide")
    assert (ids[0] in listed.stdout, ids[2] in listed.stdout) == (True, False)
    page = command("deliveries", "list", "--state", "open", "--json").json
    assert isinstance(page, dict)
    told = {each["id"]: (each["state"], each["held_reason"], each["error_code"]) for each in page["deliveries"]}
    assert told == {
        ids[0]: ("held", "server", "CONN_REFUSED"),
        ids[1]: ("held", "ours", "CONN_REFUSED"),
        ids[2]: ("ready", None, None),
    }
    shown = command("deliveries", "show", ids[0]).stdout
    assert re.search("held for +server", shown)
    stats = command("deliveries", "stats", "--json").json
    assert isinstance(stats, dict)
    assert (stats["open"], stats["held"], stats["held_servers"]) == (3, 2, 1)
    assert (stats["held_by_reason"], stats["servers"][0]["held"]) == ({"server": 1, "ours": 1}, 2)
    assert "held for 1 server\n" in command("deliveries", "stats").stdout
    assert command("deliveries", "list", "--state", "expired", "--json").json == {"deliveries": [], "after": None}


def test_an_operator_holds_deliveries_and_releases_them(command: Command) -> None:
    """New ones are held at once; after the release they are due, and the link is up."""
    assert "are held (0 owed now)" in command("deliveries", "hold", PEER).stdout
    (each,) = on_the_node(lambda node: owe(node, 1))
    assert on_the_node(rows_of)[each].held_reason is HoldReason.SERVER
    assert re.search("held by an operator +yes", command("servers", "show", PEER).stdout)
    assert command("deliveries", "release", PEER).stdout == "1 delivery is released\n"
    assert on_the_node(lambda node: node.releaser.tick()) == 1
    assert on_the_node(rows_of)[each].state is DeliveryState.READY


def test_everything_held_becomes_jobs_at_once(command: Command) -> None:
    """Whatever holds them, but for those behind an older one, which follows it."""
    ids = on_the_node(lambda node: owe(node, 4))
    for each, reason in zip(ids, (HoldReason.SERVER, HoldReason.REST, HoldReason.OURS, HoldReason.ORDER), strict=True):
        on_the_node(lambda node, each=each, reason=reason: put_on_hold(node, [each], reason))  # type: ignore[misc] # now
    on_the_node(lambda node: fall(node, "TIMEOUT"))
    done = command("deliveries", "release", "--all", "--json")
    assert done.json == {"released": 3, "in_order": 1}
    rows = on_the_node(rows_of)
    assert [rows[each].state.value for each in ids] == ["ready", "ready", "ready", "held"]
    assert on_the_node(lambda node: queued(node, [f"{each}.1" for each in ids])) == [True, True, True, False]
    assert [command("deliveries", "release", *which).status for which in ([], [PEER, "--all"])] == [2, 2]


async def queued(node: Federation, ids: list[str]) -> list[bool]:
    await node.delivery_queue.start()
    return [job is not None for job in await node.delivery_queue.storage.status(ids)]


@pytest.mark.parametrize("verb", ["retry", "drop"])
@pytest.mark.parametrize("state", ["failed", "expired", "held"])
def test_a_state_alone_is_a_choice(command: Command, verb: str, state: str) -> None:
    """Deliveries in other states stay as they are."""
    failed, expired, held, _ready = on_the_node(lambda node: owe(node, 4))
    on_the_node(lambda node: give_up(node, [failed], "TIMEOUT"))
    on_the_node(lambda node: put_on_hold(node, [held]))
    on_the_node(lambda node: expire(node, [expired]))
    done = command("deliveries", verb, "--state", state, "--json", *(["--yes"] if verb == "drop" else []))
    assert isinstance(done.json, dict)
    assert done.json["retried" if verb == "retry" else "dropped"] == 1
    stats = command("deliveries", "stats", "--json").json
    assert isinstance(stats, dict)
    left = {"ready": 1, "failed": 1, "expired": 1, "held": 1} | {state: 0}
    assert {each: stats[each] for each in left} == (left | {"ready": 2} if verb == "retry" else left)


@pytest.mark.parametrize("verb", ["retry", "drop"])
def test_nothing_is_changed_in_bulk_unless_it_was_chosen(command: Command, verb: str) -> None:
    """Neither without a choice nor, for what destroys, without anybody to ask."""
    on_the_node(lambda node: owe(node, 1))
    assert command("deliveries", verb).status == 2
    assert command("deliveries", "drop", "--all").status == 1
    stats = command("deliveries", "stats", "--json").json
    assert isinstance(stats, dict)
    assert stats["open"] == 1
