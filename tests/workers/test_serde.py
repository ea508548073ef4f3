"""JSON as bytes: compact, strict, and only `ValueError` or `TypeError` when it cannot be."""

from __future__ import annotations

from enum import IntEnum, StrEnum

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workers.serde import JsonSerde

SERDE = JsonSerde()
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


def _nested(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


@given(VALUES)
def test_json_comes_back_as_it_went(value: object) -> None:
    """Every JSON value survives the way there and back."""
    assert SERDE.loads(SERDE.dumps(value)) == value


@given(st.binary())
@example(b"1e400")
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """Foreign bytes are a value or a `ValueError`, nothing else."""
    try:
        value = SERDE.loads(data)
    except ValueError:
        return
    assert SERDE.loads(SERDE.dumps(value)) == value


def test_json_is_compact_and_readable() -> None:
    """No spaces, and text beyond ASCII as it is."""
    assert SERDE.dumps({"b": [1, None], "a": "é"}) == '{"b":[1,null],"a":"é"}'.encode()


def test_sorted_keys_make_equal_objects_equal_bytes() -> None:
    """The order in which keys were written does not show."""
    sorting = JsonSerde(sort_keys=True)
    assert sorting.dumps({"b": {"d": 1, "c": 2}, "a": 3}) == sorting.dumps({"a": 3, "b": {"c": 2, "d": 1}})


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"nul", b'"\xff"', b"NaN", b"[Infinity]", b"\xef\xbb\xbf1", "1".encode("utf-16"), b"[" * 100_000],
    ids=["empty", "torn", "word", "not UTF-8", "NaN", "Infinity", "BOM", "UTF-16", "deep"],
)
def test_what_is_not_strict_json_is_refused(data: bytes) -> None:
    """Bytes that another parser would not take either are a `ValueError`."""
    with pytest.raises(ValueError, match=r".+"):
        SERDE.loads(data)


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), b"bytes", object(), {1, 2}, "\ud800", _nested(100_000)],
    ids=["nan", "infinity", "bytes", "object", "set", "surrogate", "deep"],
)
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    """Values without a JSON form are a `TypeError` or `ValueError`, also when nested too deeply."""
    with pytest.raises((TypeError, ValueError)):
        SERDE.dumps(value)


class Own(str):
    """A text that equals no other."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class Colour(StrEnum):
    RED = "red"


class Size(IntEnum):
    BIG = 3


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({1: "a", "1": "b"}, "this one is int: [1]"),
        ({"orders": [{}, ({"x": {2.5: 0}},)]}, "this one is float: ['orders'][1][0]['x'][2.5]"),
        ({None: 1}, "this one is NoneType: [None]"),
        ([{True: 1}], "this one is bool: [0][True]"),
        ({Size.BIG: 1}, "this one is Size: [<Size.BIG: 3>]"),
        ({("a", 1): 1}, "this one is tuple: [('a', 1)]"),
        ([{Own("a"): 1, "a": 2}], "this one is there twice: [0]['a']"),
    ],
)
def test_keys_that_json_would_change_are_refused(value: object, told: str) -> None:
    """A `TypeError` names the path; nothing is stored that comes back under another key, or not at all."""
    with pytest.raises(TypeError) as raised:
        SERDE.dumps(value)
    assert str(raised.value) == f"keys in JSON are text, each once; {told}"


def test_a_key_is_looked_at_once_however_often_it_is_there() -> None:
    """What contains itself is refused as ever, and what is shared is encoded as often as it is there."""
    shared = {"a": 1}
    assert SERDE.dumps([shared, shared, {Colour.RED: shared}]) == b'[{"a":1},{"a":1},{"red":{"a":1}}]'
    circle: dict[str, object] = {}
    circle["me"] = [circle]
    with pytest.raises(ValueError, match="Circular"):
        SERDE.dumps(circle)


def test_what_json_does_to_tuples_and_enums() -> None:
    """They come back as lists, texts and numbers, as docs/queue/enqueueing.md says."""
    assert SERDE.loads(SERDE.dumps([(1, 2), Colour.RED, Size.BIG])) == [[1, 2], "red", 3]
