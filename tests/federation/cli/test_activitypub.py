"""`federation activitypub`, and what other commands tell of activities."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from db import ReceivedState
from federation.activitypub.received import NewActivity
from federation.runtime.composition import Federation
from tests.federation.activitypub.sender import ALICE
from tests.federation.admin import activities
from tests.federation.admin.activities import NOTE, B, C, D, add_alice, fall, hold_for, lose_inbox, receive, send_note
from tests.federation.cli.conftest import Command
from tests.federation.cli.elsewhere import on_the_node
from tests.federation.cli.test_json import SCHEMA, matches
from tests.servers import free_port


@pytest.fixture
def activitypub(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Commands of a node that has it, and alice."""
    monkeypatch.setenv("FEDERATION_ACTIVITYPUB", "1")
    on_the_node(add_alice)
    return command


@pytest.mark.parametrize(
    "arguments",
    [("actors", "list"), ("actors", "add", ALICE), ("actors", "remove", ALICE, "--yes"), ("keys", "list"),
     ("keys", "rotate", ALICE), ("follows",), ("received", "list"), ("received", "retry", "--all"), ("gone",)],
    ids=" ".join,
)  # fmt: skip
def test_where_it_is_off_a_command_says_what_turns_it_on(command: Command, arguments: tuple[str, ...]) -> None:
    """And does nothing."""
    done = command("activitypub", *arguments)
    assert (done.status, done.stdout) == (2, "")
    assert "FEDERATION_ACTIVITYPUB=1 turns on" in done.stderr


def test_actors_are_added_listed_and_removed(activitypub: Command) -> None:
    """What is no actor here is named; who did it is on record."""
    bob = ALICE.replace("alice", "bob")
    assert activitypub("activitypub", "actors", "add", bob).stdout == f"{bob} signs with {bob}#main-key\n"
    foreign = activitypub("activitypub", "actors", "add", f"{B}/users/bob")
    assert (foreign.status, "not on this node's own origin" in foreign.stderr) == (2, True)
    assert activitypub("activitypub", "actors", "remove", ALICE, "--yes").status == 0
    again = activitypub("activitypub", "actors", "remove", ALICE, "--yes")
    assert (again.status, "is no actor of this node" in again.stderr) == (1, True)
    first = activitypub("activitypub", "actors", "list", "--limit", "1").stdout
    assert (ALICE in first, f"more: --after {ALICE}" in first, bob in first) == (True, True, False)
    assert bob in activitypub("activitypub", "actors", "list", "--after", ALICE).stdout
    told = activitypub("actions", "list", "--json").json
    assert isinstance(told, dict)
    assert {each["action"] for each in told["actions"]} == {"activitypub actors add", "activitypub actors remove"}


def test_keys_are_listed_and_rotated(activitypub: Command) -> None:
    """The private half is never shown."""
    done = activitypub("activitypub", "keys", "rotate", ALICE)
    assert (done.status, f"{ALICE} will sign with {ALICE}#key-" in done.stdout) == (0, True)
    listed = activitypub("activitypub", "keys", "list", "--json")
    assert isinstance(listed.json, dict)
    assert [key["state"] for key in listed.json["keys"]] == ["in use", "next"]
    assert "private" not in listed.stdout
    unknown = activitypub("activitypub", "keys", "rotate", f"{ALICE}s")
    assert (unknown.status, "is no actor of this node" in unknown.stderr) == (1, True)


def test_what_others_sent_is_listed_and_retried(activitypub: Command) -> None:
    """What is not done, unless another state is asked for; who has it handled again is on record."""
    carol = f"{C}/users/carol"
    on_the_node(lambda node: receive(node, "one", state=ReceivedState.FAILED))
    on_the_node(lambda node: receive(node, "two", state=ReceivedState.DONE))
    on_the_node(lambda node: receive(node, "three", state=ReceivedState.NEW, actor=carol))
    on_the_node(lambda node: receive(node, "four", state=ReceivedState.FAILED, actor=carol))

    def listed(*options: str) -> list[tuple[str, str]]:
        told = activitypub("activitypub", "received", "list", *options, "--json").json
        assert isinstance(told, dict)
        return [(each["activity_id"].rpartition("/")[2], each["state"]) for each in told["activities"]]

    assert listed() == [("one", "failed"), ("three", "new"), ("four", "failed")]
    assert (listed("--state", "done"), listed("--actor", carol)) == ([("two", "done")], listed()[1:])
    first = activitypub("activitypub", "received", "list", "--limit", "1").stdout
    assert ("ValueError: why" in first, "more: --after 1" in first, carol in first) == (True, True, False)
    assert listed("--after", "1") == listed()[1:]
    for wrong in ((), ("1", "--all"), ("x",)):
        assert activitypub("activitypub", "received", "retry", *wrong).status == 2
    for beyond in ("-1", str(2**63)):
        assert activitypub("activitypub", "received", "retry", "--", beyond).status == 2
        assert activitypub("activitypub", "received", "list", "--after", beyond).status == 2
    none = activitypub("activitypub", "received", "retry", "2", "3", "9")
    assert none.status == 1
    left = "`federation activitypub received list` has those that failed, or wait"
    assert none.stdout == f"0 to be handled again; {left}\n"
    assert activitypub("activitypub", "received", "retry", "1", "2").stdout == "1 to be handled again\n"
    assert listed()[0] == ("one", "new")
    assert activitypub("activitypub", "received", "retry", "--all").stdout == "1 to be handled again\n"
    told = activitypub("actions", "list", "--json").json
    assert isinstance(told, dict)
    assert [(each["action"], each["affected"]) for each in told["actions"]] == [
        ("activitypub received retry", number) for number in (1, 1, 0)
    ]


def test_what_waits_for_its_next_attempt_is_hurried(activitypub: Command) -> None:
    """It is told apart from what had failed, and from what waits for an older one; who did it is on record."""
    for name, state in (("one", ReceivedState.NEW), ("two", ReceivedState.NEW), ("three", ReceivedState.FAILED)):
        on_the_node(lambda node, name=name, state=state: receive(node, name, state=state))
    on_the_node(lambda node: wait_for(node, "one", timedelta(hours=1)))
    behind = activitypub("activitypub", "received", "retry", "2")
    assert (behind.status, "; 2 waits for 1, which its actor sent before;" in behind.stdout) == (1, True)
    assert on_the_node(due_in) > timedelta(minutes=50)
    done = activitypub("activitypub", "received", "retry", "1", "2", "3", "--json")
    assert done.json == {"retried": 1, "hurried": 1, "behind": {"2": 1}}
    assert on_the_node(due_in) <= timedelta(0)
    assert activitypub("activitypub", "received", "retry", "1").status == 1
    on_the_node(lambda node: wait_for(node, "two", timedelta(hours=1)))
    told = activitypub("actions", "list", "--json").json
    assert isinstance(told, dict)
    assert [each["affected"] for each in told["actions"]] == [0, 2, 0]


async def wait_for(node: Federation, name: str, delay: timedelta) -> None:
    """The job of an activity is due so much later."""
    new = NewActivity(activity_hash=name, actor=f"{B}/users/bob")
    await node.tasks_queue.start()
    await node.tasks_queue.enqueue_many([new.job(delay)])


async def due_in(node: Federation) -> timedelta:
    """How long the job of the first activity waits still."""
    status = await node.tasks_queue.get_status(NewActivity(activity_hash="one", actor="").job_id)
    assert status is not None
    return timedelta(0) if status.next_run_at is None else status.next_run_at - datetime.now(UTC)


def test_what_waits_is_not_hurried_while_the_queue_is_away(
    activitypub: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything else done, and the command says why; where nothing waits it need not be there."""
    on_the_node(lambda node: receive(node, "one", state=ReceivedState.FAILED))
    on_the_node(lambda node: receive(node, "two", state=ReceivedState.NEW))
    monkeypatch.setenv("QUEUE_URL", f"redis://:s3cret@127.0.0.1:{free_port()}")
    done = activitypub("activitypub", "received", "retry", "--all")
    assert (done.status, done.stdout, "the queue federation-tasks cannot be used" in done.stderr) == (2, "", True)
    assert activitypub("activitypub", "received", "retry", "1").stdout == "1 to be handled again\n"


def test_why_tells_of_an_activity_that_somebody_else_sent(activitypub: Command) -> None:
    """Whether it was handled, or else why not; status 1 until it was."""
    on_the_node(lambda node: receive(node, "one", state=ReceivedState.FAILED))
    on_the_node(lambda node: receive(node, "two", state=ReceivedState.NEW))
    on_the_node(lambda node: receive(node, "three", state=ReceivedState.NEW))
    on_the_node(lambda node: receive(node, "four", state=ReceivedState.DONE))
    listed = activitypub("activitypub", "received", "list", "--limit", "1", "--json").json
    assert isinstance(listed, dict)
    prefix = listed["activities"][0]["activity_id"].removesuffix("one")
    told = {
        "one": (
            1,
            "it could not be handled, tried 5 times: ValueError: why; `federation activitypub received retry 1`",
        ),
        "two": (1, "it is to be handled by a process"),
        "three": (1, "it waits for number 2, which its actor sent before."),
        "four": (0, "it was handled."),
    }
    for name, (status, why) in told.items():
        done = activitypub("why", prefix + name)
        assert (done.status, done.stdout.splitlines()[0], why in done.stdout) == (status, prefix + name, True), done
        assert matches(activitypub("why", prefix + name, "--json").json, SCHEMA["types"]["WhyReceived"])


def test_inboxes_that_are_gone_are_listed(activitypub: Command) -> None:
    """Those of the last 30 days, or of another time."""
    on_the_node(lambda node: lose_inbox(node, B, days=3))
    on_the_node(lambda node: lose_inbox(node, C, days=40))
    told = [activitypub("activitypub", "gone", *since).stdout for since in ((), ("--since", "2d"), ("--since", "50d"))]
    assert [(B in each, C in each) for each in told] == [(True, False), (False, False), (True, True)]
    assert activitypub("activitypub", "gone", "--since", "soon").status == 2


def test_why_tells_where_an_activity_went(activitypub: Command) -> None:
    """Status 1 as long as it has not arrived everywhere."""
    sent = on_the_node(send_note)
    on_the_node(lambda node: activities.end(node, sent.delivery_ids[0], B))
    on_the_node(lambda node: hold_for(node, C))
    on_the_node(lambda node: fall(node, C))
    done = activitypub("why", NOTE)
    title, first, *rest = done.stdout.splitlines()
    assert (done.status, title) == (1, NOTE)
    assert first.endswith("to 3 inboxes: 1 delivered, 1 ready, 1 held.")
    assert any(f"held for server: {C}/inbox" in line for line in rest)
    assert any(line.startswith(f"  {C}: It is down since") for line in rest)
    document = activitypub("why", NOTE, "--json")
    assert matches(document.json, SCHEMA["types"]["WhyActivity"]), document.stdout

    for delivery, server in zip(sent.delivery_ids[1:], (C, D), strict=True):
        on_the_node(lambda node, row=delivery, at=server: activities.end(node, row, at))
    done = activitypub("why", NOTE)
    assert (done.status, "to 3 inboxes: 3 delivered." in done.stdout) == (0, True)


def test_why_tells_of_an_actor_and_of_an_inbox(activitypub: Command) -> None:
    """Ours by its keys, that of another server with its server."""
    on_the_node(send_note)
    on_the_node(lambda node: lose_inbox(node, B))
    done = activitypub("why", ALICE)
    assert (done.status, f"It signs with {ALICE}#main-key." in done.stdout) == (0, True)
    assert "Deliveries in its name: 3 ready." in done.stdout
    assert matches(activitypub("why", ALICE, "--json").json, SCHEMA["types"]["WhyActor"])
    done = activitypub("why", f"{B}/inbox")
    assert (done.status, done.stdout.splitlines()[0]) == (1, B)
    assert f"The inbox {B}/inbox is gone since" in done.stdout
    assert matches(activitypub("why", f"{B}/inbox", "--json").json, SCHEMA["commands"]["why"])


def test_deliveries_are_chosen_and_shown_by_their_activity(activitypub: Command) -> None:
    """As `deliveries show` names it, also once it has arrived."""
    first, second = on_the_node(send_note), on_the_node(lambda node: send_note(node, number=2))

    def chosen(*arguments: str) -> set[str]:
        page = activitypub("deliveries", "list", *arguments, "--json").json
        assert isinstance(page, dict)
        return {each["id"] for each in page["deliveries"]}

    assert chosen("--activity", NOTE) == {*first.delivery_ids}
    assert chosen("--inbox", f"{C}/inbox") == {first.delivery_ids[1], second.delivery_ids[1]}
    assert activitypub("deliveries", "list", "--inbox", "no url").status == 2
    shown = activitypub("deliveries", "show", first.delivery_ids[0]).stdout
    assert (NOTE in shown, ALICE in shown) == (True, True)
    on_the_node(lambda node: activities.end(node, first.delivery_ids[0], B))
    assert f"it sent the activity {NOTE}" in activitypub("deliveries", "show", first.delivery_ids[0]).stdout


def test_servers_of_this_wire_are_listed_and_shown(activitypub: Command) -> None:
    """By their links; of one that two wires speak with, both are shown."""
    on_the_node(lambda node: fall(node, B))
    listed = activitypub("servers", "list", "--wide").stdout
    assert re.search(rf"{B} +down .* activitypub ", listed)
    shown = activitypub("servers", "show", B).stdout
    assert ("by activitypub" in shown, re.search("link +down", shown) is not None) == (False, True)
    on_the_node(lambda node: node.links.unavailable(B, "TIMEOUT"))
    shown = activitypub("servers", "show", B).stdout
    assert all(re.search(told, shown) for told in ("by activitypub: link +down", "by sealed: link +up"))
    assert matches(activitypub("servers", "list", "--json").json, SCHEMA["commands"]["servers list"])
    shape = {"url": "text", "link": "Link", "links": ["Link"]}
    assert matches(activitypub("servers", "show", B, "--json").json, shape)
