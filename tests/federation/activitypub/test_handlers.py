"""What an application declares for activities, and for what an actor may speak."""

from __future__ import annotations

import json
import math

import pytest

from federation.activitypub.handlers import Handlers, IncomingActivity

BOB = "https://b.example/users/bob"
NOTE = "https://b.example/notes/1"
ELSEWHERE = "https://c.example/notes/1"


def incoming(**members: object) -> IncomingActivity:
    return IncomingActivity.of(json.dumps({"id": f"{BOB}/1", "type": "Create", **members}), BOB)


@pytest.mark.parametrize(
    ("thing", "may"),
    [
        (NOTE, True),
        (ELSEWHERE, False),
        ("https://b.example:8443/notes/1", False),
        ("http://b.example/notes/1", False),
        ("https://b.example.c.example/notes/1", False),
        ("no URL", False),
        (None, False),
        ([NOTE], False),
        ({"id": NOTE}, True),
        ({"id": ELSEWHERE}, False),
        ({"content": "it has no id"}, True),
        ({"id": NOTE, "attributedTo": "https://b.example/users/alice"}, True),
        ({"id": NOTE, "attributedTo": ELSEWHERE}, False),
        ({"attributedTo": [{"id": BOB}, ELSEWHERE]}, False),
        ({"id": NOTE, "actor": ELSEWHERE}, False),
        ({"id": [ELSEWHERE]}, False),
        ({"id": {"id": ELSEWHERE}}, False),
        ({"id": NOTE, "attributedTo": [[ELSEWHERE]]}, False),
        ({"id": NOTE, "attributedTo": {"id": [ELSEWHERE]}}, False),
        ({"id": None, "attributedTo": None}, True),
    ],
)
def test_an_actor_speaks_for_its_own_origin(thing: object, may: bool) -> None:
    """For what is there, by nobody of another one; all else is a claim."""
    assert incoming().vouches(thing) is may


def test_what_is_read_of_an_activity() -> None:
    """Several types, an object or its URL; what is of another kind is not there."""
    assert incoming().types == ("Create",)
    assert incoming(type=["Create", 1, "Note"]).types == ("Create", "Note")
    assert incoming(type=None).types == ()
    assert incoming(id=1).id is None
    for thing in (NOTE, {"id": NOTE}, [NOTE], [{"id": NOTE}]):
        assert incoming(object=thing).object_id == NOTE
        assert incoming(object=thing).vouches(incoming(object=thing).object)
    for thing in ({}, [NOTE, NOTE], [[NOTE]], [], ""):
        assert incoming(object=thing).object_id is None
    assert incoming(object=[{"id": NOTE}]).object == {"id": NOTE}, "a list of one is that one"
    assert "secret" not in repr(incoming(content="secret"))


def test_no_number_is_too_long_to_be_read() -> None:
    """Else an activity that is none of a function's business would fail five times, and operators would be told."""
    read = IncomingActivity.of(f'{{"large": {2**200}, "endless": -{"9" * 5_000}}}', BOB)
    assert read.members == {"large": 2**200, "endless": -math.inf}


def test_functions_are_found_by_type() -> None:
    """All of a type in the order of their declaration, each once; `*` only where there is none."""
    handlers = Handlers()
    assert not handlers
    made = [lambda: None for _ in range(4)]
    handlers.on("Create", "Update")(made[0])
    handlers.on("Create")(made[1])
    handlers.on("*")(made[2])
    assert handlers
    assert handlers.of(("Update", "Create")) == made[:2]
    assert handlers.of(("Like", "Update")) == made[:1]
    assert handlers.of(("Like",)) == handlers.of(()) == [made[2]]
    assert handlers.on_follow(made[3]) is handlers.decides_follows
    with pytest.raises(ValueError, match="declared already"):
        handlers.on_follow(made[3])
    with pytest.raises(TypeError, match="texts"):
        handlers.on()
    with pytest.raises(TypeError, match="texts"):
        handlers.on(made[0])  # type: ignore[arg-type] # a bare `@on`
