"""Of a stranger's JSON no more is built than is asked for, and what is JSON stays what it was."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.protocol.activities import DELIVERY_MEMBERS, PostActivity
from federation.protocol.encodings import parse_json, parse_model
from federation.protocol.errors import NotJson, PayloadError
from federation.protocol.skimming import SHORT_BYTES, Leaf, Members, read_model, skim

SHAPE = Members(
    shapes={"a": Leaf.SCALAR, "b": Leaf.WHOLE, "c": Members(shapes={"a": Leaf.SCALAR, "d": Leaf.SCALAR})},
)
MEBIBYTE = 1024 * 1024
JUNK = "[" + "{}," * (MEBIBYTE // 3) + "{}]"


def skimmed(text: str | bytes) -> Any:
    """What is found, without what only the parse of the whole document found."""
    return _named(skim(text, SHAPE, limit=len(text)))


def expected(text: str | bytes) -> object:
    """The same by way of the whole document."""
    return _named(parse_json(text, limit=len(text)))


def _named(value: object) -> object:
    if not isinstance(value, dict):
        return None
    found = {name: value[name] for name in ("a", "b", "c") if name in value}
    if isinstance(found.get("c"), dict):
        found["c"] = {name: _scalar(found["c"][name]) for name in ("a", "d") if name in found["c"]}
    elif "c" in found:
        found["c"] = _scalar(found["c"])
    return found | ({"a": _scalar(found["a"])} if "a" in found else {})


def _scalar(value: object) -> object:
    return type(value)() if isinstance(value, dict | list) else value


names = st.sampled_from(["a", "b", "c", "d", "x", "", "\ud800", "\U0001f600"])
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters())
)
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(names, inner), max_leaves=20)
documents = st.dictionaries(names, values)


@settings(max_examples=60)
@given(documents, st.booleans(), st.sampled_from([None, 1]))
def test_what_is_found_is_what_the_whole_document_has(document: Any, ascii_only: bool, indent: int | None) -> None:
    """However it is written."""
    text = json.dumps(document, ensure_ascii=ascii_only, indent=indent)
    assert skimmed(text) == expected(text)


@settings(max_examples=60)
@given(st.binary() | documents.map(lambda document: json.dumps(document).encode()[:-1]))
def test_what_is_no_json_is_refused_in_the_same_words(raw: bytes) -> None:
    """A short text that cannot be skimmed is for `parse_json` to judge."""
    assert _outcome(skimmed, raw) == _outcome(expected, raw)


def _outcome(read: Callable[[bytes], object], raw: bytes) -> object:
    try:
        return read(raw)
    except NotJson as error:
        return str(error)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":{"x":[]},"a":"last"}',
        '{"\\u0061":"escaped"}',
        '\ufeff{"a":1}',
        '{"x":1e999,"a":-0}',
        '{"x":"\\ud800","a":"\\udc00"}',
        '{"c":"no object","b":{"x":[{}]}}',
        '{"c":[{"d":1}],"a":{"a":1}}',
        '{"a":' + "9" * 4300 + "}",
    ],
)
@pytest.mark.parametrize("pad", [0, SHORT_BYTES])
def test_rules_are_those_of_the_parser(text: str, pad: int) -> None:
    """The last of two members counts, names may be escaped, a mark may lead: also in a long text."""
    padded = (text + " " * pad).encode()
    found: Any = skimmed(padded)
    if pad and found.get("a") == "\x00":  # half a pair: no member of ours may hold either
        found["a"] = "\udc00"
    assert found == expected(padded)


@pytest.mark.parametrize(
    "text",
    [
        b"{" * 100_000,
        b'{"x":' + b"[" * 100_000,
        b'{"x":"\xff"}',
        b'{"a":NaN}',
        b'{"a":1} {}',
        b'{"a":"\\x"}',
        b'{"a":"\\ud800"',
    ],
)
def test_a_long_text_that_is_no_json_is_refused(text: bytes) -> None:
    """In one error type, whatever is wrong."""
    with pytest.raises(NotJson):
        skimmed(text + b" " * SHORT_BYTES)


HOSTILE = {
    "objects": f'{{"junk":{JUNK},"method":"FEDERATE"}}',
    "objects for a scalar": f'{{"method":{JUNK},"signature":{JUNK}}}',
    "objects for an envelope": f'{{"payload":{JUNK}}}',
    "objects in an envelope": f'{{"payload":{{"iv":{JUNK}}}}}',
    "no object": JUNK,
    "keys": "{" + ",".join(f'"{number}":1' for number in range(80_000)) + "}",
    "repeats": "{" + ",".join(['"method":[]'] * 80_000) + "}",
    "a string": '{"junk":"' + "☃" * (MEBIBYTE // 3) + '"}',
    "halves": '{"junk":"' + "\\ud800" * 5_000 + '","x":' + JUNK + "}",
    "too many halves": '{"junk":"' + "\\ud800" * 150_000 + '"}',
    "deep": "[" * MEBIBYTE,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_documents_take_no_more_than_a_few_copies_of_their_text(text: str) -> None:
    """Parsed as a whole some take thirty times as much."""
    raw = text.encode()
    tracemalloc.start()
    try:
        skim(raw, DELIVERY_MEMBERS, limit=len(raw))
    except NotJson:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 3 * len(raw)


POST = {
    "method": "FEDERATE_POST",
    "federationUrl": "https://a.example",
    "post": {
        "id": "1",
        "authorId": "a",
        "published": "2026-01-02T03:04:05Z",
        "isPrivate": False,
        "content": [{"type": "text", "value": "x"}, {"type": "image", "url": "https://x/y", "size": 1.5, "index": 0}],
    },
}


def test_a_model_reads_what_it_read() -> None:
    """With unknown members in every place, and all blocks in their order."""
    text = json.dumps(POST).replace('"type"', '"junk":[{}],"type"').replace('"id"', '"junk":{"id":2},"id"')
    assert read_model(PostActivity, text) == parse_model(PostActivity, json.dumps(POST))


@pytest.mark.parametrize("content", ["[{}]", "[1]", "{}", '"x"', "null", "[]", '[{"type":"text"}]', '[{"type":[]}]'])
def test_a_model_refuses_what_it_refused(content: str) -> None:
    """Nothing that is missing or of another kind is made up."""
    text = json.dumps(POST).replace(json.dumps(POST["post"]["content"]), content)  # type: ignore[index] # a literal above
    for read in (parse_model, read_model):
        with pytest.raises(PayloadError, match="content"):
            read(PostActivity, text)
