"""What we read of an activity, what we refuse, and in which line it waits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.activitypub.activities import (
    CONTEXT,
    MAX_BYTES,
    PUBLIC,
    accept,
    create,
    delete,
    follow,
    ordering_key,
    parse,
    undo,
)
from federation.delivery.outbox.ordering_keys import locked_part
from workers.checks import check_text

ALICE = "https://a.example/users/alice"
BOB = "https://b.example/users/bob"
NOTE = {"id": f"{ALICE}/notes/1", "type": "Note", "attributedTo": ALICE, "to": [PUBLIC], "content": "s3cret"}
INBOX = "https://b.example/inbox"


def like(**members: object) -> dict[str, Any]:
    return {"id": f"{ALICE}/likes/1", "type": "Like", "actor": ALICE, "object": f"{BOB}/notes/9", **members}


def test_a_text_is_kept_as_it_is() -> None:
    """Bytes, too; white space and the order of members are somebody's business."""
    text = '{ "object":{"id":"x"},"type" : "Like",\n"actor":"https://a.example/u","id":"https://a.example/1", "é":"é" }'
    for given_as in (text, text.encode()):
        activity = parse(given_as)
        assert (activity.text, activity.id, activity.type) == (text, "https://a.example/1", "Like")
        assert (activity.actor, activity.object_id) == ("https://a.example/u", "x")
        assert activity.size == len(text.encode())


def test_nobody_is_named_by_an_empty_member() -> None:
    """Nor by what an object says of another thing."""
    for activity in (like(bto=[], bcc=None), like(name={"bto": "x"}), like(object={"id": "x", "tag": {"bcc": "x"}})):
        assert parse(activity).type == "Like"
    text = json.dumps(like(object="deep")).replace('"deep"', '{"object":' * 400 + "1" + "}" * 400)
    assert parse(text).type == "Like"


def test_a_mapping_is_rendered_compactly() -> None:
    """Nothing is escaped that need not be."""
    activity = parse(like(name="é €"))
    assert activity.text == json.dumps(like(name="é €"), ensure_ascii=False, separators=(",", ":"))
    assert "s3cret" not in repr(parse(create(NOTE)))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("[]", "activity: it must be a JSON object"),
        ("s3cret", "activity: no JSON"),
        ("", "activity: no JSON"),
        (json.dumps(like()) + "s3cret", "activity: no JSON"),
        ("\ufeff" + json.dumps(like()), "activity: no JSON"),
        (b"\xff\xfe", "activity: no UTF-8"),
        ('{"id": "\ud800"}', "activity: no UTF-8"),
        (json.dumps(like(name="\ud800")), "activity: half of a surrogate pair"),
        (json.dumps(like(name="\udc00")).replace("dc00", "DC00"), "activity: half of a surrogate pair"),
        (like(name="\udfff"), "activity: no UTF-8"),
        (json.dumps(like(n=float("nan"))), "activity: no JSON: NaN"),
        (json.dumps(like(n=float("-inf"))), "activity: no JSON: -Infinity"),
        (like(n=float("nan")), "activity: it cannot be rendered"),
        (like(n=object()), "activity: it cannot be rendered"),
        ("[" * 100_000, "activity: nested too deeply"),
        ('{"id":1' + ',"id":2}', "activity: no JSON: the member 'id' is there twice"),
        (json.dumps(like())[:-1] + ',"a":{"b":1,"b":1}}', "the member 'b' is there twice"),
        ({**like(), 1: "a", "1": "b"}, "the member '1' is there twice"),
        (json.dumps(like(name="x" * MAX_BYTES)), "activity: 10"),
        (json.dumps(like(name="é" * (MAX_BYTES // 2)), ensure_ascii=False), "activity: 10"),
        (None, "activity: a mapping or its JSON, not NoneType"),
        (like(id=None), "id: missing"),
        (like(id=""), "id: missing"),
        (like(id=[f"{ALICE}/1"]), "id: missing"),
        (like(type=None), "type: missing"),
        (like(type=[]), "type: missing"),
        (like(type=["Like", 1]), "type: missing"),
        (like(type={"id": "Like"}), "type: missing"),
        (like(actor=None), "actor: missing"),
        (like(actor={"id": ALICE}), "actor: missing"),
        (like(id="urn:uuid:1"), "id: no URL of a server"),
        (like(actor="alice"), "actor: no URL of a server"),
        (like(id="https://a.example.evil/1"), "id: its origin"),
        (like(id="http://a.example/1"), "id: its origin"),
        (like(id="https://a.example:8443/1"), "id: its origin"),
        (like(id="https://a.example/\x00"), "id: no URL: "),
        (like(id="https://a.example/s3cret é"), "id: no URL: "),
        (like(id="https://a.example/s3cret 1"), "id: no URL: "),
        (like(id=ALICE + "x" * (2049 - len(ALICE))), "id: longer than 2048"),
        (like(actor="https://a.example/é"), "actor: no URL: "),
        (like(actor=ALICE + "x" * (2049 - len(ALICE))), "actor: longer than 2048"),
        (like(type="Like\x00"), "type: longer than 256 characters, or not printable"),
        (like(type=["Like", "s3cret\n"]), "type: longer than 256 characters, or not printable"),
        (like(bto=["https://b.example/s3cret"]), "bto: all receivers would see it"),
        (like(bcc="https://b.example/s3cret"), "bcc: all receivers would see it"),
        (create({**NOTE, "bcc": ["https://b.example/s3cret"]}), "bcc: all"),
        (json.dumps(like(object=[f"{ALICE}/1", {"id": f"{ALICE}/2", "bto": "https://b.example/s3cret"}])), "bto: all"),
        (undo(create({**NOTE, "bto": ["https://b.example/s3cret"]})), "bto: all"),
        (like(type="x" * 257), "type: longer than 256 characters, or not printable"),
    ],
)
def test_what_could_never_be_delivered_is_refused(bad: Any, named: str) -> None:
    """With the member's name, and without any content."""
    with pytest.raises(ValueError, match=named) as error:
        parse(bad)
    assert "s3cret" not in str(error.value)
    assert error.value.__cause__ is None


def test_the_longest_is_taken() -> None:
    """To the byte."""
    empty = len(json.dumps(like(name="")))
    assert parse(json.dumps(like(name="x" * (MAX_BYTES - empty)))).size == MAX_BYTES


def test_the_longest_names_are_taken() -> None:
    """To the character; a type may be in any script."""
    longest = ALICE + "x" * (2048 - len(ALICE))
    activity = parse(like(id=longest, actor=longest, type="é" * 256))
    assert (activity.id, activity.actor, activity.type) == (longest, longest, "é" * 256)


def test_whole_pairs_of_surrogates_and_the_origin_in_another_spelling_are_taken() -> None:
    """A pair is a character."""
    text = (
        '{"id":"HTTPS://A.example:443/1","type":["x","Undo"],"actor":"' + ALICE + '","name":"\\ud83d\\ude00 \\\\ud800"}'
    )
    assert parse(text).type == "Undo"
    assert parse(like(type=["Like", "x"])).type == "Like"


def test_what_is_about_one_object_waits_in_one_line() -> None:
    """Per inbox; the object may be named or written out."""
    note = create(NOTE)
    line = ordering_key(INBOX, parse(note))
    assert ordering_key(INBOX, parse({**note, "type": "Update", "id": f"{ALICE}/2"})) == line
    assert ordering_key(INBOX, parse(delete(ALICE, str(NOTE["id"])))) == line
    assert ordering_key(INBOX, parse({**note, "object": NOTE["id"]})) == line
    others = {
        ordering_key("https://c.example/inbox", parse(note)),
        ordering_key(INBOX, parse(create({**NOTE, "id": f"{ALICE}/notes/2"}))),
        ordering_key(INBOX, parse({**note, "type": "Announce"})),
    }
    assert len(others | {line}) == 4


def test_an_undo_waits_behind_what_it_undoes() -> None:
    """A Like and a Follow stand in the line of their own ids."""
    for activity in (like(), follow(ALICE, BOB, activity_id=f"{ALICE}/follows/1")):
        assert ordering_key(INBOX, parse(undo(activity))) == ordering_key(INBOX, parse(activity))


def test_what_has_no_objects_id_waits_in_the_line_of_its_own() -> None:
    """As a list of objects, or one that is not named."""
    note = create(NOTE)
    for about in (None, [NOTE["id"]], {"type": "Note"}, {"id": 5}, ""):
        bare = parse({**note, "object": about})
        assert ordering_key(INBOX, bare) == ordering_key(INBOX, parse({**note, "type": "Like"}))


def test_the_lines_of_an_object_have_one_lock() -> None:
    """Another object has another, and the keys are short enough."""
    notes = [parse(create({**NOTE, "id": f"{ALICE}/notes/{number}"})) for number in range(2)]
    keys = [[ordering_key(f"https://{host}.example/{'x' * 2000}", note) for host in "bcd"] for note in notes]
    assert [len({locked_part(key) for key in of_note}) for of_note in keys] == [1, 1]
    assert locked_part(keys[0][0]) != locked_part(keys[1][0])
    check_text("ordering key", keys[0][0])
    assert locked_part("any key/of@an application") == "any key/of@an application"


def test_the_helpers_make_activities() -> None:
    """Of their actor's origin, with the context at the head, addressed as their object is."""
    note = {"@context": [CONTEXT, "https://a.example/ns"], **NOTE, "cc": [f"{ALICE}/followers"]}
    made = create(note)
    assert (made["@context"], made["to"], made["cc"]) == (note["@context"], [PUBLIC], [f"{ALICE}/followers"])
    assert made["object"] == {**NOTE, "cc": note["cc"]}
    following = follow(BOB, ALICE, activity_id=f"{BOB}#follows/1")
    accepted = accept(following)
    assert (accepted["actor"], accepted["to"], accepted["object"]["id"]) == (ALICE, [BOB], following["id"])
    assert undo(following)["id"] == f"{BOB}#follows/1/undo"
    assert delete(ALICE, ALICE)["object"] == ALICE
    assert delete(ALICE, str(NOTE["id"]))["object"] == {"id": NOTE["id"], "type": "Tombstone"}
    for each in (made, following, accepted, undo(following), delete(ALICE, ALICE)):
        assert parse(each).id == each["id"]
        assert each["@context"] in (CONTEXT, note["@context"])
    assert accept(following, activity_id=f"{ALICE}#1")["id"] == f"{ALICE}#1"
    with pytest.raises(ValueError, match="object: the Follow must name"):
        accept({**following, "object": []})


@given(
    st.recursive(st.none() | st.text() | st.integers(), lambda each: st.lists(each) | st.dictionaries(st.text(), each))
)
def test_anything_is_refused_by_a_value_error_or_taken(value: Any) -> None:
    """Whatever the members are."""
    for name in ("id", "type", "actor", "object", "x"):
        try:
            activity = parse(like(**{name: value}))
        except ValueError:
            continue
        members: Mapping[str, Any] = json.loads(activity.text)
        assert members[name] == value
        check_text("ordering key", ordering_key(INBOX, activity))
