"""`federation activitypub follows`: who follows this node's actors, and whom these follow."""

from __future__ import annotations

import shlex

import pytest

from db import FollowDirection, FollowState
from tests.federation.activitypub.sender import ALICE, OWN
from tests.federation.admin.activities import B, C, add_alice, befriend
from tests.federation.cli.conftest import Command
from tests.federation.cli.elsewhere import on_the_node
from tests.federation.cli.test_lists import COLOUR, on_a_terminal

ZOE = f"{OWN}/users/zoe"
BOB, CAROL = f"{B}/users/bob", f"{C}/users/carol"
SHOUTING = f"{B.replace('b.', 'B.')}/users/dan"


@pytest.fixture
def meeting(command: Command, monkeypatch: pytest.MonkeyPatch, database_url: str) -> Command:
    """Bob follows alice and zoe, carol asks to follow alice; alice follows bob, and carol has refused her."""
    monkeypatch.setenv("FEDERATION_ACTIVITYPUB", "1")
    monkeypatch.setenv("DATABASE_URL", database_url)
    on_the_node(add_alice)
    on_the_node(lambda node: befriend(node, BOB, days=3))
    on_the_node(lambda node: befriend(node, BOB, direction=FollowDirection.FOLLOWING))
    on_the_node(lambda node: befriend(node, CAROL, state=FollowState.PENDING))
    following, refused = FollowDirection.FOLLOWING, FollowState.REJECTED
    on_the_node(lambda node: befriend(node, CAROL, direction=following, state=refused))
    on_the_node(lambda node: befriend(node, BOB, local=ZOE))
    on_the_node(lambda node: befriend(node, SHOUTING, local=ZOE))
    return command


def listed(command: Command, *options: str) -> list[tuple[str, ...]]:
    """The follows of a list, as ours, direction, other and state."""
    told = command("activitypub", "follows", *options, "--json").json
    assert isinstance(told, dict)
    names = ("local_actor", "direction", "remote_actor", "state")
    return [tuple(each[name].rpartition("/")[2] for name in names) for each in told["follows"]]


BOB_FOLLOWS, BOB_IS_FOLLOWED = ("alice", "follower", "bob", "accepted"), ("alice", "following", "bob", "accepted")
CAROL_ASKS, CAROL_REFUSED = ("alice", "follower", "carol", "pending"), ("alice", "following", "carol", "rejected")
BOB_FOLLOWS_ZOE, DAN_FOLLOWS_ZOE = ("zoe", "follower", "bob", "accepted"), ("zoe", "follower", "dan", "accepted")


def test_follows_are_listed_and_chosen(meeting: Command) -> None:
    """By our actor, then by the other; of one of ours, with one server, in one direction or state."""
    everyone = {BOB_FOLLOWS, BOB_IS_FOLLOWED, CAROL_ASKS, CAROL_REFUSED, BOB_FOLLOWS_ZOE, DAN_FOLLOWS_ZOE}
    assert set(listed(meeting)) == everyone
    assert listed(meeting, "--actor", ALICE) == [BOB_FOLLOWS, BOB_IS_FOLLOWED, CAROL_ASKS, CAROL_REFUSED]
    assert listed(meeting, "--server", "c.example") == [CAROL_ASKS, CAROL_REFUSED]
    assert set(listed(meeting, "--server", B, "--actor", ZOE)) == {BOB_FOLLOWS_ZOE, DAN_FOLLOWS_ZOE}
    assert listed(meeting, "--server", "https://b.exampl") == []
    assert listed(meeting, "--direction", "following") == [BOB_IS_FOLLOWED, CAROL_REFUSED]
    assert listed(meeting, "--state", "pending") == [CAROL_ASKS]
    assert listed(meeting, "--state", "rejected", "--direction", "follower") == []


def test_a_page_says_how_the_list_goes_on(meeting: Command) -> None:
    """In words that may be pasted into a shell; its last page says nothing."""
    pages, options = [], list[str]()
    for _ in range(6):
        page = meeting("activitypub", "follows", "--limit", "1", *options).stdout.splitlines()
        pages.append(page[1].split()[:3])
        options = shlex.split(page[2].removeprefix("more:")) if len(page) > 2 else []
    assert options == []
    assert [(ours.rpartition("/")[2], way, state) for ours, way, state in pages] == [
        (ours, way, state) for ours, way, _, state in listed(meeting)
    ]
    for wrong in ("x", f"{ALICE} friend {BOB}", f"{ALICE} follower"):
        done = meeting("activitypub", "follows", "--after", wrong)
        assert (done.status, done.stdout, "this is no cursor of this list" in done.stderr) == (2, "", True)


def test_who_has_no_follows_is_told_from_who_is_no_actor(meeting: Command) -> None:
    """An empty list, and status 1."""
    assert meeting("activitypub", "actors", "add", f"{OWN}/users/yan").status == 0
    assert listed(meeting, "--actor", f"{OWN}/users/yan") == []
    done = meeting("activitypub", "follows", "--actor", f"{ALICE}s")
    assert (done.status, done.stdout, f"{ALICE}s is no actor of this node" in done.stderr) == (1, "", True)


def test_the_list_fits_eighty_columns(meeting: Command) -> None:
    """With since when as an age; all else is wide, or chosen."""
    lines = COLOUR.sub("", on_a_terminal(80, "activitypub", "follows")).splitlines()
    assert lines[0].split() == ["OURS", "DIRECTION", "STATE", "AGE", "OTHER"]
    assert max(map(len, lines)) <= 80
    assert any(line.split() == ["/users/alice", "follower", "accepted", "3", "d", BOB] for line in lines)
    wide = meeting("activitypub", "follows", "--wide").stdout
    assert all(told in wide for told in (ALICE, f"{BOB}/inbox", f"{BOB}#follow", "SHARED INBOX"))
    assert meeting("activitypub", "follows", "--columns", "actor").stdout.splitlines()[1] == ALICE
