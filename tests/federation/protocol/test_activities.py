"""Payloads built, told apart and read; hostile ones end in `PayloadError`."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.protocol.activities import (
    ActivityMethod,
    FollowActivity,
    PostActivity,
    UnfollowActivity,
    follow_activity,
    parse_method,
    post_activity,
    unfollow_activity,
)
from federation.protocol.encodings import MAX_PAYLOAD_BYTES, parse_model
from federation.protocol.errors import PayloadError
from tests.federation.protocol.vectors import FOLLOW, POST

MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)

HOSTILE_TEXTS = {
    "empty": "",
    "blank": " \n",
    "null": "null",
    "number": "42",
    "string": '"FEDERATE"',
    "array": '[{"method":"FEDERATE"}]',
    "truncated": FOLLOW.plaintext[:-1],
    "two values": FOLLOW.plaintext * 2,
    "single quotes": "{'method':'FEDERATE'}",
    "NaN": '{"method":"FEDERATE","n":NaN}',
    "Infinity": '{"method":"FEDERATE","n":-Infinity}',
    "control character": '{"method":"FEDERATE","n":"\x00"}',
    "byte order mark": "\ufeff" + FOLLOW.plaintext,
    "1 MiB of junk": "x" * (1 << 20),
    "deep array": "[" * 100_000,
    "deep object": '{"a":' * 100_000,
    "deep and closed": '{"method":"FEDERATE","a":' + "[" * 100_000 + "]" * 100_000 + "}",
    "digits": '{"method":"FEDERATE","n":' + "9" * 5_000 + "}",
    "over the limit": json.dumps({"method": "FEDERATE", "a": "x" * MAX_PAYLOAD_BYTES}),
}


@pytest.mark.parametrize("method", ActivityMethod)
def test_parse_method(method: ActivityMethod) -> None:
    """Each of the four methods is recognised, whatever stands around it."""
    assert parse_method(json.dumps({"a": [1], "method": method, "b": None})) is method


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
def test_hostile_payload(text: str) -> None:
    """Text that is no JSON object of bearable size is refused as a payload."""
    with pytest.raises(PayloadError, match=r"^payload: ") as caught:
        parse_method(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
def test_hostile_plaintext(text: str) -> None:
    """The same texts out of an opened envelope are refused the same way."""
    with pytest.raises(PayloadError):
        parse_model(FollowActivity, text)


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        ("", "not one of FEDERATE, FEDERATE_POST, INSERT, UNFOLLOW"),
        ("federate", "not one of"),
        ("PROXY_RESPONSE", "not one of"),
        ("marker", "not one of"),
        (None, "not a string"),
        (1, "not a string"),
        (["FEDERATE"], "not a string"),
    ],
)
def test_wrong_method(method: object, complaint: str) -> None:
    """A method we do not carry is refused without being quoted."""
    with pytest.raises(PayloadError, match=complaint) as caught:
        parse_method(json.dumps({"method": method}))
    assert "marker" not in str(caught.value)


def test_missing_method() -> None:
    """An object without a method is refused."""
    with pytest.raises(PayloadError, match="method is missing"):
        parse_method("{}")


def test_lone_surrogate() -> None:
    """A payload that has no UTF-8 form is refused; an escaped surrogate has one and passes."""
    with pytest.raises(PayloadError, match="lone surrogate at character 27"):
        parse_method('{"method":"FEDERATE","a": "\ud800"}')
    assert parse_method('{"method":"FEDERATE","a": "\\ud800"}') is ActivityMethod.FEDERATE


def test_huge_but_valid() -> None:
    """A megabyte of well-formed payload is just a large payload."""
    assert parse_method(json.dumps({"method": "INSERT", "a": "x" * (1 << 20)})) is ActivityMethod.INSERT


def test_size_is_measured_in_bytes() -> None:
    """The limit counts UTF-8, not characters."""
    text = json.dumps({"method": "INSERT", "a": "☃" * (MAX_PAYLOAD_BYTES // 3)}, ensure_ascii=False)
    with pytest.raises(PayloadError, match="bytes of UTF-8"):
        parse_method(text)


def test_follow_builder_matches_the_known_text() -> None:
    """A built follow is byte for byte the known plaintext, and reads back."""
    text = follow_activity(
        federation_url="https://a.example",
        follow_id="11111111-1111-4111-8111-111111111111",
        created_at=MOMENT,
        follower_id="user-a",
        following_id="user-b",
        follower_server_url="https://b.example",
    )
    assert text == FOLLOW.plaintext
    follow = parse_model(FollowActivity, text)
    assert follow.federation_url == "https://a.example"
    assert follow.following.id == "11111111-1111-4111-8111-111111111111"
    assert (follow.following.follower_id, follow.following.following_id) == ("user-a", "user-b")
    assert follow.following.created_at == MOMENT
    assert follow.following.accepted is False


def test_post_builder_matches_the_known_text() -> None:
    """A built post is byte for byte the known plaintext, non-ASCII unescaped, and reads back."""
    content = json.loads(POST.plaintext)["post"]["content"]
    text = post_activity(
        federation_url="https://a.example",
        post_id="22222222-2222-4222-8222-222222222222",
        content=content,
        author_id="user-a",
        published=MOMENT.replace(tzinfo=None),
        is_private=None,
    )
    assert text == POST.plaintext
    post = parse_model(PostActivity, text).post
    assert post.content_json() == content
    assert (post.author_id, post.published, post.is_private) == ("user-a", MOMENT, False)


def test_unfollow_round_trip() -> None:
    """A built unfollow names its method and the two users."""
    text = unfollow_activity(federation_url="https://a.example", follower_id="user-a", following_id="user-b")
    assert parse_method(text) is ActivityMethod.UNFOLLOW
    unfollow = parse_model(UnfollowActivity, text)
    assert unfollow.federation_url == "https://a.example"
    assert (unfollow.following.follower_id, unfollow.following.following_id) == ("user-a", "user-b")


def _follow(**changes: object) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(FOLLOW.plaintext)
    value["following"] |= changes
    return value


def _without(value: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: member for key, member in value.items() if key != name}


@pytest.mark.parametrize(
    ("created_at", "expected"),
    [
        ("2026-01-02T03:04:05.678Z", MOMENT),
        ("2026-01-02T05:04:05.678+02:00", MOMENT),
        ("2026-01-02", datetime(2026, 1, 2, tzinfo=UTC)),
        ("Fri, 02 Jan 2026 03:04:05 GMT", MOMENT.replace(microsecond=0)),
        (1767323045678, MOMENT),
        (1767323045678.0, MOMENT),
        (None, datetime(1970, 1, 1, tzinfo=UTC)),
    ],
)
def test_created_at_forms(created_at: object, expected: datetime) -> None:
    """Dates come as ISO text, e-mail text, milliseconds or null."""
    follow = parse_model(FollowActivity, json.dumps(_follow(createdAt=created_at)))
    assert follow.following.created_at == expected


def test_null_server() -> None:
    """The follower's server must be there, but may be null."""
    follow = parse_model(FollowActivity, json.dumps(_follow(followerServerUrl=None)))
    assert follow.following.follower_server_url is None


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (_without(_follow(), "federationUrl"), "federationUrl"),
        (_without(_follow(), "following"), "following"),
        (_follow() | {"method": "UNFOLLOW"}, "method"),
        (_follow() | {"following": []}, "following"),
        (_follow(id=1), "following.id"),
        (_follow(id="x" * 513), "following.id"),
        (_follow(id="a\x00b"), "following.id"),
        (_follow(followerId=None), "following.followerId"),
        (_follow(followingId="\ud800"), "following.followingId"),
        (_follow(accepted=None), "following.accepted"),
        (_follow(accepted="false"), "following.accepted"),
        (_follow(accepted=0), "following.accepted"),
        (_follow(createdAt="soon"), "following.createdAt"),
        (_follow(createdAt="1" * 1_000), "following.createdAt"),
        (_follow(createdAt=True), "following.createdAt"),
        (_follow(createdAt=10**30), "following.createdAt"),
        (_follow(createdAt="0001-01-01T00:00:00+23:00"), "following.createdAt"),
        (_follow(createdAt=[]), "following.createdAt"),
        (_follow() | {"following": _without(_follow()["following"], "createdAt")}, "following.createdAt"),
        (
            _follow() | {"following": _without(_follow()["following"], "followerServerUrl")},
            "following.followerServerUrl",
        ),
    ],
)
def test_wrong_follow(value: dict[str, Any], where: str) -> None:
    """A member that is absent or of the wrong type is named by its path on the wire."""
    with pytest.raises(PayloadError, match=rf"^{where}: "):
        parse_model(FollowActivity, json.dumps(value))


def test_the_longest_ids_and_urls() -> None:
    """An id has up to 512 characters and a URL 2048; one more of either is refused."""
    parse_model(FollowActivity, json.dumps(_follow(id="x" * 512, followerServerUrl="y" * 2048)))
    for changes in ({"id": "x" * 513}, {"followerServerUrl": "y" * 2049}):
        with pytest.raises(PayloadError, match="following"):
            parse_model(FollowActivity, json.dumps(_follow(**changes)))


@pytest.mark.parametrize("exponent", [309, 400])
def test_infinite_created_at(exponent: int) -> None:
    """A number too large for a double is no date."""
    text = json.dumps(_follow(createdAt=0)).replace('"createdAt": 0', f'"createdAt": 1e{exponent}')
    with pytest.raises(PayloadError, match="createdAt"):
        parse_model(FollowActivity, text)


def _post(**changes: object) -> str:
    value: dict[str, Any] = json.loads(POST.plaintext)
    value["post"] |= changes
    return json.dumps(value)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "text", "value": "x"},
        {"type": "image", "url": "https://a.example/i.png", "size": 0, "index": 1.5},
        {"type": "video", "url": "ipfs://x", "size": 10**300, "index": 0},
        {"type": "audio", "url": "HTTP:\\\\a.example", "size": 1},
        {"type": "link", "url": "mailto:user@a.example"},
        {"type": "link", "url": "javascript:alert(1)"},
        {"type": "link", "url": "https://[::1]/"},
    ],
)
def test_block(block: dict[str, object]) -> None:
    """Every block a peer may send is kept as it came, minus members nobody knows."""
    post = parse_model(PostActivity, _post(content=[{**block, "unknown": 1}])).post
    assert post.content_json() == [block]


@pytest.mark.parametrize(
    "block",
    [
        None,
        "text",
        {},
        {"type": "poll"},
        {"type": ["text"], "value": "x"},
        {"type": None},
        {"type": "text"},
        {"type": "text", "value": ""},
        {"type": "text", "value": 1},
        {"type": "text", "value": "a\x00"},
        {"type": "image", "url": "https://a.example", "size": 1},
        {"type": "image", "url": "https://a.example", "size": -1, "index": 0},
        {"type": "image", "url": "https://a.example", "size": "1", "index": 0},
        {"type": "image", "url": "https://a.example", "size": True, "index": 0},
        {"type": "image", "url": "https://a.example", "size": 10**400, "index": 0},
        {"type": "audio", "url": "/relative", "size": 1},
        {"type": "link", "url": "https://"},
        {"type": "link", "url": "http:///"},
        {"type": "link", "url": "https://[::1"},
        {"type": "link", "url": "a b:c"},
        {"type": "link"},
    ],
)
def test_wrong_block(block: object) -> None:
    """A block no peer would send is named by its position."""
    with pytest.raises(PayloadError, match=r"^post\.content\.1"):
        parse_model(PostActivity, _post(content=[{"type": "text", "value": "x"}, block]))


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"content": []}, "post.content"),
        ({"content": {}}, "post.content"),
        ({"content": None}, "post.content"),
        ({"isPrivate": None}, "post.isPrivate"),
        ({"isPrivate": 0}, "post.isPrivate"),
        ({"published": "yesterday"}, "post.published"),
        ({"published": 1767323045678}, "post.published"),
        ({"published": None}, "post.published"),
        ({"authorId": 7}, "post.authorId"),
        ({"id": None}, "post.id"),
    ],
)
def test_wrong_post(changes: dict[str, object], where: str) -> None:
    """A post's wrong member is named by its path on the wire."""
    with pytest.raises(PayloadError, match=rf"^{where}: "):
        parse_model(PostActivity, _post(**changes))


def test_errors_stay_short_and_quote_nothing() -> None:
    """A payload wrong in thousands of places gives one short message without its content."""
    with pytest.raises(PayloadError) as caught:
        parse_model(PostActivity, _post(id=["marker"], content=[{"type": "marker", "marker": "marker"}] * 10_000))
    assert "marker" not in str(caught.value)
    assert str(caught.value).count("; ") == 1


def test_reprs_show_no_content() -> None:
    """A model in a log line shows no member."""
    post = parse_model(PostActivity, POST.plaintext)
    assert f"{post!r}{post}{post.post!r}{post.post.content}".count("Olá") == 0
    assert repr(post) == "PostActivity()"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_names = st.sampled_from([*json.loads(FOLLOW.plaintext)["following"], *json.loads(POST.plaintext)["post"]])


@given(text=st.text() | _json.map(json.dumps) | st.dictionaries(st.just("method"), _json).map(json.dumps))
def test_fuzzed_payloads(text: str) -> None:
    """Any text has one of the four methods or raises `PayloadError`."""
    try:
        method = parse_method(text)
    except PayloadError:
        return
    assert json.loads(text)["method"] == method


@given(
    changes=st.dictionaries(_names, _json, min_size=1), blocks=st.lists(_json | st.fixed_dictionaries({"type": _json}))
)
def test_fuzzed_models(changes: dict[str, Any], blocks: list[Any]) -> None:
    """Whatever a peer puts into an activity, the only outcomes are a model and `PayloadError`."""
    for model, text in (
        (FollowActivity, json.dumps(_follow(**changes))),
        (PostActivity, _post(**changes)),
        (PostActivity, _post(content=blocks)),
    ):
        with contextlib.suppress(PayloadError):
            assert parse_model(model, text).federation_url == "https://a.example"
